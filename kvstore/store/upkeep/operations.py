"""What operators show, remove and control in a store. Each call is a bounded piece of work on the store's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from kvstore.catalog.entry import Level
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.model.keys import NamespaceId, PrefixHash, RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import with_pauses
from kvstore.store.catalogued_tier import CataloguedTier
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.explain.explainer import Explainer, ReportedOutcome
from kvstore.store.namespaces import Manifests
from kvstore.store.recorder import Backlog, Recorder
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.store.saving import Saver
from kvstore.tiers.base import Tier, TierUsage
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.refusals import PartDown

PIECE_RECORDS_MAX = 4096
"""Records that a caller names in one call: some milliseconds of the loop, which serves engines at the same time."""

_TIER_ANSWER_S = 2.0
"""Well before the deadline of a status, whose answer names the tier that has not answered."""
_NOTHING: Mapping[int, int] = {}
_PAUSE_RECORDS = 256
"""Records after which the event loop gets a turn."""


@dataclass(frozen=True, slots=True)
class TierState:
    """The state of one tier."""

    name: str
    """`memory`, `redis`, `s3`, `filesystem`."""
    level: Level | None
    """The catalog's name for it; `None`: this node's memory."""
    is_open: bool
    """Its breaker is open: it is not used until a probe succeeds."""
    usage: TierUsage | None
    """What it holds; `None`: it did not answer."""
    reason: str = ""
    """Why it did not."""
    is_part_down: bool = False
    """Only a part of it did not, and the others are used."""
    waiting_records: int = 0
    """Records in its write-back queue on this node."""
    waiting_bytes: int = 0
    is_paused: bool = False
    """An operator has paused that queue."""
    last_usage: TierUsage | None = None
    """The last usage that had `used_bytes`, if `usage` lacks them or is `None`. `None`: `usage` has them, or they were
    never known here."""
    last_at_ms: int = 0
    """When `last_usage` was read, since the Unix epoch."""

    @property
    def known_usage(self) -> TierUsage | None:
        """What it holds, or last held. Charts use it, so that an outage leaves no gap."""
        return self.last_usage or self.usage

    def status(self) -> dict[str, object]:
        """This tier's part of a service's status."""
        last = self.last_usage
        known = {"last_known": {**asdict(last), "at_ms": self.last_at_ms}} if last is not None else {}
        if self.usage is None:
            down = {"healthy": False, "reason": self.reason, "is_part_down": self.is_part_down}
            return {"name": self.name, **down, **known}
        return {"name": self.name, "healthy": True, **asdict(self.usage), **known}


class StoreOperations(StorePart):
    """Shows and removes what a store holds. Belongs to the store's loop.

    Args:
        operator_rules: `None`: this store has no place to keep operators' rules.
        recorder: The way to the catalog; `None`: there is no catalog.

    Attributes:
        meters: The store's counters, safe from any thread.
    """

    def __init__(
        self,
        context: StoreContext,
        *,
        manifests: Manifests,
        explainer: Explainer,
        saver: Saver,
        operator_rules: OperatorRules | None,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(context)
        levels = ((Level.HOT, context.hot), (Level.COLD, context.cold))
        self.meters = context.meters
        self.operator_rules = operator_rules
        # without the wrapper that reports to the catalog: callers that delete here report it themselves
        self._slower = {
            level: tier.inner if isinstance(tier, CataloguedTier) else tier
            for level, tier in levels
            if tier is not None
        }
        self._bounded = {level: tier.bounded for level, tier in levels if isinstance(tier, CataloguedTier)}
        self._manifests = manifests
        self._explainer = explainer
        self._saver = saver
        self._recorder = recorder
        self._seen: dict[str, tuple[TierUsage, int]] = {}  # the last usage of each tier with its bytes, and when

    @property
    def tier_names(self) -> dict[Level | None, str]:
        """The tier's name for each level; `None` is the memory."""
        return {None: self._memory.name, **{level: tier.name for level, tier in self._slower.items()}}

    async def manifest(self, namespace: NamespaceId, *, deadline: Deadline) -> bytes | None:
        """As `Manifests.find`."""
        return await self._manifests.find(namespace, deadline=deadline)

    def outcomes(self, tenant: str | None) -> list[ReportedOutcome]:
        """What engines reported of a tenant's latest requests, or of all tenants', newest first."""
        return list(self._explainer.latest(tenant))

    async def memory_sizes(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int | None]:
        """For each record its bytes in this node's memory; `None`: it is not there."""
        sizes: list[int | None] = []
        for start in range(0, len(keys), _PAUSE_RECORDS):
            sizes += await self._memory.head(keys[start : start + _PAUSE_RECORDS], deadline=deadline)
            await asyncio.sleep(0)
        return sizes

    def memory_slices(self, namespace: NamespaceId, prefixes: Sequence[PrefixHash]) -> dict[tuple[int, int], int]:
        """What this node's memory has at some boundaries. Asking does not count as a use of them. Safe from any thread.

        Returns:
            For each boundary (by its index in `prefixes`) and group with slices in memory: a bit for each of them.
        """
        held = self._memory.boundaries(namespace)
        found: dict[tuple[int, int], int] = {}
        for index, prefix in enumerate(prefixes):
            # a copy, made without a turn of the store's thread, which may add a group while this runs
            for group, bits in list(held.get(prefix, _NOTHING).items()):
                found[index, group] = bits
        return found

    async def forget(self, keys: Sequence[RecordKey]) -> int:
        """Drop records from this node's memory and its write-back queues; returns how many the memory had.
        A leased record stays readable until its lease ends.
        """
        num_dropped = 0
        async for key in with_pauses(keys, _PAUSE_RECORDS):
            self._saver.forget(key)
            num_dropped += self._memory.remove(key)
        return num_dropped

    async def delete(self, keys: Sequence[RecordKey], level: Level, *, deadline: Deadline) -> None:
        """Delete records from a slower tier. The caller has hidden them in the catalog, and reports the end to it.

        Raises:
            InvalidRequest: There is no such tier.
            Unavailable: Some may be left.
        """
        await self._tier(level).delete_all(keys, deadline=deadline)

    async def tiers(self, *, deadline: Deadline) -> list[TierState]:
        """The state of each tier, the fastest first. One that does not answer costs two seconds, or the deadline."""
        deadline = deadline.earlier(_TIER_ANSWER_S)
        levels: list[tuple[Level | None, Tier]] = [(None, self._memory), *self._slower.items()]
        return list(await asyncio.gather(*(self._state(tier, level, deadline) for level, tier in levels)))

    async def _state(self, tier: Tier, level: Level | None, deadline: Deadline) -> TierState:
        usage, reason, is_part_down = None, "", False
        try:
            usage = await tier.usage(deadline=deadline)
        except (Unavailable, Closed) as error:
            reason, is_part_down = str(error), isinstance(error, PartDown)
        else:
            if level in self._bounded:
                usage = self._bounded[level](usage)
        last_usage, last_at_ms = None, 0
        if usage is not None and usage.used_bytes is not None:
            self._seen[tier.name] = usage, self._clock.wall_ms()
        else:
            last_usage, last_at_ms = self._seen.get(tier.name, (None, 0))
        is_open = isinstance(tier, GuardedTier) and tier.is_open
        state = TierState(
            tier.name, level, is_open, usage, reason, is_part_down, last_usage=last_usage, last_at_ms=last_at_ms
        )
        queue = self._saver.queues.get(tier.name)
        if queue is None:
            return state
        return replace(state, waiting_records=len(queue), waiting_bytes=queue.num_bytes, is_paused=queue.is_paused)

    def note_held(self, tier: str, num_bytes: int) -> None:
        """Note what a tier that does not count its bytes holds by the catalog. Safe from any thread."""
        self._seen[tier] = TierUsage(None, num_bytes, None, 0), self._clock.wall_ms()

    def backlog(self) -> Backlog | None:
        """Changes that wait to be reported to the catalog; `None`: there is no catalog. Safe from any thread."""
        return self._recorder.backlog if self._recorder is not None else None

    def check_hot(self) -> None:
        """Refuse direct calls to the hot tier's server while the tier's breaker is open. Safe from any thread.

        Raises:
            Unavailable: The tier is not used now; the message gives the reason.
        """
        tier = self._slower.get(Level.HOT)
        if isinstance(tier, GuardedTier):
            tier.check_usable()

    async def stored_sizes(
        self, keys: Sequence[RecordKey], level: Level, *, deadline: Deadline
    ) -> Sequence[int | None]:
        """For each record its bytes in a slower tier; `None`: it is not there.

        Raises:
            InvalidRequest: There is no such tier.
            Unavailable: The tier does not answer.
        """
        return await self._tier(level).head(keys, deadline=deadline)

    def quotas(self) -> dict[str, dict[str, int | None]]:
        """By tenant with a quota: `guaranteed_bytes`, `maximum_bytes`, and `used_bytes`: its bytes in the cold tier by
        the last totals that retention read; `None`: not known. Safe from any thread.
        """
        if self.operator_rules is None:
            return {}
        used = self.operator_rules.used_bytes()
        return {
            tenant: {
                "guaranteed_bytes": quota.guaranteed_bytes,
                "maximum_bytes": quota.maximum_bytes,
                "used_bytes": None if used is None else used.get(tenant, 0),
            }
            for tenant, quota in sorted(self.operator_rules.quotas.items())
        }

    def pause(self, level: Level, *, is_paused: bool) -> None:
        """Pause the write-back to a tier, or resume it.

        Raises:
            InvalidRequest: There is no such tier.
        """
        self._saver.pause(self._tier(level).name, is_paused=is_paused)

    def left_to_write(self, level: Level, mark: int | None = None) -> tuple[int, int, bool]:
        """How many records that were queued for a tier before a mark are still to be written.

        Args:
            mark: As the first call returned it; `None`: this is the first call.

        Returns:
            The number, the mark, and whether the write-back is paused.

        Raises:
            InvalidRequest: There is no such tier.
        """
        queue = self._saver.queues[self._tier(level).name]
        mark = queue.mark if mark is None else mark
        return queue.left_before(mark), mark, queue.is_paused

    def _tier(self, level: Level) -> Tier:
        tier = self._slower.get(level)
        if tier is None:
            raise InvalidRequest("this store has no such tier", level=level.name.lower())
        return tier
