"""The guard of a tier: when it opens, what it refuses, how it closes, what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import EventKind, Events
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.testing.records import make_key, make_record
from kvstore.testing.waiting import until
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.refusals import PartDown, Refused

pytestmark = pytest.mark.virtual_time


class FailingTier(MemoryTier):
    """Memory that is unavailable, or hangs, on command."""

    def __init__(self) -> None:
        super().__init__(1 << 20, name="failing")
        self.fails = self.hangs = self.is_full = False
        self.failure = "out of order: mend it"
        self.kind: type[Unavailable] = Unavailable
        self.refuses: set[str] = set()
        self.no_room = "the medium is full: empty it"
        self.num_heads = self.num_versions = 0

    def _maybe_refuse(self, call: str) -> None:
        if call in self.refuses:
            raise Refused("not allowed: give us the right", call=call)

    async def _maybe_fail(self, deadline: Deadline) -> None:
        if self.hangs:
            async with deadline.scope("hanging"):
                await asyncio.sleep(60)
        if self.fails:
            raise self.kind(self.failure)

    async def head(self, keys, *, deadline):  # type: ignore[no-untyped-def]
        self.num_heads += 1
        self._maybe_refuse("head")
        await self._maybe_fail(deadline)
        return await super().head(keys, deadline=deadline)

    async def get_manifest(self, namespace, *, deadline):  # type: ignore[no-untyped-def]
        self.num_versions += 1
        self._maybe_refuse("get_manifest")
        await self._maybe_fail(deadline)
        return await super().get_manifest(namespace, deadline=deadline)

    async def get(self, key, *, deadline, allocate=None):  # type: ignore[no-untyped-def]
        await self._maybe_fail(deadline)
        return await super().get(key, deadline=deadline)

    async def put(self, record, *, deadline):  # type: ignore[no-untyped-def]
        self._maybe_refuse("put")
        return PutOutcome.FULL if self.is_full else await super().put(record, deadline=deadline)


@pytest.fixture
def inner() -> FailingTier:
    return FailingTier()


@pytest.fixture
def meters() -> Meters:
    return Meters()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
async def guard(inner: FailingTier, meters: Meters, events: Events) -> AsyncIterator[GuardedTier]:
    breaker = Breaker(failures_max=3, notice_s=0.03, hang_s=0.08, delay_first_s=0.03, delay_max_s=0.1)
    guard = GuardedTier(inner, Instruments(meters=meters, events=events), breaker=breaker, calls_max=5)
    yield guard
    await guard.aclose()


async def fail(guard: GuardedTier, match: str, timeout_s: float = 5) -> None:
    with pytest.raises(Unavailable, match=match):
        await guard.get(make_key(1), deadline=Deadline.after(timeout_s))


async def closed_again(guard: GuardedTier) -> None:
    await until(lambda: not guard.is_open, 5)


async def test_opens_after_failures_in_a_row(guard: GuardedTier, inner: FailingTier) -> None:
    """Three failures in a row open it; a success between them resets the count."""
    for _ in range(2):
        inner.fails = True
        await fail(guard, "out of order")
        await fail(guard, "out of order")
        inner.fails = False
        assert await guard.get(make_key(1), deadline=Deadline.after(5)) is None
    inner.fails = True
    for _ in range(3):
        assert not guard.is_open
        await fail(guard, "out of order")
    assert guard.is_open
    await fail(guard, "not used until")


async def test_a_part_that_does_not_answer_does_not_open_it(guard: GuardedTier, inner: FailingTier) -> None:
    """Nor does it hide that the whole tier fails."""
    inner.fails = True
    for _ in range(3):
        inner.kind = PartDown
        for _ in range(3):
            await fail(guard, "out of order")
            assert not guard.is_open
        inner.kind = Unavailable
        await fail(guard, "out of order")
    assert guard.is_open


async def test_opens_after_one_hang(guard: GuardedTier, inner: FailingTier) -> None:
    """One call that ran into a fair deadline is enough."""
    inner.hangs = True
    await fail(guard, "deadline", timeout_s=0.12)
    assert guard.is_open


async def test_its_usage_finds_out_an_idle_tier_that_hangs(
    guard: GuardedTier, inner: FailingTier, caplog: pytest.LogCaptureFixture
) -> None:
    """The inner tier knows its usage without a request, as S3 does: it is asked all the same, at most every 2 s."""
    for _ in range(10):
        await guard.usage(deadline=Deadline.after(1))
    assert inner.num_versions == 0, "its version was read when it was opened"
    await asyncio.sleep(2)
    for _ in range(10):
        await guard.usage(deadline=Deadline.after(1))
    assert inner.num_versions == 1
    inner.hangs = True
    await asyncio.sleep(2)
    with pytest.raises(Unavailable, match="did not end before its deadline"):
        await guard.usage(deadline=Deadline.after(1))
    assert guard.is_open and "is off, requests go on without it" in caplog.text


async def test_a_usage_without_a_request_is_no_answer(guard: GuardedTier, inner: FailingTier) -> None:
    """A status that is read while calls hang does not acquit the tier."""
    inner.hangs = True
    call = asyncio.ensure_future(guard.get(make_key(1), deadline=Deadline.after(0.2)))
    await asyncio.sleep(0.1)
    await guard.usage(deadline=Deadline.after(1))
    await asyncio.wait({call})
    assert isinstance(call.exception(), Unavailable) and guard.is_open


async def test_short_deadlines_prove_nothing(guard: GuardedTier, inner: FailingTier) -> None:
    """Callers with no time left do not switch a healthy tier off."""
    inner.hangs = True
    for _ in range(10):
        await fail(guard, "deadline", timeout_s=0.005)
    assert not guard.is_open


async def test_several_middling_waits_open(guard: GuardedTier, inner: FailingTier) -> None:
    """Deadlines that are short, but not too short, need several calls in a row."""
    inner.hangs = True
    await fail(guard, "deadline", timeout_s=0.04)
    await fail(guard, "deadline", timeout_s=0.04)
    assert not guard.is_open
    await fail(guard, "deadline", timeout_s=0.04)
    assert guard.is_open


async def test_callers_that_stop_waiting_open(guard: GuardedTier, inner: FailingTier) -> None:
    """A tier that hangs is found out also when its callers always leave before their deadline."""
    inner.hangs = True
    for _ in range(3):
        assert not guard.is_open
        call = asyncio.ensure_future(guard.get(make_key(1), deadline=Deadline.after(5)))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait({call})
    assert guard.is_open


async def test_answers_meanwhile_acquit(guard: GuardedTier, inner: FailingTier) -> None:
    """Waits do not count if another call was answered during them: a miss that ends a stage cancels its siblings."""
    for _ in range(3):
        inner.hangs = True
        calls = [asyncio.ensure_future(guard.get(make_key(1), deadline=Deadline.after(5))) for _ in range(4)]
        await asyncio.sleep(0.05)
        inner.hangs = False
        assert await guard.get(make_key(2), deadline=Deadline.after(5)) is None
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    assert not guard.is_open


async def test_cancelled_calls_prove_nothing(guard: GuardedTier, inner: FailingTier) -> None:
    """A caller that goes away at once says nothing about the tier, and its place is free again."""
    inner.hangs = True
    for _ in range(10):
        call = asyncio.ensure_future(guard.get(make_key(1), deadline=Deadline.after(5)))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
    assert not guard.is_open
    inner.hangs = False
    assert await guard.get(make_key(1), deadline=Deadline.after(5)) is None


async def test_probes_with_growing_delay_and_closes(guard: GuardedTier, inner: FailingTier) -> None:
    """While the tier fails it is probed ever less; no caller takes part; the first good probe closes the breaker."""
    inner.fails = True
    for _ in range(3):
        await fail(guard, "out of order")
    await asyncio.sleep(0.5)
    assert guard.is_open
    assert 3 <= inner.num_versions <= 7  # at 30, 90, 190, 290, ... ms
    inner.fails = False
    await closed_again(guard)
    assert await guard.get(make_key(1), deadline=Deadline.after(5)) is None


async def test_a_probe_that_meets_a_bug_is_not_the_last_one(
    guard: GuardedTier, inner: FailingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something that no tier should raise ends one probe, and not all probing: the tier is used again."""
    head = inner.head

    async def stumble(keys, *, deadline):  # type: ignore[no-untyped-def]
        if not inner.num_heads:
            inner.num_heads = 1
            raise KeyError("ContentLength")
        return await head(keys, deadline=deadline)

    monkeypatch.setattr(inner, "head", stumble)
    inner.fails = True
    for _ in range(3):
        await fail(guard, "out of order")
    inner.fails = False
    await closed_again(guard)
    assert inner.num_heads == 2


async def test_one_warning_one_info(guard: GuardedTier, inner: FailingTier, caplog: pytest.LogCaptureFixture) -> None:
    """However many calls fail, opening is one warning that carries the cause, closing one line of information."""
    caplog.set_level("INFO", logger="kvstore.tiers.guarded")
    inner.fails = True
    for _ in range(30):
        await fail(guard, "out of order|not used until")
    inner.fails = False
    await closed_again(guard)
    assert [(entry.levelname, "mend it" in entry.getMessage()) for entry in caplog.records] == [
        ("WARNING", True),
        ("INFO", False),
    ]


async def test_another_cause_is_shown_and_told(
    guard: GuardedTier, inner: FailingTier, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage that goes on for another cause: the next probe shows it, and the log has each cause once, by its next
    step, whatever its details are."""
    inner.fails = True
    for _ in range(3):
        await fail(guard, "out of order")
    for number in range(10):
        inner.failure = f"key {number} has expired: renew it" if number % 2 else f"out of order: mend it at={number}"
        await asyncio.sleep(0.2)
        await fail(guard, f"not used until.*reason=({inner.failure})")
    assert ["renew it" in line.getMessage() for line in caplog.records] == [False, True]


async def test_a_refused_write_is_no_outage(
    guard: GuardedTier, inner: FailingTier, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier is used on for what it does, and its usage says what it refuses. One line of the log, also for many."""
    inner.refuses = {"put"}
    for number in range(10):
        with pytest.raises(Unavailable, match="give us the right"):
            await guard.put(make_record(number), deadline=Deadline.after(5))
    assert not guard.is_open and await guard.get(make_key(1), deadline=Deadline.after(5)) is None
    assert (await guard.usage(deadline=Deadline.after(5))).refuses_writes == "not allowed: give us the right"
    assert [line.getMessage() for line in caplog.records] == [
        "tier failing refuses put, its other calls go on: not allowed: give us the right call=put"
    ]
    inner.refuses = set()
    assert await guard.put(make_record(1), deadline=Deadline.after(5)) is PutOutcome.STORED
    assert (await guard.usage(deadline=Deadline.after(5))).refuses_writes == ""


@pytest.mark.parametrize("refused", [{"head", "get_manifest"}, {"head", "get_manifest", "put"}])
async def test_refused_reads_are_an_outage(guard: GuardedTier, inner: FailingTier, refused: set[str]) -> None:
    """A probe is refused too: the tier stays off. A write whose reading of the version is refused counts as well."""
    inner.refuses = refused
    await asyncio.sleep(11)  # the version is read before the next write
    for _ in range(3):
        with pytest.raises(Unavailable, match="give us the right"):
            await guard.put(make_record(1), deadline=Deadline.after(5))
    await asyncio.sleep(1)
    assert guard.is_open
    inner.refuses = set()
    await closed_again(guard)


async def test_no_room_is_told_and_shown_until_there_is(
    guard: GuardedTier, inner: FailingTier, caplog: pytest.LogCaptureFixture
) -> None:
    """With the next step: one line when it begins, one once nothing has been refused for a while, however often both
    alternate. The usage tells of the last put; an idle tier is not judged by an old one."""
    caplog.set_level("INFO")

    async def refused() -> str:
        return (await guard.usage(deadline=Deadline.after(5))).refuses_writes

    for number in range(20):
        inner.is_full = number % 2 == 0
        await guard.put(make_record(number), deadline=Deadline.after(5))
        assert await refused() == ("the medium is full: empty it" if inner.is_full else "")
    assert not guard.is_open
    assert [line.levelname for line in caplog.records] == ["WARNING"] and "empty it" in caplog.text
    await asyncio.sleep(15)
    await guard.put(make_record(20), deadline=Deadline.after(5))
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO"]
    inner.is_full = True
    await guard.put(make_record(21), deadline=Deadline.after(5))
    assert await refused() and len(caplog.records) == 3
    await asyncio.sleep(31)
    assert not await refused()


async def test_events(guard: GuardedTier, inner: FailingTier, events: Events) -> None:
    """An outage, its end and a quarantined record are one event each; only the last names a namespace."""
    record = make_record(1)
    await guard.put(record, deadline=Deadline.after(5))
    await guard.quarantine(record.key, "a test", deadline=Deadline.after(5))
    inner.fails = True
    for _ in range(30):
        await fail(guard, "out of order|not used until")
    inner.fails = False
    await closed_again(guard)
    aside, down, back = events.after(0)
    assert [one.kind for one in (aside, down, back)] == [
        *(EventKind.QUARANTINED, EventKind.TIER_DOWN, EventKind.TIER_BACK)
    ]
    assert aside.namespace == record.key.namespace.hex() and aside.detail["prefix"] == record.key.prefix.hex()
    assert not aside.is_public and "a test" in aside.text
    assert down.is_public and back.is_public and "mend it" in str(down.detail["reason"]) and "mend it" not in down.text


async def test_calls_are_limited(guard: GuardedTier, inner: FailingTier) -> None:
    """The call over the limit is refused at once, and that does not count as the tier's failure."""
    inner.hangs = True
    calls = [asyncio.ensure_future(guard.get(make_key(1), deadline=Deadline.after(5))) for _ in range(5)]
    await asyncio.sleep(0)
    await fail(guard, "too many calls")
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    inner.hangs = False
    assert await guard.get(make_key(1), deadline=Deadline.after(5)) is None
    assert not guard.is_open


async def test_meters(guard: GuardedTier, inner: FailingTier, meters: Meters) -> None:
    """Bytes, errors and refusals are counted for the tier."""
    record = make_record(1)
    await guard.put(record, deadline=Deadline.after(5))
    await guard.put(record, deadline=Deadline.after(5))
    await guard.get(record.key, deadline=Deadline.after(5))
    await guard.get(make_key(2), deadline=Deadline.after(5))
    await guard.quarantine(record.key, "a test", deadline=Deadline.after(5))
    inner.fails = True
    for _ in range(4):
        await fail(guard, "out of order|not used until")

    def seen(name: str) -> float:
        return meters.get(f"tier_{name}", tier="failing")

    assert (seen("read_bytes"), seen("put_bytes"), seen("quarantined")) == (record.num_bytes, record.num_bytes, 1)
    assert (seen("errors"), seen("refused"), seen("open"), seen("calls")) == (3, 1, 1, 0)


async def test_closed_while_open(guard: GuardedTier, inner: FailingTier) -> None:
    """A closed tier says `Closed`, also when its breaker was open, and the probing ends."""
    inner.fails = True
    for _ in range(3):
        await fail(guard, "out of order")
    await guard.aclose()
    heads = inner.num_heads
    with pytest.raises(Closed):
        await guard.put(make_record(1), deadline=Deadline.after(5))
    await asyncio.sleep(0.1)
    assert inner.num_heads == heads


async def test_delays() -> None:
    """Delays double up to the limit. Only a caller's success resets them."""
    breaker = Breaker(failures_max=1, delay_first_s=1, delay_max_s=3)
    with pytest.raises(Unavailable), breaker.observe(Deadline.after(5)):
        raise Unavailable("out of order")
    assert breaker.is_open
    delays = []
    for _ in range(3):
        breaker.probe_failed()
        delays.append(breaker.delay_s)
    assert delays == [2, 3, 3]
    breaker.probe_succeeded()
    assert (breaker.is_open, breaker.delay_s) == (False, 3)
    with breaker.observe(Deadline.after(5)):
        pass
    assert breaker.delay_s == 1


def test_bad_limits() -> None:
    """Limits that make no sense are refused."""
    with pytest.raises(InvalidRequest):
        Breaker(failures_max=0)


async def test_a_tier_that_was_seen_to_be_away_is_left_alone_until_a_probe(
    guard: GuardedTier, inner: FailingTier, meters: Meters, events: Events
) -> None:
    """A tier that did not answer when it was opened: callers are refused, with the reason, until a probe succeeds."""
    inner.fails = True
    guard.open_breaker("nobody listens there: start it")
    guard.open_breaker("told twice")
    assert guard.is_open and meters.get("tier_open", tier="failing") == 1
    assert [event.kind for event in events.after(0)] == [EventKind.TIER_DOWN]
    await fail(guard, "not used until.*nobody listens there: start it")
    with pytest.raises(Unavailable, match="nobody listens"):
        await guard.usage(deadline=Deadline.after(5))
    inner.fails = False
    await closed_again(guard)
    assert (await guard.usage(deadline=Deadline.after(5))).num_records == 0
