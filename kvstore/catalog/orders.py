"""What operators have ordered, for all services that share the books: a text under each name, the last one counts."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["ORDERS_MAX", "FileOrders", "OrderBook", "check_order"]

ORDERS_MAX = 4096
"""They are few: every service reads all of them, again and again."""
_BYTES_MAX = 4096


class OrderBook(ABC):
    """Orders by name. None is ever deleted: one that is withdrawn is a text that says so, so that whoever remembers an
    older one can tell it from one that was lost.

    Every method raises `Unavailable` at its deadline or when the book cannot be reached.

    Attributes:
        is_shared: Others write to it too, so that it has to be read again.
    """

    is_shared: bool

    @abstractmethod
    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        """All of them."""

    @abstractmethod
    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        """Put one down, instead of the last one of that name. If cancelled, it stands there or not, never in part.

        Raises:
            InvalidRequest: It is too long, or there are too many.
        """


def check_order(name: str, text: str, held: int) -> None:
    """Refuse an order that would make the book too large.

    Args:
        name: Its name.
        text: What it says.
        held: How many others there are.

    Raises:
        InvalidRequest: It is too long, or there are too many.
    """
    if len(name.encode()) > _BYTES_MAX or len(text.encode()) > _BYTES_MAX:
        raise InvalidRequest(f"an order has at most {_BYTES_MAX} bytes", seen=max(len(name), len(text)))
    if held >= ORDERS_MAX:
        raise InvalidRequest(f"there are {ORDERS_MAX} orders already: withdrawn ones count too", seen=held)


class FileOrders(OrderBook):
    """A JSON file beside the records of a directory, whose only service writes it. It outlives the catalog's file,
    which may be made anew.

    Args:
        path: The file; its folder is there.
    """

    is_shared = False

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        async with deadline.scope("reading the orders"):
            return await asyncio.to_thread(self._read)

    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        async with deadline.scope("writing the orders"):
            await asyncio.shield(asyncio.to_thread(self._write, name, text))

    def _read(self) -> dict[str, str]:
        try:
            values = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Unavailable("the orders cannot be read: mend or delete the file", path=self._path) from error
        return {str(name): str(text) for name, text in values.items()} if isinstance(values, dict) else {}

    def _write(self, name: str, text: str) -> None:
        values = self._read()
        check_order(name, text, len(values.keys() - {name}))
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            fresh.write_text(json.dumps({**values, name: text}))
            fresh.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise Unavailable("the orders cannot be written: check the disk", path=self._path, error=error) from error
