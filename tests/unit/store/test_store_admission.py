"""Which saves the cold tier gets, by rule: what was seen once stays in memory and in the hot tier."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise

import pytest
from store_harness import LIMITS, MIB, slow_tier, stage

from kvstore.api import Ack, Retention, SaveOutcome
from kvstore.catalog.coordination import SoleOwnership
from kvstore.errors import Unavailable
from kvstore.eviction.candidates import CANDIDATES, Candidate
from kvstore.format.record import Record
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.model.layout import Layout
from kvstore.runtime.instruments import Instruments
from kvstore.runtime.meters import Meters
from kvstore.store.limits import StoreLimits
from kvstore.store.presence import Presence
from kvstore.store.retention import RetentionParts, cold_admission
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.retention.policy_choice import PolicyChoice, candidates_of
from kvstore.store.tiered import TieredStore
from kvstore.testing.dict_pending import DictOwnership, DictPendingLog, LeaseBooks, PendingBooks
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier
from tests.virtual_time import ManualClock

pytestmark = pytest.mark.virtual_time

LEASE_S = 0.06


class AdmissionSetup:
    """Tiers that any number of services share, each with a memory and an admission of its own."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.hot, self.cold = slow_tier("redis"), slow_tier("s3")
        self.books = PendingBooks()
        self._stack = stack

    async def service(
        self,
        prompt: Prompt,
        rule: str = "second_sight",
        *,
        has_hot: bool = True,
        limits: StoreLimits = LIMITS,
        memory_bytes: int = 16 * MIB,
        choice: PolicyChoice | None = None,
    ) -> Service:
        service = Service(self, rule, has_hot, limits, memory_bytes, choice)
        self._stack.push_async_callback(service.store.aclose)
        await service.store.open_namespace(prompt.description, deadline=soon())
        return service

    def held(self, tier: FaultyTier) -> set[RecordKey]:
        assert isinstance(tier.inner, MemoryTier)
        return {key for key in tier.keys_put if key in tier.inner}

    async def arrive(self, keys: Iterable[RecordKey]) -> None:
        """Return when the cold tier has exactly these, and nothing is pending."""
        expected = set(keys)
        await until(lambda: self.held(self.cold) == expected and not self.books.entries)


class Service:
    """A store of one node."""

    def __init__(
        self,
        world: AdmissionSetup,
        rule: str,
        has_hot: bool,
        limits: StoreLimits,
        memory_bytes: int,
        choice: PolicyChoice | None,
    ) -> None:
        self.meters = Meters()
        self.parents: dict[PrefixHash, PrefixHash] = {}
        self.admission = ColdAdmission(
            rule, Instruments(meters=self.meters), lambda _, prefix: self.parents.get(prefix)
        )
        self.store = TieredStore(
            MemoryTier(memory_bytes),
            world.hot if has_hot else None,
            world.cold,
            pending=DictPendingLog(world.books, lease_s=LEASE_S) if has_hot else None,
            limits=limits,
            retention=RetentionParts(choice, self.admission),
            instruments=Instruments(meters=self.meters),
        )

    async def serve(
        self,
        prompt: Prompt,
        *,
        records: list[Record] | None = None,
        is_short: bool = False,
        retention: Retention = Retention.NORMAL,
    ) -> None:
        """As an engine does: look a prompt up, and save what is not there."""
        lookup = await self.store.lookup(prompt.query(), deadline=soon())
        retention = Retention.SHORT if is_short else retention
        for record in prompt.records() if records is None else records:
            if record.header.span.stop > lookup.resume_tokens:
                outcome = await self.store.save(record, retention=retention, deadline=soon())
                assert outcome in {SaveOutcome.STORED, SaveOutcome.EXISTS}
        assert await self.store.drain(soon()) == 0


@pytest.fixture
async def world() -> AsyncIterator[AdmissionSetup]:
    async with AsyncExitStack() as stack:
        yield AdmissionSetup(stack)


def keys_of(*prompts: Prompt) -> set[RecordKey]:
    return {record.key for prompt in prompts for record in prompt.records()}


@pytest.mark.parametrize("layout", [ATTENTION, HYBRID])
async def test_what_is_seen_once_stays_where_writing_is_cheap(world: AdmissionSetup, layout: Layout) -> None:
    """The hot tier gets every record, may let each go at once, and no pending entry stands for any; the cold tier gets
    none; the prompt is served all the same.
    """
    prompt = Prompt(layout, "a", 320)
    service = await world.service(prompt)
    await service.serve(prompt)
    assert set(world.hot.keys_put) == set(world.hot.keys_allowed) == keys_of(prompt)
    assert (world.cold.keys_put, world.books.entries) == ([], {})
    num_records = len(prompt.records())
    assert service.meters.get("declined_records", rule="second_sight") == num_records
    assert service.meters.get("declined_bytes", rule="second_sight") == sum(r.num_bytes for r in prompt.records())
    assert (await stage(service.store, prompt)).resume_tokens == 320


@pytest.mark.parametrize("whose", ["memory", "another service's", "the hot tier alone"])
async def test_what_is_seen_again_is_brought_with_its_start(world: AdmissionSetup, whose: str) -> None:
    """A longer prompt begins like one that was saved before, by whichever service: all of the first one goes to the
    cold tier, and what is new of the second one does not.
    """
    prompt, longer = Prompt(HYBRID, "a", 320), Prompt(HYBRID, "a", 640)
    first = await world.service(prompt)
    await first.serve(prompt)
    again = first if whose == "memory" else await world.service(prompt)
    if whose == "the hot tier alone":
        await first.store.aclose()
    await again.serve(longer)
    await world.arrive(keys_of(prompt))
    assert again.meters.get("admitted_later_records") == len(prompt.records())
    await again.serve(longer)
    await world.arrive(keys_of(longer))


async def test_what_is_gone_everywhere_is_kept_when_it_comes_again(world: AdmissionSetup) -> None:
    """No hot tier, and memory has let go of a prompt before it comes again: that it was seen is remembered."""
    prompt, filler = Prompt(ATTENTION, "a", 320), Prompt(ATTENTION, "b", 320)
    limits = replace(LIMITS, stage_bytes=8 * 1024)
    service = await world.service(prompt, has_hot=False, limits=limits, memory_bytes=24 * 1024)
    await service.serve(prompt)
    await service.serve(filler)
    assert not any(record.key in service.store.memory for record in prompt.records()[:5])
    assert world.cold.keys_put == []
    await service.serve(prompt)
    assert set(world.cold.keys_put) == keys_of(prompt)
    assert service.meters.get("admitted_records", rule="second_sight") > 0


@pytest.mark.parametrize("ack", [Ack.HOT, Ack.COLD])
async def test_a_save_that_asks_for_a_tier_gets_it_with_its_start(world: AdmissionSetup, ack: Ack) -> None:
    """The start of a prompt was declined; its end is saved at `hot` or `cold`: both are in the cold tier then."""
    prompt = Prompt(HYBRID, "a", 320)
    service = await world.service(prompt)
    records = prompt.records()
    await service.serve(prompt, records=records[:15])
    assert world.cold.keys_put == []
    prefixes = [prompt.boundary(64 * number).prefix for number in range(1, 6)]
    service.parents.update({above: below for below, above in pairwise(prefixes)})
    for record in records[15:]:
        assert await service.store.save(record, ack=ack, deadline=soon()) is SaveOutcome.STORED
    await world.arrive(keys_of(prompt))


@pytest.mark.parametrize("ack", [Ack.HOT, Ack.COLD])
async def test_what_was_declined_is_promised_later(world: AdmissionSetup, ack: Ack) -> None:
    """The same record, once for memory alone and once at a level: it reaches the cold tier, and until then the hot tier
    keeps it.
    """
    prompt = Prompt(ATTENTION, "a", 64)
    service, other = await world.service(prompt), await world.service(prompt)
    await service.serve(prompt)
    for record in prompt.records():
        outcome = await other.store.save(record, ack=ack, deadline=soon())
        assert outcome is (SaveOutcome.EXISTS if ack is Ack.HOT else SaveOutcome.STORED)
    await world.arrive(keys_of(prompt))


async def test_a_rule_that_ends_leaves_no_hole(world: AdmissionSetup) -> None:
    """A start was declined; then everything is let in: whoever goes on with that prompt brings the start."""
    prompt, longer = Prompt(HYBRID, "a", 320), Prompt(HYBRID, "a", 640)
    service = await world.service(prompt)
    await service.serve(prompt)
    await service.admission.agree({prompt.namespace: "x"}, "all", SoleOwnership(), soon())
    await service.serve(longer)
    await world.arrive(keys_of(longer))


async def test_nothing_is_declined_by_default(world: AdmissionSetup) -> None:
    """`all`: every record goes everywhere, and a lookup has nothing to bring."""
    prompt = Prompt(ATTENTION, "a", 320)
    service = await world.service(prompt, "all")
    await service.serve(prompt)
    await world.arrive(keys_of(prompt))
    await service.serve(prompt)
    assert service.meters.get("admitted_records", rule="all") == 10
    assert service.meters.get("admitted_later_records") == 0


async def test_what_is_for_a_short_time_is_not_brought(world: AdmissionSetup) -> None:
    """A record that was saved for a short time stays in memory, however often it is seen."""
    prompt = Prompt(ATTENTION, "a", 320)
    service = await world.service(prompt)
    await service.serve(prompt, is_short=True)
    await service.serve(prompt)
    assert (world.hot.keys_put, world.cold.keys_put) == ([], [])


async def test_what_finds_no_room_in_the_queue_is_brought_when_it_is_seen_again(world: AdmissionSetup) -> None:
    """The cold tier is away when a prompt is seen again, and the queue to it is short."""
    prompt = Prompt(ATTENTION, "a", 320)
    limits = replace(LIMITS, write_back_bytes=6 * 1192, write_back_attempts=1_000_000)
    service = await world.service(prompt, has_hot=False, limits=limits)
    await service.serve(prompt)
    world.cold.down = True
    await service.store.lookup(prompt.query(), deadline=soon())
    await until(lambda: service.meters.get("write_back_dropped", tier="s3", reason="queue_full") > 0)
    world.cold.down = False
    assert await service.store.drain(soon()) == 0
    assert len(world.cold.keys_put) == 6
    await service.serve(prompt)
    await world.arrive(keys_of(prompt))


async def test_generated_tokens_are_brought_with_the_next_turn(world: AdmissionSetup) -> None:
    """Records behind a prompt's end, which no lookup asked for, are declined; the next turn of the conversation asks
    for them, and they are there.
    """
    prompt, answer = Prompt(ATTENTION, "a", 320), Prompt(ATTENTION, "a", 512)
    service = await world.service(prompt)
    await service.serve(prompt, records=answer.records())
    assert world.cold.keys_put == []
    await service.serve(Prompt(ATTENTION, "a", 640))
    await world.arrive(keys_of(answer))


class TestTheRule:
    def admission(self, clock: ManualClock, rule: str = "all") -> ColdAdmission:
        return ColdAdmission(rule, Instruments(clock=clock))

    async def test_services_follow_the_owner(self) -> None:
        """Whoever holds the namespace says the rule; when it dies the other one says its own, and without any word
        each follows its own setting.
        """
        clock, books = ManualClock(), LeaseBooks()
        namespace, lease = NamespaceId(bytes(16)), {NamespaceId(bytes(16)): "retention/cold/00"}
        owner, other = self.admission(clock, "second_sight"), self.admission(clock)
        holds = [DictOwnership(books, lease_s=10.0, clock=clock) for _ in range(2)]
        assert (owner.rule_of(namespace), other.rule_of(namespace)) == ("second_sight", "all")
        await owner.agree(lease, "second_sight", holds[0], soon())
        await other.agree(lease, "all", holds[1], soon())
        assert other.rule_of(namespace) == "second_sight"
        assert other.rules() == {namespace.hex(): "second_sight"}
        clock.now_s += 4
        await owner.agree(lease, "all", holds[0], soon())
        await other.agree(lease, "second_sight", holds[1], soon())
        assert other.rule_of(namespace) == owner.rule_of(namespace) == "all"
        assert await holds[0].hold("retention/cold/00", deadline=soon())  # renewed for eviction: its word stays
        clock.now_s += 11
        await other.agree(lease, "second_sight", holds[1], soon())
        assert other.rule_of(namespace) == "second_sight"
        clock.now_s += 16
        assert other.rule_of(namespace) == "all"

    async def test_it_is_not_asked_for_at_every_look(self) -> None:
        """Seconds pass before the owner is asked again; an owner that cannot be asked is asked again later."""

        class Silent(SoleOwnership):
            num_asked = 0

            async def agree(self, name: str, word: str, *, deadline: object) -> str:
                self.num_asked += 1
                raise Unavailable("nobody answers")

        clock, ownership = ManualClock(), Silent()
        admission = self.admission(clock)
        for _ in range(40):
            if ownership.num_asked == 0:
                with pytest.raises(Unavailable):
                    await admission.agree({NamespaceId(bytes(16)): "x"}, "all", ownership, soon())
            await admission.agree({NamespaceId(bytes(16)): "x"}, "all", SoleOwnership(), soon())
            clock.now_s += 0.05
        assert ownership.num_asked == 1

    async def test_an_unknown_word_is_not_followed(self) -> None:
        """An owner of another version may announce a rule that this one does not have, or none."""
        clock, books, namespace = ManualClock(), LeaseBooks(), NamespaceId(bytes(16))
        admission = self.admission(clock, "second_sight")
        for word in ("on_third_sight", "by_size", ""):
            books.held["lease"] = "the owner", clock.now_s + 60, word
            await admission.agree({namespace: "lease"}, "all", DictOwnership(books, lease_s=9.0, clock=clock), soon())
            assert admission.rule_of(namespace) == "second_sight"
            clock.now_s += 4

    def test_a_choice_has_what_its_settings_name(self) -> None:
        """Either setting may be `auto`."""
        assert candidates_of("auto", "auto") == list(CANDIDATES)
        assert candidates_of("lru", "second_sight") == [Candidate("lru", "second_sight")]
        assert candidates_of("lru", "auto") == [Candidate("lru"), Candidate("lru", "second_sight")]

    @pytest.mark.parametrize("setting", ["auto", "second_sight"])
    async def test_auto_declines_only_where_the_tier_is_nearly_full(self, setting: str) -> None:
        """Much is seen once, some twice: what is seen once would push out the rest. While there is room all is let in;
        a fixed rule holds always.
        """
        admission = self.admission(ManualClock())
        choice = PolicyChoice(candidates_of("lru", setting), admission)
        for number in range(2000):
            name = f"often {number // 4 % 30}" if number % 4 == 0 else f"once {number}"
            prompt = Prompt(ATTENTION, name, 256, step_tokens=64)
            choice.observe(prompt.query(), ATTENTION)
            if number % 500 == 499:
                await choice.settle(160 * 1000, 1000, is_near=False)
        assert choice.rule == ("all" if setting == "auto" else setting)
        await choice.settle(160 * 1000, 1000, is_near=True)
        assert choice.rule == "second_sight"
        await choice.settle(160 * 1000, 1000, is_near=False)
        assert choice.rule == ("all" if setting == "auto" else setting)


class TestBounds:
    def test_what_is_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Names of the last boundaries are kept, older ones forgotten; sightings take four bytes each."""
        monkeypatch.setattr(cold_admission, "_NAMES_MAX", 100)
        admission = ColdAdmission("second_sight", Instruments(clock=ManualClock()))
        for number in range(40):
            for record in Prompt(ATTENTION, f"prompt {number}", 320).records():
                assert not admission.takes(record)
        assert len(vars(admission)["_declined"]) == 100
        admission.fit(10_000)
        assert admission._rules["second_sight"]._marks.buffer_info()[1] == 10_000  # type: ignore[attr-defined]
        before = admission._rules["second_sight"]
        admission.fit(15_000)
        assert admission._rules["second_sight"] is before
        admission.fit(1 << 40)
        assert admission._rules["second_sight"]._marks.buffer_info()[1] == 1 << 22  # type: ignore[attr-defined]

    def test_tenants_do_not_see_each_others_prompts(self) -> None:
        """The same prompt in another namespace is a first sight there."""
        admission = ColdAdmission("second_sight", Instruments(clock=ManualClock()))
        one, other = Prompt(ATTENTION, "a", 320, tenant="one"), Prompt(ATTENTION, "a", 320, tenant="other")
        for prompt in (one, other):
            assert admission.seen(Presence(ATTENTION, prompt.query())) == []
            assert not admission.takes(prompt.record(64))
        admission.seen(Presence(ATTENTION, one.query()))
        assert admission.takes(one.record(320))
        assert not admission.takes(other.record(320))


class Follows(PolicyChoice):
    """Every tenant's hints are followed."""

    def follows(self, tenant: str) -> bool:
        return True


@pytest.mark.parametrize("is_followed", [True, False])
async def test_hints_decide_for_prompts_that_were_seen_once(world: AdmissionSetup, is_followed: bool) -> None:
    """While they are followed, what will be used again is written to the cold tier at once, with the start that the
    rule had declined; what will not be is not, until it is looked up again all the same.
    """
    start, whole = Prompt(ATTENTION, "a", 128), Prompt(ATTENTION, "a", 320)
    other = Prompt(ATTENTION, "b", 128)
    choice = Follows([Candidate("lru")]) if is_followed else PolicyChoice([Candidate("lru")])
    service = await world.service(whole, choice=choice)
    await service.serve(start)
    assert world.cold.keys_put == []
    service.parents.update(
        {whole.boundary(tokens).prefix: whole.boundary(tokens - 64).prefix for tokens in range(128, 321, 64)}
    )
    await service.serve(whole, retention=Retention.RETAINED)
    await service.serve(other, retention=Retention.RELEASED)
    if is_followed:
        await world.arrive(keys_of(whole))
    else:
        await world.arrive(keys_of(start))  # its second sight
    all_rules = await world.service(other, "all", choice=choice)
    released = Prompt(ATTENTION, "c", 128)
    await all_rules.serve(released, retention=Retention.RELEASED)
    held = keys_of(whole if is_followed else start) | (set() if is_followed else keys_of(released))
    await world.arrive(held)
    await all_rules.serve(released)
    await world.arrive(held | keys_of(released))
