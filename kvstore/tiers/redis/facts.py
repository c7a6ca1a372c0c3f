"""What a server reports about itself, and what of that an operator should change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.tiers.base import Concern, Severity

__all__ = ["MEMORY_BYTES_MIN", "SLOW_S", "VERSION_MIN", "ServerFacts", "concerns_of", "parse_info", "parse_version"]

MEMORY_BYTES_MIN = 256 << 20
"""Less holds not even the pages of one long prompt (8,192 tokens of a 7B model: 0.5-4 GiB)."""
VERSION_MIN = (6, 2)
SLOW_S = 0.005
_DIGITS_MAX = 18
"""Of a number that fits into 64 bits."""
_DISK_STATES = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server that holds records.

    Attributes:
        address: `host:port`.
        product: `redis` or `valkey`.
        version: As reported, e.g. `7.0.15`; a Valkey's own version, not the Redis version that it is compatible with.
        role: `master`, or `slave`.
        num_replicas: Replicas that are connected to it.
        used_bytes: Its memory in use, other users' included.
        limit_bytes: Its `maxmemory`; `None`: no limit.
        eviction_policy: Its `maxmemory-policy`.
        num_evicted: Keys evicted since it started.
        latency_s: One small round trip, just now.
        machine_bytes: Memory of its machine; `None`: not reported.
        writes_log: Whether it appends every write to a file.
        disk_problem: Which part of its persistence failed last; empty: none. It may refuse writes until that is fixed.
        is_cluster_node: Whether it is a node of a cluster.
    """

    address: str
    product: str
    version: str
    role: str
    num_replicas: int
    used_bytes: int
    limit_bytes: int | None
    eviction_policy: str
    num_evicted: int
    latency_s: float
    machine_bytes: int | None = None
    writes_log: bool = False
    disk_problem: str = ""
    is_cluster_node: bool = False


def parse_info(info: bytes, address: str, latency_s: float) -> ServerFacts:
    """Read the answer to `INFO`; what is missing counts as 0 or the empty text."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    facts = {name: value for name, _, value in lines}
    is_valkey = "valkey_version" in facts

    def number(name: str) -> int:
        text = facts.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX else 0

    return ServerFacts(
        address=address,
        product="valkey" if is_valkey else "redis",
        version=facts.get("valkey_version" if is_valkey else "redis_version", ""),
        role=facts.get("role", ""),
        num_replicas=number("connected_slaves"),
        used_bytes=number("used_memory"),
        limit_bytes=number("maxmemory") or None,
        eviction_policy=facts.get("maxmemory_policy", ""),
        num_evicted=number("evicted_keys"),
        latency_s=latency_s,
        machine_bytes=number("total_system_memory") or None,
        writes_log=facts.get("aof_enabled") == "1",
        disk_problem=", ".join(name for name in _DISK_STATES if facts.get(name, "ok") != "ok"),
        is_cluster_node=facts.get("cluster_enabled") == "1",
    )


def concerns_of(facts: Sequence[ServerFacts]) -> list[Concern]:
    """What an operator should change about these servers, dangers first."""
    concerns = [concern for server in facts for concern in _concerns_of(server)]
    return sorted(concerns, key=lambda concern: concern.severity is not Severity.DANGER)


def _concerns_of(server: ServerFacts) -> list[Concern]:
    seen: list[tuple[Severity, str]] = []
    if server.eviction_policy.startswith("allkeys"):
        seen.append(
            (
                Severity.DANGER,
                f"this Redis may evict any key (maxmemory-policy {server.eviction_policy}): records that no slower "
                "tier has, pending writes and the catalog too; run CONFIG SET maxmemory-policy volatile-lru, which "
                "takes only what the slower tier holds",
            )
        )
    elif server.eviction_policy == "noeviction" and server.limit_bytes is not None:
        seen.append(
            (
                Severity.ADVICE,
                "this Redis evicts nothing (maxmemory-policy noeviction): once it is full it takes no new record; run "
                "CONFIG SET maxmemory-policy volatile-lru to let it drop what the slower tier holds",
            )
        )
    if server.limit_bytes is None:
        seen.append(
            (
                Severity.ADVICE,
                "this Redis has no memory limit (maxmemory 0): it grows until the machine kills it; run CONFIG SET "
                "maxmemory to at most three quarters of its machine's memory",
            )
        )
    elif server.limit_bytes < MEMORY_BYTES_MIN:
        seen.append(
            (
                Severity.ADVICE,
                f"this Redis has too little memory for pages (maxmemory {server.limit_bytes} bytes, useful from "
                f"{MEMORY_BYTES_MIN}): run CONFIG SET maxmemory with more, or set hot to memory:",
            )
        )
    if (version := parse_version(server.version)) is not None and server.product == "redis" and version < VERSION_MIN:
        seen.append(
            (
                Severity.ADVICE,
                f"this Redis is older than what we test (version {server.version}): upgrade to 6.2 or later",
            )
        )
    if server.latency_s > SLOW_S:
        seen.append(
            (
                Severity.ADVICE,
                f"a small round trip takes {server.latency_s * 1000:.1f} ms (up to {SLOW_S * 1000:.0f} ms is usual in "
                "one data centre): check the network, SLOWLOG, and whether it swaps",
            )
        )
    return [Concern(severity, server.address, text) for severity, text in seen]


def parse_version(text: str) -> tuple[int, ...] | None:
    """The first two numbers of a version, or `None`."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) and len(parts) == 2 else None
