"""What hints say of stored boundaries, from any service to the one that evicts."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvstore.catalog.coordination import MARKS_MAX, MarkBook
from kvstore.errors import Closed, KVStoreError
from kvstore.eviction.hints import SAME_USE_S, Hint
from kvstore.model.keys import PREFIX_BYTES, NamespaceId
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.retention.held import Held

_MARK = struct.Struct("<IIB")
_FLUSH_S, _CALL_S = 1.0, 5.0
_AWAITED_S = 3600
"""How long a mark is kept for a boundary that the catalog does not have: it may be on its way."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A hint on one boundary.

    Attributes:
        at_s: When it was given, in seconds since the Unix epoch; `until_s`: when it ends.
        priority: As in `Hint`.
    """

    at_s: int
    until_s: int
    priority: int

    def pack(self) -> bytes:
        """`at_s` u32, `until_s` u32, `priority` u8; little-endian."""
        return _MARK.pack(self.at_s, self.until_s, self.priority)

    @classmethod
    def unpack(cls, data: bytes) -> Mark | None:
        """The inverse; `None`: it is not a mark."""
        return cls(*_MARK.unpack(data)) if len(data) == _MARK.size else None

    def is_over(self, last_use_s: int, now_s: int) -> bool:
        """Whether its time is over, or the boundary was used since."""
        return self.until_s <= now_s or last_use_s > self.at_s + SAME_USE_S


class HintMarks:
    """Tells the service that evicts what every service was hinted at. The marks of boundaries are in a book that the
    services share: written in the background, and read for a round of retention.

    Hints may be lost: what does not fit, or waits while the book does not answer, is dropped and counted.

    Args:
        book: Shared with the other services of the catalog; stays the caller's.
    """

    def __init__(self, book: MarkBook, instruments: Instruments) -> None:
        self._book = book
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._waiting: dict[NamespaceId, dict[bytes, bytes]] = {}
        self._num_waiting = 0
        self._background = Background("hints")

    def start(self) -> None:
        """Pass marks on from now on, until `aclose`."""
        self._background.repeat(self._flush, "marks", every_s=_FLUSH_S)

    def add(self, prompt: EndedPrompt, hint: Hint, page_tokens: int) -> None:
        """Mark the last page of a prompt and its end. Never waits."""
        now_s = self._clock.wall_ms() // 1000
        mark = Mark(now_s, now_s + max(1, round(hint.for_s)), hint.priority).pack()
        waiting = self._waiting.setdefault(prompt.namespace, {})
        for boundary in {prompt.last_page(page_tokens), *prompt.boundaries[-1:]}:
            if boundary is None:
                continue
            if self._num_waiting >= MARKS_MAX:
                self._meters.add("hints_dropped", reason="full")
                continue
            self._num_waiting += boundary.prefix not in waiting
            waiting[boundary.prefix] = mark

    async def flush(self, deadline: Deadline) -> None:
        """Pass on what waits.

        Raises:
            Unavailable: The book does not answer; the marks of this namespace are lost.
        """
        while self._waiting:
            namespace, marks = self._waiting.popitem()
            self._num_waiting -= len(marks)
            try:
                has_room = not marks or await self._book.put(namespace, marks, deadline=deadline)
            except KVStoreError:
                self._meters.add("hints_dropped", len(marks), reason="unavailable")
                raise
            if not has_room:
                self._meters.add("hints_dropped", len(marks), reason="full")

    async def read(self, namespaces: Iterable[NamespaceId], deadline: Deadline) -> dict[bytes, Mark]:
        """The marks of namespaces, by name of the boundary (namespace and prefix); none where they cannot be read."""
        found: dict[bytes, Mark] = {}
        with suppress(KVStoreError):  # what is in the book stays there for a later round
            await self.flush(deadline)
            for namespace in namespaces:
                for prefix, data in (await self._book.read(namespace, deadline=deadline)).items():
                    if (mark := Mark.unpack(data)) is not None:
                        found[namespace + prefix] = mark
        return found

    async def drop(self, names: Iterable[bytes], deadline: Deadline) -> None:
        """Remove marks by name; those that cannot be removed now are removed by a later round."""
        by_namespace: dict[NamespaceId, list[bytes]] = {}
        for name in names:
            by_namespace.setdefault(NamespaceId(name[:-PREFIX_BYTES]), []).append(name[-PREFIX_BYTES:])
        try:
            for namespace, prefixes in by_namespace.items():
                await self._book.drop(namespace, prefixes, deadline=deadline)
        except KVStoreError:
            return

    async def _flush(self) -> None:
        try:
            await self.flush(Deadline.after(_CALL_S, self._clock))
        except Closed:
            raise
        except KVStoreError:
            return

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        await self._background.aclose()


def applying(marks: Mapping[bytes, Mark], held: Held, now_s: int) -> tuple[dict[int, int], list[bytes]]:
    """By row the priorities of boundaries to which a mark applies now, and the names of marks that are over. Pure."""
    rows = held.rows_of(marks)
    over = {name for name, row in rows.items() if marks[name].is_over(int(held.last_use_s[row]), now_s)}
    priorities = {row: marks[name].priority for name, row in rows.items() if name not in over}
    late = [
        name
        for name, mark in marks.items()
        if name not in rows and (mark.until_s <= now_s or mark.at_s + _AWAITED_S <= now_s)
    ]
    return priorities, [*over, *late]
