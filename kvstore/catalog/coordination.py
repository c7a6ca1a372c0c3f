"""Coordination of services that share a store: leases on work, small stores of texts, and marks."""

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
from kvstore.model.keys import NamespaceId
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.files import read_regular

_BYTES_MAX = 4096
"""Of a name, and of a text."""
MARKS_MAX = 65_536
"""Marks of a namespace beyond which no more are taken: some 6 MB."""


class Ownership(ABC):
    """Named leases, each held by one owner at a time.

    They avoid duplicate work and do not protect data. An owner that was paused past its lease may run beside the next
    one, so the work must be harmless when it is done twice.
    """

    @abstractmethod
    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        """Take or renew the lease on `name`. False: another owner holds it.

        Raises:
            Unavailable: The medium could not be reached.
        """

    @abstractmethod
    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        """Take or renew the lease like `hold`. The holder stores `word` with it; every caller gets the holder's word,
        or an empty one if the holder stored none. A word expires with its lease.

        Raises:
            Unavailable: The medium could not be reached.
        """

    @abstractmethod
    async def release(self, name: str, *, deadline: Deadline) -> None:
        """Release the lease, if this owner holds it. A lease that is not released expires."""


class SoleOwnership(Ownership):
    """Holds every lease: for a process that shares nothing, like the service of a directory."""

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        return True

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        return word

    async def release(self, name: str, *, deadline: Deadline) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TextStoreKind:
    """What a text store is for.

    Attributes:
        name: In Redis its hash is `c1/<name>`, in a directory its file is `<name>.json`.
        texts_max: Texts that it takes. They are few, since every service reads all of them repeatedly.
        when_full: The operator's next step when it is full.
    """

    name: str
    texts_max: int
    when_full: str


OPERATOR_RULES = TextStoreKind("orders", 4096, "withdrawn ones count too")
"""Quotas and retired weights. None is ever removed. A withdrawn rule is stored as withdrawn: a service that
remembers the older rule can distinguish that from a lost text."""

JOBS = TextStoreKind("jobs", 256, "dismiss those that were interrupted")
"""Long operations that run, or that a restart interrupted. Those that end are removed."""


FOREIGN_TEXT = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading a text of another form raises: one of a later release, or damaged. Readers pass over it, and keep it."""


class TextStore(ABC):
    """A few small texts by name, such as the rules of operators. Every method raises `Unavailable` at its deadline or
    when the medium cannot be reached.
    """

    is_shared: bool
    """Whether other services write to it too, so that its texts must be read again."""

    def __init__(self, kind: TextStoreKind) -> None:
        self.kind = kind

    @abstractmethod
    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        """All texts."""

    @abstractmethod
    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        """Write a text, replacing the previous one of that name. If cancelled, it is written or not, never in part.

        Raises:
            InvalidRequest: It is too long, or there are too many.
        """

    @abstractmethod
    async def remove(self, names: Collection[str], *, deadline: Deadline) -> None:
        """Remove texts; names without one are ignored."""

    def check(self, name: str, text: str, num_others: int) -> None:
        """Raise `InvalidRequest` if the store would become too large with this text."""
        longest = max(len(name.encode()), len(text.encode()))
        if longest > _BYTES_MAX:
            raise InvalidRequest(f"one of the {self.kind.name} has at most {_BYTES_MAX} bytes", seen=longest)
        if num_others >= self.kind.texts_max:
            message = f"the store has {self.kind.texts_max} {self.kind.name} already: {self.kind.when_full}"
            raise InvalidRequest(message, seen=num_others)


class MarkBook(ABC):
    """Marks on boundaries, by namespace, for the service that evicts. They are hints: a lost mark costs no record.

    Every method raises `Unavailable` at its deadline or when the medium cannot be reached.
    """

    @abstractmethod
    async def put(self, namespace: NamespaceId, marks: Mapping[bytes, bytes], *, deadline: Deadline) -> bool:
        """Set the marks of boundaries, by prefix. False: the namespace has `MARKS_MAX` already, and nothing is set."""

    @abstractmethod
    async def read(self, namespace: NamespaceId, *, deadline: Deadline) -> Mapping[bytes, bytes]:
        """All marks of a namespace, by prefix."""

    @abstractmethod
    async def drop(self, namespace: NamespaceId, prefixes: Collection[bytes], *, deadline: Deadline) -> None:
        """Remove marks; prefixes without one are ignored."""


class LocalMarkBook(MarkBook):
    """Marks in this process's memory, and lost with it: for a store that one service evicts from."""

    def __init__(self) -> None:
        self._marks: dict[NamespaceId, dict[bytes, bytes]] = {}

    async def put(self, namespace: NamespaceId, marks: Mapping[bytes, bytes], *, deadline: Deadline) -> bool:
        held = self._marks.setdefault(namespace, {})
        if len(held) >= MARKS_MAX:
            return False
        held.update(marks)
        return True

    async def read(self, namespace: NamespaceId, *, deadline: Deadline) -> Mapping[bytes, bytes]:
        return dict(self._marks.get(namespace, {}))

    async def drop(self, namespace: NamespaceId, prefixes: Collection[bytes], *, deadline: Deadline) -> None:
        held = self._marks.get(namespace, {})
        for prefix in prefixes:
            held.pop(prefix, None)
        if not held:
            self._marks.pop(namespace, None)


class FileTextStore(TextStore):
    """Texts in a JSON file beside the records, in a directory that exists and that only one service writes. The file
    survives a loss of the catalog.
    """

    is_shared = False

    def __init__(self, folder: Path, kind: TextStoreKind) -> None:
        super().__init__(kind)
        self._path = folder / f"{kind.name}.json"
        self._lock = threading.Lock()  # a write continues after its caller's deadline, and the next one may begin

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
            return {name: str(text) for name, text in json.loads(read_regular(self._path)).items()}
        except FileNotFoundError:
            return {}
        except (OSError, *FOREIGN_TEXT) as error:
            message = f"the {self.kind.name} cannot be read: repair or delete the file"
            raise Unavailable(message, path=self._path) from error

    def _change(self, written: Mapping[str, str], removed: Collection[str]) -> None:
        with self._lock:
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
            fresh.touch(mode=0o600, exist_ok=False)  # only the owner may read it, even in a folder that others may read
            fresh.write_text(json.dumps(texts))
            fresh.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            message = f"the {self.kind.name} cannot be written: check the disk"
            raise Unavailable(message, path=self._path, error=error) from error
