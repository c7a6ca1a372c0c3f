"""Redis: login, rights, topology, version, memory, eviction policy, persistence, latency, clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.doctor.clocks import judge_clock
from kvstore.doctor.finding import Finding, failed, ok, skipped, warning, worst
from kvstore.doctor.running import Check, Report
from kvstore.errors import KVStoreError
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import format_bytes
from kvstore.tiers.locations import RedisLocation

if TYPE_CHECKING:  # it needs the extra `redis`
    from kvstore.tiers.redis.examine import RedisExamination, ServerFacts

__all__ = ["REDIS_NAMES", "judge_redis", "judge_refusal", "redis_check"]

REDIS_NAMES = (
    *("redis", "redis.rights", "redis.topology", "redis.version", "redis.memory", "redis.policy"),
    *("redis.persistence", "redis.latency", "redis.clock"),
)
_VOLATILE = "CONFIG SET maxmemory-policy volatile-lru, and the same in redis.conf"
_LOGIN_FIX = (
    "put the right user and password into hot (KVSTORE_HOT=redis://user:password@host:port/0, with %40 for @); "
    "ACL LIST on the server shows its users"
)


def redis_check(location: RedisLocation) -> Check:
    """The check of one location.

    Raises:
        ImportError: The client is not installed.
    """
    from kvstore.tiers.redis.examine import examine_redis  # slow: here, so that it does not count for the deadline

    async def run(report: Report, deadline: Deadline) -> None:
        try:
            seen = await examine_redis(location, deadline=deadline)
        except KVStoreError as error:
            report(judge_refusal(location, error))
            for name in REDIS_NAMES[1:]:
                report(skipped(name, "see redis"))
            return
        for finding in judge_redis(location, seen):
            report(finding)

    return Check(REDIS_NAMES, run, _no_answer_fix(location))


def _no_answer_fix(location: RedisLocation) -> str:
    host, port = location.addresses[0]
    return (
        f"check that it is not frozen and not swapping: redis-cli -h {host} -p {port} PING; SLOWLOG GET; or restart it"
    )


def judge_refusal(location: RedisLocation, error: KVStoreError) -> Finding:
    """Judge why it cannot be examined."""
    text, expected = str(error), f"{location} answers and accepts our login"
    if any(code in text for code in ("WRONGPASS", "NOAUTH", "invalid password", "invalid username")):
        return failed("redis", text, expected, _LOGIN_FIX)
    if "NOPERM" in text:
        return failed("redis", text, expected, "give this user the rights in docs/redis.md (ACL SETUSER)")
    if "deadline" in text:
        return failed("redis", text, expected, _no_answer_fix(location))
    # our messages name the next step after their first colon
    next_step = error.message.partition(": ")[2] or "check that it runs, and that hot (KVSTORE_HOT) names it"
    return failed("redis", text, expected, next_step)


def judge_redis(location: RedisLocation, seen: RedisExamination) -> list[Finding]:
    """All findings, in the order of `REDIS_NAMES`."""
    servers = seen.servers
    addresses = ", ".join(server.address for server in servers)
    clocks = [
        judge_clock("redis.clock", f"Redis at {address}", offset_s, error_s)
        for address, (offset_s, error_s) in seen.clock_offsets_s.items()
    ]
    return [
        ok("redis", f"answers at {addresses}", "it answers and accepts our login"),
        _judge_rights(seen),
        _judge_topology(location, seen),
        worst([_judge_version(server) for server in servers]),
        worst([_judge_memory(server) for server in servers]),
        worst([_judge_policy(server) for server in servers]),
        worst([_judge_persistence(server) for server in servers]),
        worst([_judge_latency(server) for server in servers]),
        worst(clocks),
    ]


def _judge_rights(seen: RedisExamination) -> Finding:
    name, expected = "redis.rights", "our keys, scripts and writes are allowed"
    if not seen.refused:
        return ok(name, "all commands that the store uses are allowed", expected)
    said = "; ".join(f"{what}: {why}" for what, why in seen.refused.items())
    reasons = " ".join(seen.refused.values())
    fix = "give this user the rights in docs/redis.md: ACL SETUSER ... (this release may need more than earlier ones)"
    if "OOM" in reasons:
        fix = f"it is full and evicts nothing: {_VOLATILE}; or raise maxmemory"
    elif "MISCONF" in reasons:
        fix = "free space on its disk, or switch snapshots off: CONFIG SET save ''"
    elif "READONLY" in reasons:
        fix = "name the primary in hot, or its sentinels: redis+sentinel://sentinel:26379/service"
    elif "MOVED" in reasons:
        fix = "this is a Redis Cluster: write redis+cluster:// in hot"
    return failed(name, said, expected, fix)


def _judge_topology(location: RedisLocation, seen: RedisExamination) -> Finding:
    name = "redis.topology"
    if location.mode == "cluster":
        expected = "every hash slot is served, every primary has a replica"
        if seen.num_slots_missing:
            fix = "bring the missing nodes back (redis-cli CLUSTER NODES), or redis-cli --cluster fix host:port"
            return failed(name, f"{seen.num_slots_missing} hash slots are not served", expected, fix)
        alone = [server.address for server in seen.servers if not server.num_replicas]
        if alone:
            fix = "add replicas: redis-cli --cluster add-node ... --cluster-slave; else a dead node's keys are misses"
            return warning(name, f"no replica: {', '.join(alone)}", expected, fix)
        return ok(name, f"a cluster of {len(seen.servers)} primaries", expected)
    if location.mode == "sentinel":
        return _judge_sentinels(seen)
    (server,) = seen.servers
    expected = "one primary"
    if server.is_cluster_node:
        return failed(name, "a node of a Redis Cluster", expected, "write redis+cluster:// in hot instead of redis://")
    if server.role != "master":
        fix = "name the primary in hot, or its sentinels: redis+sentinel://sentinel:26379/service"
        return failed(name, f"{server.address} is a replica", expected, fix)
    return ok(name, f"one primary with {server.num_replicas} replicas", expected)


def _judge_sentinels(seen: RedisExamination) -> Finding:
    name, expected = "redis.topology", "all sentinels name one primary"
    if len(set(seen.sentinels.values())) > 1:
        said = "; ".join(f"{address}: {answer}" for address, answer in seen.sentinels.items())
        fix = "start sentinels that are down; SENTINEL RESET * on one that names an old primary"
        return warning(name, said, expected, fix)
    replicas = sum(server.num_replicas for server in seen.servers)
    if not replicas:
        fix = "start a replica (replicaof): there is nothing that sentinels could fail over to"
        return warning(name, "the primary has no replica", expected, fix)
    return ok(name, f"{len(seen.sentinels)} sentinels name one primary with {replicas} replicas", expected)


def _judge_version(server: ServerFacts) -> Finding:
    from kvstore.tiers.redis.examine import VERSION_MIN, parse_version

    name, least = "redis.version", ".".join(map(str, VERSION_MIN))
    seen, expected = f"{server.product} {server.version or 'unknown'}", f"Redis {least} or later, or Valkey"
    parsed = parse_version(server.version)
    if server.product == "redis" and parsed is not None and parsed < VERSION_MIN:
        fix = f"upgrade {server.address} to Redis {least} or later, or to Valkey"
        return failed(name, f"{seen} at {server.address}: older than what is tested", expected, fix)
    return ok(name, seen, expected)


def _judge_memory(server: ServerFacts) -> Finding:
    from kvstore.tiers.redis.examine import MEMORY_BYTES_MIN

    name, limit = "redis.memory", server.limit_bytes
    best = server.machine_bytes * 3 // 4 if server.machine_bytes is not None else None
    expected = f"maxmemory from {format_bytes(MEMORY_BYTES_MIN)} to three quarters of its machine"
    command = f"CONFIG SET maxmemory {best // (1 << 20)}mb" if best else "CONFIG SET maxmemory <bytes>"
    fix = f"{command} on {server.address} (or less, if others need memory there), and the same in redis.conf"
    if limit is None:
        return warning(name, "no maxmemory: it grows until its machine runs out of memory", expected, fix)
    seen = f"{format_bytes(server.used_bytes)} of maxmemory {format_bytes(limit)} in use"
    if limit < MEMORY_BYTES_MIN:
        return warning(name, f"{seen}: too little for the pages of long prompts", expected, fix)
    if best is not None and limit > best * 6 // 5:
        return warning(name, f"{seen}, its machine has {format_bytes(server.machine_bytes or 0)}", expected, fix)
    return ok(name, seen, expected)


def _judge_policy(server: ServerFacts) -> Finding:
    name, policy, expected = (
        "redis.policy",
        server.eviction_policy,
        "maxmemory-policy volatile-lru, or another volatile-*",
    )
    if policy.startswith("allkeys"):
        seen = f"{policy}: it may evict records that no other tier has, pending entries and the catalog"
        return failed(name, seen, expected, _VOLATILE)
    if policy == "noeviction":
        seen = "noeviction: once it is full it accepts no new record"
        return warning(name, seen, expected, _VOLATILE)
    return ok(name, policy or "unknown", expected)


def _judge_persistence(server: ServerFacts) -> Finding:
    name, expected = "redis.persistence", "none is needed: what is lost is a miss"
    if server.disk_problem:
        seen = f"its last write to disk failed ({server.disk_problem}): it may refuse writes"
        return failed(
            name, seen, expected, "free space on its disk, or: CONFIG SET save '' and CONFIG SET appendonly no"
        )
    if server.writes_log:
        seen = "every record is written to its append-only file too"
        return warning(name, seen, expected, "CONFIG SET appendonly no, and the same in redis.conf")
    return ok(name, "no append-only file, nothing failed", expected)


def _judge_latency(server: ServerFacts) -> Finding:
    from kvstore.tiers.redis.examine import SLOW_S

    name, seen = "redis.latency", f"{server.latency_s * 1000:.2f} ms for the best of a few small round trips"
    expected = f"at most {SLOW_S * 1000:g} ms, as in one data centre"
    if server.latency_s > SLOW_S:
        fix = f"move it closer; or find what blocks it: redis-cli -h {server.address.rpartition(':')[0]} LATENCY DOCTOR"
        return warning(name, seen, expected, f"{fix}, SLOWLOG GET; check that it does not swap")
    return ok(name, seen, expected)
