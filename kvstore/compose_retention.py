"""Wires what keeps the cold tier within its bounds, and what decides which records it gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvstore.catalog.base import Gate
from kvstore.catalog.coordination import JOBS, OPERATOR_RULES, FileTextStore, Ownership, SoleOwnership, TextStore
from kvstore.catalog.entry import Level
from kvstore.errors import InvalidRequest
from kvstore.eviction.candidates import AUTO, AdmitAll
from kvstore.runtime.clock import Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.meters import Meters
from kvstore.settings import Settings
from kvstore.store.cold_admission import ColdAdmission
from kvstore.store.policy_choice import AutoChoice, FixedChoice, PolicyChoice, candidates_of
from kvstore.store.recorder import Recorder
from kvstore.store.retention import Retention
from kvstore.store.retention_rules import RetentionRules, shares
from kvstore.store.room import Room
from kvstore.store.standing_orders import StandingOrders
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import FileLocation, NoTier, RedisLocation

__all__ = ["Bounds", "open_job_book", "open_orders", "open_ownership", "open_retention"]

_PROBE_S = 2.0
_OWNER_LEASE_S = 60.0
"""A dead owner's namespaces are not evicted from for so long."""
_GUARANTEED_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Bounds:
    """What bounds a cold tier; nothing at all is a value too.

    Attributes:
        choice: Told of lookups.
        admission: Which records the tier gets.
        room: Where puts wait for eviction.
    """

    choice: PolicyChoice | None = None
    admission: ColdAdmission | None = None
    room: Room | None = None


async def open_retention(
    settings: Settings,
    recorder: Recorder | None,
    cold: Tier | None,
    stack: AsyncExitStack,
    *,
    orders: StandingOrders | None = None,
    meters: Meters,
    clock: Clock,
    gate: Gate | None = None,
) -> Bounds:
    """Keep the cold tier within its bounds in the background; it is deleted from behind the catalog's back, which
    retention tells itself.

    Raises:
        InvalidRequest: Bounds are set, and nothing keeps the books; or quotas guarantee too much.
    """
    is_alone = isinstance(settings.hot, NoTier) and isinstance(settings.cold, FileLocation)
    is_bound = is_alone or settings.cold_bytes is not None or settings.cold_unused_s is not None or settings.quotas
    is_orderly = orders is not None and cold is not None  # a quota may be ordered while it serves
    if not is_bound and not is_orderly:
        return Bounds(admission=_admission(settings, recorder, cold, meters, clock))
    if cold is None or not (is_alone or isinstance(settings.hot, RedisLocation)):
        raise InvalidRequest(
            "cold_bytes, cold_unused_s and quotas need a directory as cold, or a Redis as hot, which keeps the books",
            hot=str(settings.hot),
            cold=str(settings.cold),
        )
    if recorder is None:
        return Bounds(admission=_admission(settings, recorder, cold, meters, clock))
    budget_bytes = await _cold_budget_bytes(settings, cold, clock) if is_alone else settings.cold_bytes
    rules = _rules(settings, budget_bytes, is_private=is_alone)
    room = None
    if budget_bytes is not None:
        room = Room(budget_bytes, int(budget_bytes * rules.start_share), clock, is_shared=not is_alone)
    admission = _admission(settings, recorder, cold, meters, clock, is_bounded=budget_bytes is not None)
    choice = _choice(settings, admission)
    retention = Retention(
        cold,
        Level.COLD,
        recorder.catalog,
        await open_ownership(settings, stack, lease_s=_OWNER_LEASE_S, gate=gate),
        rules,
        choice=choice,
        meters=meters,
        clock=clock,
        num_refused=lambda: recorder.num_refused,
        room=room,
    )
    stack.push_async_callback(retention.aclose)
    if orders is not None:
        most_bytes = None if budget_bytes is None else int(_GUARANTEED_SHARE * budget_bytes)
        orders.held_by(retention.set_quotas, most_bytes, retention.tenant_bytes)
    retention.start()
    return Bounds(choice if is_bound else None, admission, room)


def _rules(settings: Settings, budget_bytes: int | None, *, is_private: bool) -> RetentionRules:
    guaranteed_bytes = sum(quota.guaranteed_bytes for quota in settings.quotas.values())
    if budget_bytes is not None and guaranteed_bytes > _GUARANTEED_SHARE * budget_bytes:
        raise InvalidRequest(
            "quotas guarantee more than three quarters of what cold may hold: lower them, or raise the bound",
            guaranteed_bytes=guaranteed_bytes,
            cold_bytes=budget_bytes,
        )
    start, stop = shares(budget_bytes) if budget_bytes is not None else (1.0, 1.0)
    return RetentionRules(
        budget_bytes=budget_bytes,
        quotas=settings.quotas,
        start_share=start,
        stop_share=stop,
        ttl_s=None if settings.cold_unused_s is None else max(1, round(settings.cold_unused_s)),
        is_private=is_private,
    )


async def open_orders(
    settings: Settings,
    recorder: Recorder | None,
    stack: AsyncExitStack,
    *,
    meters: Meters,
    clock: Clock,
    gate: Gate | None = None,
) -> StandingOrders | None:
    """What operators have ordered, as far as it is written down beside the catalog; `None`: there is no catalog."""
    book: TextStore
    match settings.hot, settings.cold:
        case _ if recorder is None:
            return None
        case RedisLocation() as hot, _:
            from kvstore.catalog.redis.coordination import RedisTextStore
            from kvstore.tiers.redis import open_control

            client = await stack.enter_async_context(open_control(hot, refuses_newer=gate is not None))
            book = RedisTextStore(client, OPERATOR_RULES, gate=gate)
        case _, FileLocation() as cold:
            book = FileTextStore(cold.path, OPERATOR_RULES)
        case _:
            return None
    orders = StandingOrders(book, settings.quotas, meters=meters, clock=clock)
    stack.push_async_callback(orders.aclose)
    await orders.start()
    return orders


@asynccontextmanager
async def open_job_book(settings: Settings) -> AsyncIterator[TextStore | None]:
    """Where long operations are remembered, beside the catalog, over a connection of its own; `None`: nowhere."""
    match settings.hot, settings.cold:
        case RedisLocation() as hot, _:
            from kvstore.catalog.redis.coordination import RedisTextStore
            from kvstore.tiers.redis import open_control

            async with open_control(hot) as client:
                yield RedisTextStore(client, JOBS)
        case _, FileLocation() as cold:
            yield FileTextStore(cold.path, JOBS)
        case _:
            yield None


def _admission(
    settings: Settings,
    recorder: Recorder | None,
    cold: Tier | None,
    meters: Meters,
    clock: Clock,
    *,
    is_bounded: bool = False,
) -> ColdAdmission | None:
    """Nobody says a rule where nothing is bounded: one that lets everything in need not be asked then."""
    rule = AdmitAll.name if settings.retention_admission == AUTO else settings.retention_admission
    if cold is None or (rule == AdmitAll.name and not is_bounded):
        return None
    if recorder is None:
        return ColdAdmission(rule, meters=meters, clock=clock)
    return ColdAdmission(rule, meters=meters, clock=clock, below=recorder.below)


def _choice(settings: Settings, admission: ColdAdmission | None) -> PolicyChoice:
    candidates = candidates_of(settings.retention_policy, settings.retention_admission)
    return AutoChoice(candidates, admission) if len(candidates) > 1 else FixedChoice(candidates[0], admission)


async def open_ownership(
    settings: Settings, stack: AsyncExitStack, *, lease_s: float, gate: Gate | None = None
) -> Ownership:
    """Whoever owns a directory owns all in it; what is shared is owned by lease."""
    if not isinstance(settings.hot, RedisLocation):
        return SoleOwnership()
    from kvstore.catalog.redis.coordination import RedisOwnership
    from kvstore.tiers.redis import open_control

    client = await stack.enter_async_context(open_control(settings.hot, refuses_newer=gate is not None))
    return RedisOwnership(client, lease_s=lease_s, gate=gate)


async def _cold_budget_bytes(settings: Settings, directory: Tier, clock: Clock) -> int | None:
    """What a directory may hold: its own bound, or less where the settings say so."""
    usage = await directory.usage(deadline=Deadline.after(_PROBE_S, clock))
    bounds = [bound for bound in (usage.limit_bytes, settings.cold_bytes) if bound is not None]
    return min(bounds, default=None)
