"""Leases on work that only one service should do at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["JOBS", "ORDERS", "Book", "BookKind", "FileBook", "Ownership", "SoleOwnership"]


class Ownership(ABC):
    """Named leases, each held by one owner at a time.

    They avoid duplicate work and do not protect data: an owner that was paused past its lease may run beside the next
    one, which must do no harm.
    """

    @abstractmethod
    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        """Take or renew the lease on `name`. False: another owner holds it.

        Raises:
            Unavailable: The medium could not be reached.
        """

    @abstractmethod
    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        """Take or renew the lease as `hold` does, storing `word` with it if this owner holds it; return the holder's
        word, which is empty where that owner stored none. A word expires with its lease.

        Raises:
            Unavailable: The medium could not be reached.
        """

    @abstractmethod
    async def release(self, name: str, *, deadline: Deadline) -> None:
        """Release the lease, if this owner holds it. A lease that is not released expires."""


class SoleOwnership(Ownership):
    """For a process that shares nothing, like the service of a directory: it holds every lease."""

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return True

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        return word

    async def release(self, name: str, *, deadline: Deadline) -> None:
        pass


_BYTES_MAX = 4096
"""Of a name, and of a text."""


@dataclass(frozen=True, slots=True)
class BookKind:
    """What a book is for.

    Attributes:
        name: In Redis it is the hash `c1/<name>`, in a directory the file `<name>.json`.
        texts_max: They are few, since every service reads all of them, again and again.
        when_full: What to do about too many.
    """

    name: str
    texts_max: int
    when_full: str


ORDERS = BookKind("orders", 4096, "withdrawn ones count too")
"""Quotas and retired weights. None is ever removed: an order that is withdrawn is a text that says so, which a service
that remembers an older one can tell from one that was lost."""

JOBS = BookKind("jobs", 256, "dismiss those that were interrupted")
"""Long operations that run, or that a restart interrupted. Those that end are removed."""


class Book(ABC):
    """Texts by name. Every method raises `Unavailable` at its deadline or when the book cannot be reached.

    Attributes:
        kind: What it is for.
        is_shared: Other services write to it too, so that it has to be read again.
    """

    is_shared: bool

    def __init__(self, kind: BookKind) -> None:
        self.kind = kind

    @abstractmethod
    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        """All of them."""

    @abstractmethod
    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        """Write a text, instead of the last one of that name. If cancelled, it is written or not, never in part.

        Raises:
            InvalidRequest: It is too long, or there are too many.
        """

    @abstractmethod
    async def remove(self, names: Collection[str], *, deadline: Deadline) -> None:
        """Remove texts; names that are not there are ignored."""

    def check(self, name: str, text: str, num_others: int) -> None:
        """Raise `InvalidRequest` if a text would make the book too large."""
        longest = max(len(name.encode()), len(text.encode()))
        if longest > _BYTES_MAX:
            raise InvalidRequest(f"one of the {self.kind.name} has at most {_BYTES_MAX} bytes", seen=longest)
        if num_others >= self.kind.texts_max:
            told = f"{self.kind.texts_max} {self.kind.name} are remembered already: {self.kind.when_full}"
            raise InvalidRequest(told, seen=num_others)


class FileBook(Book):
    """A JSON file beside the records of a directory, which only one service writes. It outlives the catalog's file.

    Args:
        folder: The directory; it exists.
        kind: What it is for.
    """

    is_shared = False

    def __init__(self, folder: Path, kind: BookKind) -> None:
        super().__init__(kind)
        self._path = folder / f"{kind.name}.json"
        self._turn = threading.Lock()  # a write continues after its caller's deadline, and the next one may begin

    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        async with deadline.scope(f"reading the {self.kind.name}"):
            return await asyncio.to_thread(self._read)

    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        async with deadline.scope(f"writing the {self.kind.name}"):
            await asyncio.shield(asyncio.to_thread(self._change, {name: text}, ()))

    async def remove(self, names: Collection[str], *, deadline: Deadline) -> None:
        async with deadline.scope(f"writing the {self.kind.name}"):
            await asyncio.shield(asyncio.to_thread(self._change, {}, names))

    def _read(self) -> dict[str, str]:
        try:
            values = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            told = f"the {self.kind.name} cannot be read: repair or delete the file"
            raise Unavailable(told, path=self._path) from error
        return {str(name): str(text) for name, text in values.items()} if isinstance(values, dict) else {}

    def _change(self, written: Mapping[str, str], removed: Collection[str]) -> None:
        with self._turn:
            before = self._read()
            for name, text in written.items():
                self.check(name, text, len(before.keys() - {name}))
            after = {name: text for name, text in {**before, **written}.items() if name not in removed}
            if after != before:
                self._replace(after)

    def _replace(self, texts: Mapping[str, str]) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            fresh.unlink(missing_ok=True)
            fresh.touch(mode=0o600, exist_ok=False)  # for its owner alone, whatever the folder's mode
            fresh.write_text(json.dumps(texts))
            fresh.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            told = f"the {self.kind.name} cannot be written: check the disk"
            raise Unavailable(told, path=self._path, error=error) from error
