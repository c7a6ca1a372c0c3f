"""Samples a store for the history, and adds events on what has changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvstore.eviction.holdings import Quota
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import EventKind, Events
from kvstore.runtime.meters import name_and_labels
from kvstore.runtime.sizes import counted
from kvstore.runtime.watched_file import Watched
from kvstore.service.authentication import Credentials
from kvstore.service.history import STEP_S, History, Sample
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.explain.reasons import REASONS, UNKNOWN
from kvstore.store.retention.operator_rules import Retirement
from kvstore.store.tiered import TieredStore

_ANSWER_S = 2.0

_KEPT = frozenset(("lookups", "lookup_hits", "requests", "request_tokens", "served_records", "retention_boundaries"))
"""Meters that the history keeps."""

_REFUSED = {  # why, by the outcome
    "busy": "too many bytes were being saved at a time",
    "full": "no tier had room",
}

Labels = Mapping[str, str]
Grown = Mapping[str, list[tuple[Labels, float]]]


class Watcher:
    """Adds a sample to a history every step, and events on what has changed since the last step. Belongs to the store's
    loop. A step requests the usage of each tier once.

    Args:
        credentials: Reloads of these become events.
    """

    def __init__(
        self,
        store: TieredStore | EncryptedStore,
        history: History,
        events: Events,
        *,
        credentials: Watched[Credentials] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._history = history
        self._events = events
        self._clock = clock
        self._background = Background("watcher")
        self._before: Mapping[str, float] = store.meters.snapshot()
        self._admission_rules: Mapping[str, str] = {}
        self._credentials = credentials
        self._num_loaded = credentials.num_loaded if credentials is not None else 0
        self._num_refused = 0
        self._rules_before = self._operator_rules()

    def start(self) -> None:
        """Watch in the background, until `aclose`."""
        self._background.repeat(self.step, "steps", every_s=STEP_S)

    async def step(self) -> None:
        """Sample once.

        Raises:
            Closed: The store is closed.
        """
        deadline = Deadline.after(_ANSWER_S, self._clock)
        status = await self._store.status(deadline=deadline)
        unmeasured, held_bytes, away = _tiers(status)
        self._history.unmeasured = frozenset(unmeasured)
        now = self._store.meters.snapshot()
        increases = {key: amount - self._before.get(key, 0) for key, amount in now.items()}
        increases = {key: increase for key, increase in increases.items() if increase > 0}
        counts = {key: increase for key, increase in increases.items() if key.partition("{")[0] in _KEPT}
        self._history.add(Sample(self._clock.wall_ms(), counts, held_bytes, frozenset(away)))
        self._add_events(_by_name(increases))
        self._add_catalog_event(self._before.get("catalog_complete"), now.get("catalog_complete"))
        self._add_rule_events(status)
        self._add_credentials_event()
        self._add_operator_events()
        self._before = now

    def _add_events(self, grown: Grown) -> None:
        for tier, reasons in _by_tier(grown.get("retention_boundaries", [])).items():
            freed = _by_tier(grown.get("retention_bytes", [])).get(tier, {})
            num = sum(reasons.values())
            causes = ", ".join(f"{cause} {count}" for cause, count in sorted(reasons.items(), key=lambda one: -one[1]))
            text = f"evicted {counted(num, 'boundary', 'boundaries')} from {tier} ({causes})"
            self._events.add(
                EventKind.EVICTED, text, detail={"tier": tier, "num_bytes": sum(freed.values()), **reasons}
            )
        for labels, amount in grown.get("tier_evicted_records", []):
            tier = labels.get("tier", "")
            text = f"{tier} evicted {counted(amount, 'record')} one by one: it was full before retention freed space"
            self._events.add(EventKind.EVICTED, text, detail={"tier": tier, "num_records": int(amount)})
        for _, amount in grown.get("catalog_reconciled", []):
            text = f"Redis no longer has {counted(amount, 'record')}: evicted, flushed, or lost in a restart"
            self._events.add(EventKind.EVICTED, text, detail={"tier": "redis", "num_records": int(amount)})
        for labels, amount in grown.get("saves", []):
            if (refused := _REFUSED.get(labels.get("outcome", ""))) is not None:
                text = f"{counted(amount, 'save of engines was', 'saves of engines were')} refused: {refused}"
                self._events.add(EventKind.SAVES_DROPPED, text, detail={"records": int(amount)})
        for labels, amount in grown.get("saves_lost", []):
            reason = labels.get("reason", "other")
            missing = counted(amount, "record of engines is", "records of engines are")
            text = f"{missing} missing: {REASONS.get(reason, UNKNOWN).why}"
            self._events.add(EventKind.SAVES_DROPPED, text, detail={"records": int(amount), "reason": reason})
        for tier, reasons in _by_tier(grown.get("write_back_dropped", [])).items():
            dropped = counted(sum(reasons.values()), "saved record was", "saved records were")
            text = f"{dropped} not copied to {tier}"
            self._events.add(EventKind.SAVES_DROPPED, text, detail={"tier": tier, **reasons})
        for _, amount in grown.get("catalog_changes_lost", []):
            text = f"the catalog lost {counted(amount, 'change')}: lookups check the tiers as well"
            self._events.add(EventKind.CATALOG, text, detail={"changes": int(amount)})

    def _add_catalog_event(self, before: float | None, now: float | None) -> None:
        if now is None or before is None or bool(now) == bool(before):
            return
        state = "is complete again" if now else "may lack records that are stored: a service adds them"
        self._events.add(EventKind.CATALOG, f"the catalog {state}", is_public=True)

    def _add_rule_events(self, status: Mapping[str, object]) -> None:
        rules = status["admission"]
        assert isinstance(rules, Mapping)
        for namespace, rule in rules.items():
            if self._admission_rules.get(namespace) != rule:
                text = f"retention_admission is now {rule} for this namespace"
                self._events.add(EventKind.SETTINGS, text, namespace=namespace, detail={"rule": rule})
        self._admission_rules = dict(rules)

    def _add_credentials_event(self) -> None:
        if self._credentials is None:
            return
        before, self._num_loaded = self._num_loaded, self._credentials.num_loaded
        refused_before, self._num_refused = self._num_refused, self._credentials.num_refused
        if self._num_loaded > before:
            detail = {"tokens": self._credentials.value.num_tokens}
            self._events.add(EventKind.SETTINGS, "reloaded the credentials", detail=detail)
        elif self._num_refused > refused_before:
            text = "invalid credentials file; keeping the previous credentials. The log says what is wrong"
            self._events.add(EventKind.SETTINGS, text)

    def _operator_rules(self) -> tuple[Mapping[str, Quota], Mapping[tuple[str | None, str], Retirement]]:
        rules = self._store.operations.operator_rules
        return (rules.quotas, rules.retired) if rules is not None else ({}, {})

    def _add_operator_events(self) -> None:
        """Add events on quotas and retired weights that an operator has changed, here or at another service."""
        (quotas_before, retired_before), self._rules_before = self._rules_before, self._operator_rules()
        quotas, retired = self._rules_before
        for tenant in sorted(quotas_before.keys() | quotas.keys()):
            if (quota := quotas.get(tenant)) != quotas_before.get(tenant):
                detail: dict[str, str | int | float] = {"tenant": tenant}
                if quota is not None:
                    detail["guaranteed_bytes"] = quota.guaranteed_bytes
                if quota is not None and quota.maximum_bytes is not None:
                    detail["maximum_bytes"] = quota.maximum_bytes
                text = f"the quota of tenant {tenant} is {'in force' if quota is not None else 'removed'}"
                self._events.add(EventKind.SETTINGS, text, tenant=tenant, detail=detail)
        for tenant_or_all, weights_id in retired.keys() ^ retired_before.keys():
            are = (
                "are retired: none of their records is served"
                if (tenant_or_all, weights_id) in retired
                else "are served again"
            )
            text = f"weights {weights_id} {are}"
            self._events.add(EventKind.SETTINGS, text, tenant=tenant_or_all, detail={"weights_id": weights_id})

    async def aclose(self) -> None:
        """Stop watching. Idempotent."""
        await self._background.aclose()


def _tiers(status: Mapping[str, object]) -> tuple[set[str], dict[str, int], set[str]]:
    """Of the tiers that answer those that do not know their bytes, and the bytes of each, the last known where it does
    not know them; and the tiers that do not answer.
    """
    tiers = status["tiers"]
    assert isinstance(tiers, Mapping)
    healthy = {name: tier for name, tier in tiers.items() if tier["healthy"]}
    unmeasured = {name for name, tier in healthy.items() if tier["used_bytes"] is None}
    held = {name: tier.get("last_known", tier)["used_bytes"] for name, tier in healthy.items()}
    known = {name: num_bytes for name, num_bytes in held.items() if num_bytes is not None}
    return unmeasured, known, set(tiers).difference(healthy)


def _by_name(increases: Mapping[str, float]) -> Grown:
    """Increases by the name of the meter, each with its labels."""
    found: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for key, increase in increases.items():
        name, labels = name_and_labels(key)
        found[name].append((labels, increase))
    return found


def _by_tier(listed: list[tuple[Labels, float]]) -> dict[str, dict[str, int]]:
    """The increases of one meter, by its label `tier`, then by its label `reason`."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for labels, amount in listed:
        found[labels.get("tier", "")][labels.get("reason", "other")] = int(amount)
    return found
