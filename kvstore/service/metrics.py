"""The text of `/metrics`: the store's meters and the service's own numbers for Prometheus. Pure.

Names are stable: they are never renamed or given another meaning. A meter that is missing from the tables is shown
as untyped, and a test fails.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.store.recorder import Backlog
from kvstore.store.upkeep.operations import TierState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "admitted_later_records": "records that the admission rule kept from the cold tier at first, written there later",
    "admitted_records": "records that the admission rule let into the cold tier",
    "catalog_changes_lost": "changes that did not reach the catalog",
    "catalog_failures": "calls of the catalog that failed",
    "catalog_lookups": "lookups that the catalog answered, by whether it is complete",
    "catalog_reconciled": "records that Redis no longer had, found by a comparison with the catalog",
    "catalog_unknown_records": "records in Redis that the catalog did not have",
    "corrupt_records": "records that did not match their seal; none was served",
    "declined_bytes": "bytes of records that the admission rule kept from the cold tier",
    "declined_records": "records that the admission rule kept from the cold tier",
    "demoted_records": "records that hints dropped from a tier where a slower one has them",
    "discarded_records": "records that an engine found bad",
    "encrypted_records": "records that were encrypted",
    "encryption_misses": "short lookups and failed loads that a missing or wrong key may have caused",
    "encryption_refused_saves": "records that were not kept because the right key was missing",
    "hints": "hints of clients, by what was asked for and whether it was taken",
    "hints_dropped": "marks of hints that did not reach the service that evicts",
    "lookup_hits": "lookups that found a point to resume from",
    "lookup_tier_failures": "lookups that a tier did not answer",
    "lookups": "lookups",
    "manifest_failures": "attempts to write a manifest to a tier that failed; they are repeated",
    "manifest_read_failures": "manifests that `kvstore explain` could not read",
    "pending_failures": "failed operations on pending entries",
    "pending_finished": "write-backs of other services that were finished here; lost: no tier has the record",
    "pending_left": "pending entries left for other services",
    "prefetched_bytes": "bytes of records that prefetches brought, by what became of them",
    "prefetches": "prefetches, by outcome",
    "request_tokens": "tokens of prompts that engines reported: of the prompt, held by the engine, resumed from here",
    "requests": "requests that engines reported, by how far they were resumed and why no further",
    "retention_boundaries": "boundaries that retention removed",
    "retention_bytes": "bytes that retention removed",
    "retention_failures": "eviction runs and deletions that failed",
    "s3_received_bytes": "bytes of records from S3",
    "s3_requests": "requests to S3, each attempt",
    "s3_retries": "requests to S3 that were sent again",
    "s3_sent_bytes": "bytes of records to S3",
    "s3_throttled": "answers of S3 that demanded fewer requests",
    "saves": "records that engines saved, by outcome",
    "saves_lost": "records that engines computed and did not save, by reason",
    "served_bytes": "bytes leased to engines",
    "served_records": "records leased to engines, by the tier they were read from",
    "stage_misses": "records that were expected in a tier and missing",
    "stage_refused": "hits that were shortened for lack of room",
    "staged_records": "records read from slower tiers",
    "stages": "hits that were staged",
    "stages_cut": "hits that were shortened for lack of time",
    "tier_evicted_records": "records that a tier evicted by itself, one by one",
    "tier_errors": "calls of a tier that failed",
    "tier_full": "records for which a tier had no room",
    "tier_put_bytes": "bytes written to a tier",
    "tier_read_bytes": "bytes read from a tier",
    "tier_refused": "calls that were refused while a tier is not used or has too many",
    "write_back_bytes": "bytes copied to slower tiers",
    "write_back_dropped": "records that are not copied to a slower tier",
    "write_back_failures": "writes to a slower tier that failed and are retried",
}
"""Meters that only grow; shown as `kvstore_<name>_total`."""

GAUGES = {
    "encryption_problems": "tenants whose encryption keys are not those of their records, by what is wrong",
    "catalog_complete": "1 while the catalog has every stored record, apart from the changes that wait in services",
    "pending_bytes": "bytes in the hot tier that the cold tier does not have yet, of all services",
    "pending_limit_bytes": "limit of pending_bytes; beyond it new records are not written to the hot tier",
    "pending_records": "records in the hot tier that the cold tier does not have yet, of all services",
    "tier_calls": "running calls of a tier",
    "tier_open": "1 while a tier is not used after failures",
    "tier_quarantined": "corrupt records quarantined since the start",
}
"""Meters that go up and down; shown as `kvstore_<name>`."""

OWN_GAUGES = {
    "catalog_waiting_changes": "changes that this service has yet to report to the catalog",
    "catalog_waiting_seconds": "for how long the catalog has taken none of them; 0: it takes them",
    "info": "1; the release is a label",
    "uptime_seconds": "seconds since the service started",
    "sessions": "connections of engines",
    "requests_running": "requests of engines that are being answered",
    "receive_bytes_used": "bytes of saves being received",
    "receive_bytes_limit": "limit of receive_bytes_used",
    "known_pieces_bytes": "hashes of long prompts that are kept for the next questions of routers",
    "tenant_maximum_bytes": "bytes of the cold tier beyond which a tenant's own records are evicted first",
    "tenant_used_bytes": "bytes of the cold tier that a tenant with a quota uses",
    "tier_healthy": "1 while the tier answers",
    "tier_refuses_writes": "1 while the tier answers and takes no writes",
    "tier_used_bytes": "bytes that a tier holds, the last known in an outage; of Redis the memory of its servers",
    "tier_limit_bytes": "bytes that a tier may hold, where there is a limit; the last known in an outage",
    "write_back_waiting_bytes": "bytes that wait in this service to be written to a tier",
}
"""Gauges that are read for each request of `/metrics`; shown as `kvstore_<name>`."""

_METER = re.compile(r'([a-z][a-z0-9_]*)(\{[a-z_]+="[^"\\\n]*"(?:,[a-z_]+="[^"\\\n]*")*\})?')

Samples = defaultdict[str, list[tuple[str, float]]]


ALWAYS = (
    *("catalog_changes_lost", "catalog_reconciled", "discarded_records", "lookup_hits", "lookups", "served_bytes"),
    "stages",
)
"""Counters that are 0 before their first count."""
ALWAYS_OF_S3 = ("s3_received_bytes", "s3_requests", "s3_retries", "s3_sent_bytes", "s3_throttled")
ALWAYS_OF_TIERS = (
    *("corrupt_records", "retention_boundaries", "retention_bytes", "retention_failures", "served_records"),
    *(
        "tier_errors",
        "tier_put_bytes",
        "tier_read_bytes",
        "tier_evicted_records",
        "tier_refused",
        "write_back_dropped",
        "write_back_failures",
    ),
)
"""Likewise, with a series for each tier."""
ALWAYS_BY_LABEL = (
    'encryption_misses{reason="tampered"}',
    *(f'encryption_problems{{reason="{reason}"}}' for reason in ("missing_key", "no_key", "wrong_key")),
    *(
        f'hints{{hint="{hint}",outcome="{outcome}"}}'
        for hint in ("demote", "prefetch", "priority", "release", "retain_s")
        for outcome in ("taken", "over_rate")
    ),
    *(f'hints_dropped{{reason="{reason}"}}' for reason in ("full", "unavailable")),
    *(f'prefetches{{outcome="{outcome}"}}' for outcome in ("fetched", "part", "in_memory", "failed", "refused")),
    *(f'prefetched_bytes{{outcome="{outcome}"}}' for outcome in ("fetched", "used", "wasted")),
    *(f'saves{{outcome="{outcome}"}}' for outcome in ("stored", "exists", "busy", "full")),
    *(f'stage_refused{{reason="{reason}"}}' for reason in ("memory_full", "stage_bytes", "leases")),
    *(f'requests{{reason="",result="{result}"}}' for result in ("hit", "part", "miss", "local")),
)
"""Likewise, as the meters spell them."""

Quotas = Mapping[str, Mapping[str, int | None]]


def render(
    meters: Mapping[str, float],
    tiers: Iterable[TierState],
    service: Mapping[str, object],
    quotas: Quotas = MappingProxyType({}),
    backlog: Backlog | None = None,
) -> str:
    """All metrics as text. Alerts and charts need a series to be there before its first count, so those of `ALWAYS...`
    begin with 0.

    Args:
        meters: A snapshot of the store's meters.
        tiers: The state of each tier; empty when it is not known now.
        service: The data port's description of itself, as `Server.describe` returns it, and `known_pieces_bytes` of the
            administration.
        quotas: As `StoreOperations.quotas` returns them.
        backlog: As `StoreOperations.backlog` returns it.
    """
    samples: Samples = defaultdict(list)
    tiers = list(tiers)
    for key, value in sorted({**_zeros(tiers, meters), **meters}.items()):
        if (match := _METER.fullmatch(key)) is not None:
            samples[match[1]].append((match[2] or "", value))
    lines: list[str] = []
    for name, listed in samples.items():
        if name in COUNTERS:
            lines += _family(f"kvstore_{name}_total", "counter", COUNTERS[name], listed)
        elif name in GAUGES:
            lines += _family(f"kvstore_{name}", "gauge", GAUGES[name], listed)
        else:
            lines += _family(f"kvstore_{name}", "untyped", "not described yet", listed)
    for name, listed in {**_own(tiers, service), **_of_tenants(quotas), **_of_catalog(backlog)}.items():
        lines += _family(f"kvstore_{name}", "gauge", OWN_GAUGES[name], listed)
    return "\n".join(lines) + "\n"


def _zeros(tiers: Iterable[TierState], meters: Mapping[str, float]) -> dict[str, float]:
    """Series that have not counted yet. A labelled one is listed beside those with further labels."""
    names = [tier.name for tier in tiers]
    counted = {key.partition("{")[0] for key in meters}
    zeros = [name for name in (*ALWAYS, *(ALWAYS_OF_S3 if "s3" in names else ())) if name not in counted]
    zeros += [f'{name}{{tier="{tier}"}}' for name in ALWAYS_OF_TIERS for tier in names]
    zeros += ALWAYS_BY_LABEL
    slower = [tier.name for tier in tiers if tier.level is not None]
    zeros += [f'{name}{{tier="{tier}"}}' for name in ("tier_calls", "tier_open") for tier in slower]
    return dict.fromkeys(zeros, 0.0)


def _of_tenants(quotas: Quotas) -> Samples:
    samples: Samples = defaultdict(list)
    for tenant, quota in quotas.items():
        label = '{tenant="' + tenant.replace("\\", "\\\\").replace('"', '\\"') + '"}'
        for name in ("used_bytes", "maximum_bytes"):
            if (value := quota[name]) is not None:
                samples[f"tenant_{name}"].append((label, value))
    return samples


def _of_catalog(backlog: Backlog | None) -> Samples:
    samples: Samples = defaultdict(list)
    if backlog is not None:
        since_ms = backlog.since_ms
        waits_s = 0.0 if since_ms is None else max(0.0, (SYSTEM_CLOCK.wall_ms() - since_ms) / 1000)
        samples["catalog_waiting_changes"].append(("", backlog.num_changes))
        samples["catalog_waiting_seconds"].append(("", waits_s))
    return samples


def _own(tiers: Iterable[TierState], service: Mapping[str, object]) -> Samples:
    samples: Samples = defaultdict(list)
    samples["info"].append((f'{{release="{service["release"]}"}}', 1))
    samples["uptime_seconds"].append(("", _number(service["uptime_s"])))
    for name in ("sessions", "requests_running", "receive_bytes_used", "receive_bytes_limit", "known_pieces_bytes"):
        samples[name].append(("", _number(service[name])))
    for tier in tiers:
        label = f'{{tier="{tier.name}"}}'
        samples["tier_healthy"].append((label, int(tier.usage is not None and not tier.is_open)))
        if tier.level is not None:
            refuses = tier.usage is not None and bool(tier.usage.refuses_writes)
            samples["tier_refuses_writes"].append((label, int(refuses)))
            samples["write_back_waiting_bytes"].append((label, tier.waiting_bytes))
        if (usage := tier.known_usage) is not None:
            for name, value in (("used_bytes", usage.used_bytes), ("limit_bytes", usage.limit_bytes)):
                if value is not None:
                    samples[f"tier_{name}"].append((label, value))
    return samples


def _family(name: str, kind: str, text: str, listed: Iterable[tuple[str, float]]) -> list[str]:
    samples = [f"{name}{labels} {_text(value)}" for labels, value in listed]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
