"""Which boundaries are evicted from the cold tier, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.catalog.base import LeaveReason, Leaving
from kvstore.eviction.holdings import SHARED, Holdings, Quota
from kvstore.eviction.policies import Policy
from kvstore.eviction.prefixes import Node
from kvstore.model.keys import NamespaceId, PrefixHash
from kvstore.store.retention.broken import Flags, Numbers
from kvstore.store.retention.held import Held
from kvstore.store.retention.shortlist import Need, shortlist


@dataclass(frozen=True, slots=True)
class Victim:
    """A boundary that is to be evicted."""

    namespace: NamespaceId
    prefix: PrefixHash
    last_use_s: int
    reason: LeaveReason
    parent: int | None = None
    """Index, among all victims, of its parent, which may only be evicted after this one; `None`: the parent stays."""

    def leaving(self, place: Mapping[int, int]) -> Leaving:
        """The catalog's form of it, with the parent given as its place in the same call, if it is there."""
        parent = None if self.parent is None else place.get(self.parent)
        return Leaving(self.namespace, self.prefix, self.last_use_s, parent)


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What is to be evicted."""

    victims: list[Victim]
    """Each before its parent."""
    is_enough: bool
    """Budget and quotas are met after that."""
    has_broken: bool = False
    """Whether there are boundaries that serve no hit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tier, and each tenant in it, may hold."""

    free_bytes: int
    """Bytes to free to meet the budget; 0 or less: none."""
    quotas: Mapping[str, Quota]
    """What each tenant is guaranteed, and the most it may hold."""
    elsewhere_bytes: Mapping[str, int]
    """What tenants with a quota hold beyond the boundaries that are planned with. Who evicts there has the same excess
    to evict, so each evicts its share."""
    ttl_s: int | None
    """What was unused for longer is evicted; `None`: no limit."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Which of the boundaries that may be evicted goes first."""

    make_policy: Callable[[], Policy]
    order: Mapping[int, float]
    """Ranks boundaries used in the same second by row, from 0 to 1."""
    marks: Mapping[int, int]
    """Priorities of boundaries by row, from hints that apply; with any, the policy is a `Hinted` one."""


def plan_eviction(
    held: Held,
    *,
    tenants: Mapping[bytes, str],
    now_s: int,
    limits: Limits,
    ranking: Ranking,
    kept: Flags,
    kept_since_s: int | None,
    broken: Flags,
) -> EvictionPlan:
    """Choose what to evict, ends of prefixes first: nothing that is pinned, nor what a pinned boundary needs.

    Args:
        held: Of each of its namespaces, all boundaries.
        tenants: The tenant of each namespace.
        now_s: Seconds since the Unix epoch.
        kept: [boundaries]: those that stay, as if pinned: they may not be complete yet.
        kept_since_s: Boundaries first stored after this time stay too; `None`: they may be evicted.
        broken: [boundaries]: those that serve no hit: they are evicted even if the budget is not reached.

    Returns:
        Less than `Limits.free_bytes` if the rest is pinned.
    """
    pools = _Pools(held, [tenants.get(namespace, "") for namespace in held.namespaces], limits)
    stays = kept | (held.pinned_until_s > now_s)
    if kept_since_s is not None:
        stays |= held.first_use_s > kept_since_s
    expires_s = float("-inf") if limits.ttl_s is None else float(now_s - limits.ttl_s)
    last_use = held.last_use_s.astype(np.float64)
    for row, place in ranking.order.items():
        last_use[row] += place
    listed = shortlist(
        held,
        ranks=_ranks(held, ranking.make_policy(), last_use),
        stays=stays,
        leaves=broken | (last_use < expires_s),
        marked=held.flags(ranking.marks),
        needs=pools.needs(ranking.marks),
    )
    holdings = pools.holdings(ranking.make_policy, listed, last_use)
    for row, priority in ranking.marks.items():
        if (marked := holdings.get(row)) is not None:
            holdings.mark(marked, priority)
    chosen: list[tuple[Node, LeaveReason]] = []
    holdings.budget_bytes = holdings.used_bytes
    chosen += [(node, LeaveReason.BROKEN) for node in holdings.drop(lambda node: bool(broken[_row(node)]))]
    chosen += [(node, LeaveReason.EXPIRED) for node in holdings.expire(expires_s)]
    for index in pools.quotas:
        chosen += [(node, LeaveReason.QUOTA) for node in holdings.evict(0, pool=index)]
    chosen_bytes = sum(node.num_bytes for node, _ in chosen)
    holdings.budget_bytes = holdings.used_bytes - max(0, limits.free_bytes - chosen_bytes)
    chosen += [(node, LeaveReason.EVICTED) for node in holdings.evict(0)]
    is_enough = all(holdings.fits(0, pool=index) for index in pools.quotas)
    holdings.discard()
    return EvictionPlan(_victims(held, chosen), is_enough)


class _Pools:
    """Boundaries by the quota that they count against.

    Args:
        owners: The tenant of each of the namespaces.

    Attributes:
        quotas: Of each pool, by its index.
    """

    def __init__(self, held: Held, owners: Sequence[str], limits: Limits) -> None:
        self._held = held
        self._owners = owners
        self._free_bytes = max(0, limits.free_bytes)
        indexes = {name: index for index, name in enumerate(sorted(limits.quotas), start=SHARED + 1)}
        self._pool_of = np.array([indexes.get(owner, SHARED) for owner in owners], dtype=np.int64)[held.namespace]
        self._num_pools = 1 + len(indexes)
        self._num_bytes = self._bytes()
        self.quotas = {SHARED: Quota()}
        for name, index in indexes.items():
            own, elsewhere = int(self._num_bytes[index]), limits.elsewhere_bytes.get(name, 0)
            self.quotas[index] = _share(limits.quotas[name], own, own + elsewhere)

    def needs(self, marks: Mapping[int, int]) -> Iterator[Need]:
        """What each pool may have to give. Hints exchange boundaries of one owner: so may an owner with hints."""
        num_bytes = np.full(self._num_pools, self._free_bytes, dtype=np.int64)
        for index, quota in self.quotas.items():
            if quota.maximum_bytes is not None:
                num_bytes[index] += max(0, int(self._num_bytes[index]) - quota.maximum_bytes)
        yield Need(self._pool_of, num_bytes)
        if marks:
            _, owner_of = np.unique(self._owners, return_inverse=True)
            owner, of_owners = owner_of[self._held.namespace], np.zeros(len(self._owners), dtype=np.int64)
            marked = np.fromiter(marks, dtype=np.int64)
            of_owners[owner[marked]] = num_bytes[self._pool_of[marked]]
            yield Need(owner, of_owners)

    def holdings(self, make_policy: Callable[[], Policy], listed: Flags, last_use: npt.NDArray[np.float64]) -> Holdings:
        """The listed boundaries under a budget and the quotas, and their parents, which are pinned. A listed one is
        pinned too if it has a child that is not listed.
        """
        held, holdings = self._held, Holdings(0, make_policy)
        has_parent = held.above >= 0
        added = listed.copy()
        added[held.above[listed & has_parent]] = True
        not_added = self._bytes(added)
        for index, quota in self.quotas.items():
            pool = holdings.pool(index)
            pool.quota, pool.elsewhere_bytes = quota, int(not_added[index])
        others = np.bincount(held.above[has_parent & ~listed], minlength=len(held))
        rows = np.flatnonzero(added)
        for row in _parents_first(held, rows[np.lexsort((-held.tokens[rows], last_use[rows]))], added):
            node = holdings.add(
                row,
                int(held.above[row]),
                tokens=int(held.tokens[row]),
                num_bytes=int(held.num_bytes[row]),
                now=float(last_use[row]),
                num_uses=int(held.hits[row]),
                pool=int(self._pool_of[row]),
                owner=self._owners[held.namespace[row]],
            )
            if not listed[row] or others[row]:
                holdings.pin(node)
        return holdings

    def _bytes(self, added: Flags | None = None) -> Numbers:
        """[pools]: their bytes, but of those that are added."""
        num_bytes = self._held.num_bytes if added is None else np.where(added, 0, self._held.num_bytes)
        return np.bincount(self._pool_of, weights=num_bytes, minlength=self._num_pools).astype(np.int64)


def _share(quota: Quota, own_bytes: int, all_bytes: int) -> Quota:
    """The part of a tenant's quota for what is planned with, of all that the tenant holds."""
    if own_bytes == all_bytes:
        return quota
    most = None if quota.maximum_bytes is None else quota.maximum_bytes * own_bytes // all_bytes
    return Quota(-(-quota.guaranteed_bytes * own_bytes // all_bytes), most)


def _ranks(held: Held, policy: Policy, last_use: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[boundaries]: as the policy ranks them when they are added."""
    tokens = held.tokens.astype(np.float64)
    before = np.where(held.above < 0, 0.0, tokens[held.above])
    spans = np.where(before < tokens, tokens - before, tokens)  # as `Node.span_tokens`
    return policy.rank(tokens, spans, held.num_bytes.astype(np.float64), held.hits.astype(np.float64), last_use)


def _parents_first(held: Held, rows: npt.NDArray[np.int64], among: Flags) -> Iterator[int]:
    """The rows in their order, except that parents come before their children."""
    done: set[int] = set()
    for row in rows.tolist():
        chain: list[int] = []
        at = row
        while at >= 0 and among[at] and at not in done:
            done.add(at)
            chain.append(at)
            at = int(held.above[at])
        yield from reversed(chain)


def _victims(held: Held, chosen: Sequence[tuple[Node, LeaveReason]]) -> list[Victim]:
    place = {node.key: index for index, (node, _) in enumerate(chosen)}
    victims = []
    for node, reason in chosen:
        row = _row(node)
        name = held.namespaces[held.namespace[row]], PrefixHash(held.prefixes[row].tobytes())
        parent = None if node.parent is None else place.get(node.parent.key)
        victims.append(Victim(*name, int(held.last_use_s[row]), reason, parent))
    return victims


def _row(node: Node) -> int:
    assert isinstance(node.key, int)
    return node.key


def incomplete_of(held: Held, recent: Set[bytes]) -> set[bytes]:
    """Of the recently written boundaries (names of namespace and prefix), those with fewer records than the fullest
    boundary of their namespace: more may be on their way.
    """
    is_full = held.num_records == held.fullest()
    return set(recent) - {name for name, row in held.rows_of(recent).items() if is_full[row]}
