"""Looks at a store every few seconds: for the history, and for events that show only in its meters."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping

from kvstore.errors import Closed
from kvstore.eviction.holdings import Quota
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import EventKind, Events
from kvstore.service.credentials import Credentials, CredentialsFile
from kvstore.service.history import STEP_S, History, Sample
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.explain.reasons import REASONS, UNKNOWN
from kvstore.store.retention.operator_rules import Retirement
from kvstore.store.tiered import TieredStore

__all__ = ["Watcher"]

_ANSWER_S = 2.0
_METER = re.compile(r"([a-z0-9_]+)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')

_KEPT = frozenset(
    {
        *("lookups", "lookup_hits", "requests", "request_tokens", "served_records", "served_bytes"),
        *("saves", "retention_bytes", "write_back_bytes", "staged_bytes", "retention_boundaries"),
    }
)
"""Meters that the history keeps."""

_TURNED_AWAY = {
    "busy": "saves of engines were turned away: too much is on its way to the tiers",
    "full": "saves of engines were turned away: there was no room",
}

Labels = Mapping[str, str]
Grown = Mapping[str, list[tuple[Labels, float]]]


class Watcher:
    """Adds a sample to a history every step, and emits events on what has changed since the last one. Belongs to the
    store's loop. A step asks each tier once for its usage.

    Args:
        store: The store to watch.
        history: Where samples go.
        events: Where events go.
        credentials: Reloads of these become events.
        step_s: The time between two looks.
        clock: For the time of day.
    """

    def __init__(
        self,
        store: TieredStore | EncryptedStore,
        history: History,
        events: Events,
        *,
        credentials: Credentials | None = None,
        step_s: float = STEP_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._history = history
        self._events = events
        self._step_s = step_s
        self._clock = clock
        self._background = Background("watcher")
        self._before: Mapping[str, float] = store.meters.snapshot()
        self._rules: Mapping[str, str] = {}
        self._credentials = credentials if isinstance(credentials, CredentialsFile) else None
        self._credentials_read = self._num_read()
        self._orders = self._ordered()

    def start(self) -> None:
        """Watch in the background, until `aclose`."""
        self._background.spawn(self._run(), "steps")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            try:
                await self.step()
            except Closed:
                return

    async def step(self) -> None:
        """Look once.

        Raises:
            Closed: The store is closed.
        """
        deadline = Deadline.after(_ANSWER_S, self._clock)
        status = await self._store.status(deadline=deadline)
        tier_bytes, away = _tiers(status)
        self._history.untold = frozenset(name for name, held in tier_bytes.items() if held is None)
        known = {name: self._history.held.get(name) if held is None else held for name, held in tier_bytes.items()}
        now = self._store.meters.snapshot()
        grown = _grown(self._before, now)
        counts = {
            key: amount - self._before.get(key, 0)
            for key, amount in now.items()
            if key.partition("{")[0] in _KEPT and amount > self._before.get(key, 0)
        }
        self._history.add(Sample(self._clock.wall_ms(), counts, _without_none(known), frozenset(away)))
        self._tell(grown)
        self._tell_catalog(self._before.get("catalog_complete"), now.get("catalog_complete"))
        self._tell_rules(status)
        self._tell_credentials()
        self._tell_orders()
        self._before = now

    def _tell(self, grown: Grown) -> None:
        for tier, reasons in _by_tier(grown.get("retention_boundaries", [])).items():
            freed = _by_tier(grown.get("retention_bytes", [])).get(tier, {})
            num = sum(reasons.values())
            causes = ", ".join(f"{cause} {count}" for cause, count in sorted(reasons.items(), key=lambda one: -one[1]))
            text = f"{num} {'boundary' if num == 1 else 'boundaries'} left {tier}, as retention asks ({causes})"
            self._events.tell(
                EventKind.EVICTED, text, detail={"tier": tier, "num_bytes": sum(freed.values()), **reasons}
            )
        for labels, amount in grown.get("tier_evicted_records", []):
            tier = labels.get("tier", "")
            text = f"{int(amount)} records left {tier} one by one: it was full before retention made room"
            self._events.tell(EventKind.EVICTED, text, detail={"tier": tier, "num_records": int(amount)})
        for _, amount in grown.get("catalog_reconciled", []):
            text = f"{int(amount)} records left Redis by themselves: evicted, flushed, or lost in a restart"
            self._events.tell(EventKind.EVICTED, text, detail={"tier": "redis", "num_records": int(amount)})
        for labels, amount in grown.get("saves", []):
            if (said := _TURNED_AWAY.get(labels.get("outcome", ""))) is not None:
                self._events.tell(EventKind.SAVES_DROPPED, f"{int(amount)} {said}", detail={"records": int(amount)})
        for labels, amount in grown.get("saves_lost", []):
            reason = labels.get("reason", "other")
            text = f"{int(amount)} records of engines are missing: {REASONS.get(reason, UNKNOWN).why}"
            self._events.tell(EventKind.SAVES_DROPPED, text, detail={"records": int(amount), "reason": reason})
        for tier, reasons in _by_tier(grown.get("write_back_dropped", [])).items():
            text = f"{sum(reasons.values())} records are not copied to {tier}; engines were answered before that"
            self._events.tell(EventKind.SAVES_DROPPED, text, detail={"tier": tier, **reasons})
        for _, amount in grown.get("catalog_changes_lost", []):
            text = f"the catalog was not told of {int(amount)} changes: lookups ask the tiers as well"
            self._events.tell(EventKind.CATALOG, text, detail={"changes": int(amount)})

    def _tell_catalog(self, before: float | None, now: float | None) -> None:
        if now is None or before is None or bool(now) == bool(before):
            return
        said = "knows of everything that is stored again" if now else "lacks records that are stored: `kvstore reindex`"
        self._events.tell(EventKind.CATALOG, f"the catalog {said}", is_public=True)

    def _tell_rules(self, status: Mapping[str, object]) -> None:
        rules = status["admission"]
        assert isinstance(rules, Mapping)
        for namespace, rule in rules.items():
            if self._rules.get(namespace) != rule:
                text = f"retention_admission is {rule} for this namespace from now on"
                self._events.tell(EventKind.SETTINGS, text, namespace=namespace, detail={"rule": rule})
        self._rules = dict(rules)

    def _num_read(self) -> tuple[int, int]:
        return (self._credentials.num_read, self._credentials.num_refused) if self._credentials is not None else (0, 0)

    def _tell_credentials(self) -> None:
        before, self._credentials_read = self._credentials_read, self._num_read()
        if self._credentials_read[0] > before[0]:
            detail = {"tokens": self._credentials.num_tokens if self._credentials is not None else 0}
            self._events.tell(
                EventKind.SETTINGS, "the credentials were read again, and count from now on", detail=detail
            )
        elif self._credentials_read[1] > before[1]:
            text = "the credentials file cannot be used: those before it go on to count, the log says what is wrong"
            self._events.tell(EventKind.SETTINGS, text)

    def _ordered(self) -> tuple[Mapping[str, Quota], Mapping[tuple[str | None, str], Retirement]]:
        orders = self._store.operations.operator_rules
        return (orders.quotas, orders.retired) if orders is not None else ({}, {})

    def _tell_orders(self) -> None:
        """Emit events on orders, given here or at another service, that apply here from now on."""
        (quotas_before, retired_before), self._orders = self._orders, self._ordered()
        quotas, retired = self._orders
        for tenant in sorted(quotas_before.keys() | quotas.keys()):
            if (quota := quotas.get(tenant)) != quotas_before.get(tenant):
                detail: dict[str, str | int | float] = {"tenant": tenant}
                if quota is not None:
                    detail["guaranteed_bytes"] = quota.guaranteed_bytes
                if quota is not None and quota.maximum_bytes is not None:
                    detail["maximum_bytes"] = quota.maximum_bytes
                text = f"the quota of tenant {tenant} {'holds from now on' if quota is not None else 'is withdrawn'}"
                self._events.tell(EventKind.SETTINGS, text, tenant=tenant, detail=detail)
        for tenant_or_all, weights_id in retired.keys() ^ retired_before.keys():
            are = (
                "are retired: nothing of them is served"
                if (tenant_or_all, weights_id) in retired
                else "are served again"
            )
            text = f"weights {weights_id} {are}"
            self._events.tell(EventKind.SETTINGS, text, tenant=tenant_or_all, detail={"weights_id": weights_id})

    async def aclose(self) -> None:
        """Stop watching. Idempotent."""
        await self._background.aclose()


def _tiers(status: Mapping[str, object]) -> tuple[dict[str, int | None], set[str]]:
    """The bytes held by each tier that answers, `None` if it does not know; and the tiers that do not answer."""
    tiers = status["tiers"]
    assert isinstance(tiers, Mapping)
    held = {name: tier["used_bytes"] for name, tier in tiers.items() if tier["healthy"]}
    return held, {name for name, tier in tiers.items() if not tier["healthy"]}


def _without_none(held: Mapping[str, int | None]) -> dict[str, int]:
    return {name: num_bytes for name, num_bytes in held.items() if num_bytes is not None}


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> Grown:
    """By name of a meter: its labels and the increase of each."""
    found: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for key, amount in now.items():
        if amount > before.get(key, 0) and (match := _METER.fullmatch(key)) is not None:
            found[match[1]].append((dict(_LABEL.findall(match[2] or "")), amount - before.get(key, 0)))
    return found


def _by_tier(listed: list[tuple[Labels, float]]) -> dict[str, dict[str, int]]:
    """By tier, by reason."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for labels, amount in listed:
        found[labels.get("tier", "")][labels.get("reason", "other")] = int(amount)
    return found
