"""Walks a tier and checks every record against its seal, at a bounded rate that leaves the tier usable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import format_name
from kvstore.model.keys import NamespaceId, RecordKey
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Entry, Tier

_IN_FLIGHT = 4
_READ_S = 20.0
_ATTEMPTS = 3
_PAUSE_S = 1.0
_UNREAD_IN_A_ROW_MAX = 10
_SILENT_S = 30.0
"""How long reads may fail with no success between them; a tier that freezes lets them wait, and few are tried."""
_LISTED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was quarantined."""

    name: str
    """As the tier spells it."""
    num_bytes: int
    """As the tier listed it."""
    reason: str
    """What did not match."""


@dataclass(slots=True)
class Findings:
    """What a walk has found so far."""

    num_records: int = 0
    num_bytes: int = 0
    """Bytes of the whole records."""
    num_whole: int = 0
    """Records that match their seal and their name."""
    num_bad: int = 0
    """Records that do not, and were quarantined."""
    num_gone: int = 0
    """Records that were evicted or deleted between the listing and the read."""
    num_unread: int = 0
    """Records that could not be read in three attempts."""
    bad: list[BadRecord] = field(default_factory=list)
    """The first 10,000 bad ones."""
    unread: list[str] = field(default_factory=list)
    """Names of the first 10,000 that could not be read."""


class ByteRate:
    """Lets bytes pass at a rate, without bursts."""

    def __init__(self, bytes_per_s: int) -> None:
        if bytes_per_s <= 0:
            raise InvalidRequest("a byte rate must be positive", seen=bytes_per_s)
        self._bytes_per_s = bytes_per_s
        self._next_s = SYSTEM_CLOCK.monotonic_s()

    async def take(self, num_bytes: int) -> None:
        """Wait until the bytes taken before are due, then take these."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        wait_s = self._next_s - now_s
        self._next_s = max(now_s, self._next_s) + num_bytes / self._bytes_per_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)


async def count_records(tier: Tier, namespace: NamespaceId | None = None) -> tuple[int, int]:
    """How many records a tier lists, and their bytes, to show the progress of a walk. Reads none of them."""
    num_records = num_bytes = 0
    async for entry in tier.scan(namespace):
        num_records += 1
        num_bytes += entry.num_bytes
    return num_records, num_bytes


async def verify_tier(
    tier: Tier,
    *,
    namespace: NamespaceId | None = None,
    rate: ByteRate | None = None,
    progress: Callable[[Findings], None] | None = None,
) -> Findings:
    """Read every record of a tier; the tier itself quarantines what does not match its seal.

    Args:
        tier: Not wrapped in a breaker: a walk waits for a tier to come back.
        namespace: Only records of this namespace; `None`: all.
        rate: How fast; `None`: as fast as the tier answers.
        progress: Called after each record.

    Raises:
        Unavailable: Ten records in a row could not be read, or none for half a minute: the tier is down.

    If cancelled, every record is either still in its place or quarantined whole.
    """
    walk = _Walk(tier, rate, progress)
    turns = asyncio.Semaphore(_IN_FLIGHT)

    async def check(entry: Entry) -> None:
        try:
            await walk.check(entry)
        finally:
            turns.release()

    before, tier.on_quarantine = tier.on_quarantine, walk.note_bad
    try:
        async with asyncio.TaskGroup() as group:
            async for entry in tier.scan(namespace):
                await turns.acquire()
                group.create_task(check(entry))
    except BaseExceptionGroup as errors:  # all of one kind: the first one will do
        raise errors.exceptions[0] from errors
    finally:
        tier.on_quarantine = before
    return walk.findings


class _Walk:
    """A verification of a tier while it runs."""

    def __init__(self, tier: Tier, rate: ByteRate | None, progress: Callable[[Findings], None] | None) -> None:
        self.findings = Findings()
        self._tier = tier
        self._rate = rate
        self._progress = progress
        self._reasons: dict[RecordKey, str] = {}
        self._num_unread_in_a_row = 0
        self._failing_since_s: float | None = None

    def note_bad(self, key: RecordKey, reason: str) -> None:
        """Called by the tier, in any thread, before its `get` returns."""
        self._reasons[key] = reason

    async def check(self, entry: Entry) -> None:
        if self._rate is not None:
            await self._rate.take(entry.num_bytes)
        findings, name = self.findings, format_name(entry.key)
        outcome = await self._read(entry)
        findings.num_records += 1
        if outcome is None:
            findings.num_unread += 1
            findings.unread += [name] if len(findings.unread) < _LISTED_MAX else []
        elif (reason := self._reasons.pop(entry.key, None)) is not None:
            findings.num_bad += 1
            findings.bad += [BadRecord(name, entry.num_bytes, reason)] if len(findings.bad) < _LISTED_MAX else []
        elif outcome == 0:
            findings.num_gone += 1
        else:
            findings.num_whole += 1
            findings.num_bytes += outcome
        if self._progress is not None:
            self._progress(findings)

    async def _read(self, entry: Entry) -> int | None:
        """Bytes of a whole record; 0: bad or gone; `None`: it could not be read."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            started_s = SYSTEM_CLOCK.monotonic_s()
            try:
                record = await self._tier.get(entry.key, deadline=Deadline.after(_READ_S))
            except Unavailable as error:
                last = error
                self._failing_since_s = started_s if self._failing_since_s is None else self._failing_since_s
                if SYSTEM_CLOCK.monotonic_s() - self._failing_since_s >= _SILENT_S:
                    raise Unavailable(f"gave up: no record could be read for {_SILENT_S:.0f} s: {last}") from error
                continue
            self._num_unread_in_a_row, self._failing_since_s = 0, None
            return record.num_bytes if record is not None else 0
        self._num_unread_in_a_row += 1
        if self._num_unread_in_a_row >= _UNREAD_IN_A_ROW_MAX:
            raise Unavailable(f"gave up: {_UNREAD_IN_A_ROW_MAX} records in a row could not be read: {last}")
        return None
