"""What keeps the cold tier within its bounds, what decides which records it gets, and operators' rules."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvstore.catalog.coordination import (
    OPERATOR_RULES,
    FileTextStore,
    TextStore,
    TextStoreKind,
)
from kvstore.errors import InvalidRequest
from kvstore.eviction.candidates import AUTO, AdmitAll
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.settings import Settings
from kvstore.store.recorder import Recorder
from kvstore.store.retention import RetentionParts
from kvstore.store.retention.backpressure import BudgetGate
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.retention.hint_marks import HintMarks
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.store.retention.owner import LEASE_S, RetentionOwner
from kvstore.store.retention.policy_choice import PolicyChoice, candidates_of
from kvstore.store.retention.rules import RetentionRules, shares
from kvstore.tiers.base import Tier
from kvstore.tiers.locations import FileLocation, NoTier, RedisLocation

_PROBE_S = 2.0
_GUARANTEED_SHARE = 0.75


async def open_retention(
    settings: Settings,
    recorder: Recorder | None,
    cold: Tier | None,
    stack: AsyncExitStack,
    *,
    hot: Tier | None,
    instruments: Instruments,
) -> tuple[RetentionParts, BudgetGate | None]:
    """Keep the cold tier within its bounds in the background. Returns what the store uses of it, and the gate where
    puts into the cold tier wait for eviction; `None`: it has no budget.

    Args:
        cold: Not wrapped in a `CataloguedTier`: retention changes the catalog itself.
        hot: Likewise.

    Raises:
        InvalidRequest: Bounds are set, and there is no catalog for them; or quotas guarantee too much.
    """
    rules = await _open_operator_rules(settings, recorder, stack, instruments)
    is_alone = isinstance(settings.hot, NoTier) and isinstance(settings.cold, FileLocation)
    is_bound = is_alone or settings.cold_bytes is not None or settings.cold_unused_s is not None or settings.quotas
    may_get_quotas = rules is not None and cold is not None  # an operator may set them while the service runs
    if not is_bound and not may_get_quotas:
        return RetentionParts(None, _admission(settings, recorder, cold, instruments), rules), None
    if cold is None or not (is_alone or isinstance(settings.hot, RedisLocation)):
        raise InvalidRequest(
            "cold_bytes, cold_unused_s and quotas need a directory as cold, or a Redis as hot, which keeps the catalog",
            hot=str(settings.hot),
            cold=str(settings.cold),
        )
    if recorder is None:
        return RetentionParts(None, _admission(settings, recorder, cold, instruments), rules), None
    budget_bytes = await _directory_bytes(settings, cold, instruments) if is_alone else settings.cold_bytes
    bounds = _bounds(settings, budget_bytes, is_private=is_alone)
    budget_gate = None
    if budget_bytes is not None:
        start_bytes = int(budget_bytes * bounds.start_share)
        budget_gate = BudgetGate(budget_bytes, start_bytes, instruments.clock, is_shared=not is_alone)
    admission = _admission(settings, recorder, cold, instruments, is_bounded=budget_bytes is not None)
    marks = HintMarks(recorder.catalog.mark_book(), instruments)
    stack.push_async_callback(marks.aclose)
    choice = PolicyChoice(
        candidates_of(settings.retention_policy, settings.retention_admission),
        admission,
        marks=marks,
        clock=instruments.clock,
    )
    owner = RetentionOwner(
        cold,
        recorder,
        recorder.catalog.ownership(LEASE_S),
        bounds,
        choice=choice,
        instruments=instruments,
        hot=hot,
        budget_gate=budget_gate,
    )
    stack.push_async_callback(owner.aclose)
    if rules is not None:
        most_bytes = None if budget_bytes is None else int(_GUARANTEED_SHARE * budget_bytes)
        rules.apply_to(owner.set_quotas, most_bytes, owner.tenant_bytes)
    owner.start()
    marks.start()
    return RetentionParts(choice if is_bound else None, admission, rules), budget_gate


def _bounds(settings: Settings, budget_bytes: int | None, *, is_private: bool) -> RetentionRules:
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


async def _open_operator_rules(
    settings: Settings, recorder: Recorder | None, stack: AsyncExitStack, instruments: Instruments
) -> OperatorRules | None:
    """Operators' rules, from the book beside the catalog; `None`: there is no catalog."""
    if recorder is None:
        return None
    rules = OperatorRules(recorder.catalog.text_store(OPERATOR_RULES), settings.quotas, instruments)
    stack.push_async_callback(rules.aclose)
    await rules.start()
    return rules


@asynccontextmanager
async def open_book(settings: Settings, kind: TextStoreKind) -> AsyncIterator[TextStore | None]:
    """Texts of one kind, kept beside the catalog, over a connection of their own; `None`: there is no catalog."""
    match settings.hot, settings.cold:
        case RedisLocation() as hot, _:
            from kvstore.catalog.redis.coordination import RedisTextStore
            from kvstore.tiers.redis import open_control

            async with open_control(hot) as client:
                yield RedisTextStore(client, kind)
        case _, FileLocation() as cold:
            yield FileTextStore(cold.path, kind)
        case _:
            yield None


def _admission(
    settings: Settings,
    recorder: Recorder | None,
    cold: Tier | None,
    instruments: Instruments,
    *,
    is_bounded: bool = False,
) -> ColdAdmission | None:
    """The rule of the cold tier; `None`: it gets everything, and no owner can announce another rule."""
    rule = AdmitAll.name if settings.retention_admission == AUTO else settings.retention_admission
    if cold is None or (rule == AdmitAll.name and not is_bounded):
        return None
    if recorder is None:
        return ColdAdmission(rule, instruments)
    return ColdAdmission(rule, instruments, recorder.parents.of)


async def _directory_bytes(settings: Settings, directory: Tier, instruments: Instruments) -> int | None:
    """What a directory may hold: its own bound, or less where the settings say so."""
    usage = await directory.usage(deadline=Deadline.after(_PROBE_S, instruments.clock))
    bounds = [bound for bound in (usage.limit_bytes, settings.cold_bytes) if bound is not None]
    return min(bounds, default=None)
