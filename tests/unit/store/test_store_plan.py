"""What a round of retention evicts: the same from a short list of boundaries as from all of them."""

from __future__ import annotations

import hashlib
import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvstore.catalog.base import LeaveReason
from kvstore.catalog.entry import BoundaryEntry, EntryShape, EntryTable
from kvstore.eviction.candidates import POLICIES
from kvstore.eviction.hints import RELEASED, RETAINED, Hinted
from kvstore.eviction.holdings import Quota
from kvstore.eviction.policies import Policy
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.store.retention import plan as planning
from kvstore.store.retention.held import Held, Listing
from kvstore.store.retention.plan import EvictionPlan, Limits, Ranking, plan_eviction
from kvstore.store.retention.shortlist import Need, shortlist
from tests.unit.store.held_boundaries import held_of

_NOW_S = 100_000
_TENANTS = ["", "with a quota", "with a guarantee", "without", "another"]
_NAMESPACES = {NamespaceId(bytes([number]) * 16): _TENANTS[number % len(_TENANTS)] for number in range(8)}


def forest(chance: random.Random, num_boundaries: int) -> Held:
    """Prompts that share beginnings, in eight namespaces. No two boundaries were used in the same second."""
    times = chance.sample(range(_NOW_S), num_boundaries)
    entries: list[BoundaryEntry] = []
    for number, last_use_s in enumerate(times):
        namespace = chance.choice(list(_NAMESPACES))
        others = [entry for entry in entries[-30:] if entry.namespace == namespace]
        before = chance.choice(others) if others and chance.random() < 0.9 else None
        pinned_until_s = _NOW_S + 1 if chance.random() < 0.02 else 0
        entries.append(
            BoundaryEntry(
                namespace,
                PrefixHash(hashlib.sha256(b"%d" % number).digest()),
                chance.choice([64, (before.tokens if before is not None else 0) + 64]),
                before.prefix if before is not None else None,
                first_use_s=chance.randrange(_NOW_S),
                last_use_s=last_use_s,
                hits=chance.choice([0, 0, 0, 1, 7]),
                pinned_until_s=pinned_until_s,
                slices=((0,), (1,)),
                group_bytes=((0,), (chance.randrange(1, 5000),)),
            )
        )
    chance.shuffle(entries)
    return held_of(entries, [1])


@dataclass
class Case:
    """A round: what is held, and the limits that apply."""

    held: Held
    limits: Limits
    marks: Mapping[int, int]
    kept_since_s: int | None
    broken: list[int]
    policy: str
    kept: Sequence[int] = ()

    @classmethod
    def of(cls, chance: random.Random) -> Case:
        held = forest(chance, chance.randrange(1, 300))
        held_bytes = int(held.num_bytes.sum())
        quotas = {
            "with a quota": Quota(0, chance.randrange(held_bytes)),
            "with a guarantee": Quota(
                chance.randrange(held_bytes), chance.choice([None, chance.randrange(held_bytes)])
            ),
        }
        rows = range(len(held))
        priorities = [RELEASED, 30, 80, RETAINED]
        return cls(
            held,
            Limits(
                free_bytes=chance.choice([0, 1, held_bytes // 50, held_bytes // 10, held_bytes // 2, 2 * held_bytes]),
                quotas=chance.choice([{}, quotas]),
                elsewhere_bytes={"with a quota": chance.randrange(held_bytes)},
                ttl_s=chance.choice([None, None, chance.randrange(_NOW_S)]),
            ),
            marks={row: chance.choice(priorities) for row in rows if chance.random() < 0.1},
            kept_since_s=chance.choice([None, _NOW_S // 2]),
            broken=[row for row in rows if chance.random() < 0.05] if chance.random() < 0.3 else [],
            policy=chance.choice(list(POLICIES)),
            kept=[row for row in rows if chance.random() < 0.02],
        )

    def plan(self) -> EvictionPlan:
        held = self.held

        def make_policy() -> Policy:
            policy = POLICIES[self.policy]()
            return Hinted(policy) if self.marks else policy

        return plan_eviction(
            held,
            tenants=_NAMESPACES,
            now_s=_NOW_S,
            limits=self.limits,
            ranking=Ranking(make_policy, {}, self.marks),
            kept=held.flags(self.kept),
            kept_since_s=self.kept_since_s,
            broken=held.flags(self.broken),
        )


@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_the_short_list_changes_nothing(first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without quotas, hints, pins, boundaries that serve no hit or are too old, by each policy: the same
    boundaries leave, for the same reasons, in the same order, as if each one could be chosen."""
    num_victims, reasons, num_listed, num_held, num_others = 0, set[LeaveReason](), 0, 0, 0

    def count(held: Held, **arguments: object) -> object:
        nonlocal num_listed, num_held
        listed = shortlist(held, **arguments)  # type: ignore[arg-type]
        num_listed, num_held = num_listed + int(listed.sum()), num_held + len(held)
        return listed

    for seed in range(first_seed, first_seed + 100):
        case = Case.of(random.Random(seed))
        with monkeypatch.context() as patch:
            patch.setattr(planning, "shortlist", count)
            found = case.plan()
            patch.setattr(planning, "shortlist", lambda held, *, stays, **_: ~stays)
            expected = case.plan()
        if case.marks and found != expected:  # what a hint keeps holds up what it continues, and others go
            num_others += 1
            assert found.is_enough == expected.is_enough, seed
        else:
            assert found == expected, seed
        num_victims += len(found.victims)
        reasons |= {victim.reason for victim in found.victims}
        check_order(case.held, found)
    assert num_victims > 1000
    assert reasons == {LeaveReason.BROKEN, LeaveReason.EXPIRED, LeaveReason.QUOTA, LeaveReason.EVICTED}
    assert num_listed < 0.8 * num_held
    assert num_others <= 1


def check_order(held: Held, plan: EvictionPlan) -> None:
    """What continues a victim is one itself, and leaves before it."""
    place = {bytes(victim.namespace + victim.prefix): index for index, victim in enumerate(plan.victims)}
    names = [held.namespaces[held.namespace[row]] + held.prefixes[row].tobytes() for row in range(len(held))]
    for row, above in enumerate(held.above.tolist()):
        if above >= 0 and names[above] in place:
            assert place[names[row]] < place[names[above]]
            assert plan.victims[place[names[row]]].parent == place[names[above]]


def test_few_of_many_are_listed() -> None:
    """Of 300 prompts with 100 pages each, of which a hundredth must go, some hundred boundaries are looked at."""
    held = prompts(300, 100)
    nobody = held.flags(())
    free_bytes = int(held.num_bytes.sum()) // 100
    listed = shortlist(
        held,
        ranks=held.last_use_s.astype(np.float64),
        stays=nobody,
        leaves=nobody,
        marked=nobody,
        needs=[Need(np.zeros(len(held), dtype=np.int64), np.array([free_bytes]))],
    )
    assert free_bytes <= held.num_bytes[listed].sum() <= free_bytes + 1
    assert set(held.last_use_s[listed].tolist()) == {0, 1, 2}


def test_the_number_of_tenants_with_quotas_and_hints_hardly_counts() -> None:
    """An operator may set thousands of quotas."""
    took_s = []
    for num_tenants in (1, 500):
        held = Held.joined([prompts(20_000 // num_tenants, 1, namespace=number) for number in range(num_tenants)])
        quotas = {str(number): Quota(1, 10**9) for number in range(num_tenants)}
        marks = dict.fromkeys(range(0, 20000, 40), RETAINED)
        started_s = time.process_time()
        plan = plan_eviction(
            held,
            tenants={namespace: str(number) for number, namespace in enumerate(held.namespaces)},
            now_s=_NOW_S,
            limits=Limits(2000, quotas, {}, None),
            ranking=Ranking(lambda: Hinted(POLICIES["lru"]()), {}, marks),
            kept=held.flags(()),
            kept_since_s=None,
            broken=held.flags(()),
        )
        took_s.append(time.process_time() - started_s)
        assert len(plan.victims) == 2000
    assert took_s[1] < 10 * took_s[0]


def test_of_equal_ranks_the_longest_unused_is_listed() -> None:
    """After a reindex no boundary's tokens are known, so none is worth more than others by compute."""
    held = replace(prompts(300, 100), tokens=np.zeros(30_000, dtype=np.int64))
    case = Case(held, Limits(int(held.num_bytes.sum()) // 100, {}, {}, None), {}, None, [], "flops_per_byte")
    assert {victim.last_use_s for victim in case.plan().victims} == {0, 1, 2}


def test_a_boundary_takes_few_bytes() -> None:
    """A service that evicts reads millions of them, which would take a thousand bytes each as objects."""
    tracemalloc.start()
    try:
        held = prompts(100, 200)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 400 * len(held)


def test_a_boundary_that_is_listed_twice_is_held_once() -> None:
    """A walk over a server that moves its entries lists some again, maybe after they have changed."""
    held, again = prompts(2, 3), prompts(2, 3, repeated=2)
    for one, other in zip(vars_of(held), vars_of(again), strict=True):
        assert np.array_equal(one, other)


def test_boundaries_that_continue_each_other_in_a_circle_can_leave() -> None:
    """Only a corrupt catalog has them."""
    names = [PrefixHash(bytes([number]) * 32) for number in range(1, 5)]
    first = BoundaryEntry(NamespaceId(bytes(16)), names[0], 64, names[1], 1, 1, 0, 0, ((0,), (1,)), ((0,), (10,)))
    circle = [first, replace(first, prefix=names[1], parent=names[0]), replace(first, prefix=names[2], parent=names[1])]
    held = held_of(circle, [1])
    case = Case(held, Limits(30, {}, {}, None), {}, None, [], "lru")
    assert len(case.plan().victims) == 3


def vars_of(held: Held) -> list[object]:
    return [held.prefixes, held.above, held.tokens, held.num_bytes, held.last_use_s, held.num_records]


def prompts(num_prompts: int, num_pages: int, *, repeated: int = 1, namespace: int = 0) -> Held:
    """Prompts of one namespace with nothing in common, each used a second after the one before."""
    shape, listing = EntryShape((1,)), Listing()
    for prompt in range(num_prompts):
        names = [PrefixHash(hashlib.sha256(b"%d %d" % (prompt, page)).digest()) for page in range(num_pages)]
        data = []
        for page in range(num_pages):
            entry = bytearray(shape.blank(64 * (page + 1), names[page - 1] if page else None, prompt))
            entry[shape.row_at(1)] = entry[shape.sum_at(1, 0)] = 1  # type: ignore[arg-type]
            data.append(bytes(entry))
        for _ in range(repeated):
            listing.add(NamespaceId(namespace.to_bytes(16)), names, EntryTable.of(shape, list(data)))
    return listing.held()
