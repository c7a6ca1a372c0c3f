"""Redis: login, rights, topology, version, memory, eviction policy, persistence, latency, clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.doctor.check import Check, Criterion, Finding, worst
from kvstore.doctor.machine import judge_clock
from kvstore.errors import KVStoreError, next_step
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import counted, format_bytes
from kvstore.tiers.locations import RedisLocation

if TYPE_CHECKING:  # it needs the extra `redis`
    from kvstore.tiers.redis.examine import RedisExamination, ServerFacts

REDIS_NAMES = (
    *("redis", "redis.rights", "redis.topology", "redis.version", "redis.memory", "redis.policy"),
    *("redis.persistence", "redis.latency", "redis.clock"),
)
_LOGIN_ERRORS = ("WRONGPASS", "NOAUTH", "invalid password", "invalid username")
_VOLATILE_FIX = "CONFIG SET maxmemory-policy volatile-lru, and the same in redis.conf"
_FULL_SHARE = 0.95
"""Above this a Redis refuses records, which are large, while small values still find room."""
_PRIMARY_FIX = "name the primary in hot, or its sentinels: redis+sentinel://sentinel:26379/service"
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

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        try:
            seen = await examine_redis(location, deadline=deadline)
        except KVStoreError as error:
            yield judge_refusal(location, error)
            return
        for finding in judge_redis(location, seen):
            yield finding

    return Check(REDIS_NAMES, run, _no_answer_fix(location))


def _no_answer_fix(location: RedisLocation) -> str:
    host, port = location.addresses[0]
    return (
        f"check that it is not frozen and not swapping: redis-cli -h {host} -p {port} PING; SLOWLOG GET; or restart it"
    )


def judge_refusal(location: RedisLocation, error: KVStoreError) -> Finding:
    """Judge why it cannot be examined."""
    text = str(error)
    fix = next_step(text)[1] or "check that it runs, and that hot (KVSTORE_HOT) names it"
    if any(code in text for code in _LOGIN_ERRORS):
        fix = _LOGIN_FIX
    elif "NOPERM" in text:
        fix = "give this user the rights in docs/redis.md (ACL SETUSER)"
    elif "deadline" in text:
        fix = _no_answer_fix(location)
    return Criterion("redis", f"{location} answers and accepts our login").failed(error.sentence(), fix)


def judge_redis(location: RedisLocation, seen: RedisExamination) -> list[Finding]:
    """All findings, in the order of `REDIS_NAMES`."""
    servers = seen.servers
    addresses = ", ".join(server.address for server in servers)
    clocks = [
        judge_clock("redis.clock", f"Redis at {address}", offset_s, error_s)
        for address, (offset_s, error_s) in seen.clock_offsets_s.items()
    ]
    judges = (_judge_version, _judge_memory, _judge_policy, _judge_persistence, _judge_latency)
    return [
        Criterion("redis", "it answers and accepts our login").ok(f"answers at {addresses}"),
        _judge_rights(seen),
        _judge_topology(location, seen),
        *(_of_all(servers, [judge(server) for server in servers]) for judge in judges),
        worst(clocks),
    ]


def _of_all(servers: Sequence[ServerFacts], findings: Sequence[Finding]) -> Finding:
    """The worst finding of one subject, whose fix names the other servers that need it too."""
    found = worst(findings)
    alike = zip(servers, findings, strict=True)
    others = [server.address for server, one in alike if one.verdict is found.verdict and one is not found]
    return replace(found, fix=f"{found.fix}; likewise on {', '.join(others)}") if found.fix and others else found


def _judge_rights(seen: RedisExamination) -> Finding:
    it = Criterion("redis.rights", "our keys, scripts and writes are allowed")
    if seen.silent:
        return it.skipped("see redis.topology")
    if not seen.refused:
        return it.ok("all commands that the store uses are allowed")
    reasons = " ".join(seen.refused.values())
    fix = "give this user the rights in docs/redis.md: ACL SETUSER ... (this release may need more than earlier ones)"
    if "OOM" in reasons:
        fix = f"it is full and evicts nothing: {_VOLATILE_FIX}; or raise maxmemory"
    elif "MISCONF" in reasons:
        fix = "free space on its disk, or switch snapshots off: CONFIG SET save ''"
    elif "READONLY" in reasons:
        fix = _PRIMARY_FIX
    elif "MOVED" in reasons:
        fix = "this is a Redis Cluster: write redis+cluster:// in hot"
    return it.failed("; ".join(f"{what}: {why}" for what, why in seen.refused.items()), fix)


def _judge_topology(location: RedisLocation, seen: RedisExamination) -> Finding:
    if location.mode == "cluster":
        return _judge_cluster(seen)
    if location.mode == "sentinel":
        return _judge_sentinels(seen)
    it, (server,) = Criterion("redis.topology", "one primary"), seen.servers
    if server.is_cluster_node:
        return it.failed("a node of a Redis Cluster", "write redis+cluster:// in hot instead of redis://")
    if server.role != "master":
        return it.failed(f"{server.address} is a replica", _PRIMARY_FIX)
    return it.ok(f"one primary with {counted(server.num_replicas, 'replica')}")


def _judge_cluster(seen: RedisExamination) -> Finding:
    it = Criterion("redis.topology", "every hash slot is served, every primary has a replica")
    if seen.silent:
        host, _, port = seen.servers[0].address.rpartition(":")
        fix = f"start it or a replica of it again: redis-cli -h {host} -p {port} CLUSTER NODES shows both"
        silent = "; ".join(f"{address} serves hash slots: {why}" for address, why in seen.silent.items())
        return it.failed(silent, f"{fix}; if its data is lost, redis-cli --cluster fix {host}:{port}")
    if seen.num_slots_missing:
        fix = "start the missing nodes again (redis-cli CLUSTER NODES), or redis-cli --cluster fix host:port"
        return it.failed(f"{seen.num_slots_missing} hash slots are not served", fix)
    if seen.num_slots_moving:
        address = next(iter(seen.num_slots_moving))
        moving = ", ".join(f"{num_slots} at {address}" for address, num_slots in seen.num_slots_moving.items())
        fix = f"wait until they are moved; if nothing moves them any more: redis-cli --cluster fix {address}"
        return it.warning(f"hash slots on their way to another node, whose catalog refuses changes: {moving}", fix)
    alone = [server.address for server in seen.servers if not server.num_replicas]
    if alone:
        fix = "add replicas: redis-cli --cluster add-node ... --cluster-slave; without them a dead node's keys are lost"
        return it.warning(f"no replica: {', '.join(alone)}", fix)
    return it.ok(f"a cluster of {counted(len(seen.servers), 'primary', 'primaries')}")


def _judge_sentinels(seen: RedisExamination) -> Finding:
    it = Criterion("redis.topology", "all sentinels name one primary")
    if len(set(seen.sentinels.values())) > 1:
        answers = "; ".join(f"{address}: {answer}" for address, answer in seen.sentinels.items())
        return it.warning(answers, "start sentinels that are down; SENTINEL RESET * on one that names an old primary")
    replicas = sum(server.num_replicas for server in seen.servers)
    if not replicas:
        return it.warning("the primary has no replica", "start a replica (replicaof), so that sentinels can fail over")
    return it.ok(
        f"{counted(len(seen.sentinels), 'sentinel names', 'sentinels name')} one primary with "
        f"{counted(replicas, 'replica')}"
    )


def _judge_version(server: ServerFacts) -> Finding:
    from kvstore.tiers.redis.examine import VERSION_MIN, parse_version

    least = ".".join(map(str, VERSION_MIN))
    it = Criterion("redis.version", f"Redis {least} or later, or Valkey")
    seen, parsed = f"{server.product} {server.version or 'unknown'}", parse_version(server.version)
    if server.product == "redis" and parsed is not None and parsed < VERSION_MIN:
        fix = f"upgrade {server.address} to Redis {least} or later, or to Valkey"
        return it.failed(f"{seen} at {server.address}: older than every tested version", fix)
    return it.ok(seen)


def _judge_memory(server: ServerFacts) -> Finding:
    from kvstore.tiers.redis.examine import MEMORY_BYTES_MIN

    it = Criterion("redis.memory", f"maxmemory from {format_bytes(MEMORY_BYTES_MIN)} to three quarters of its machine")
    limit = server.limit_bytes
    best = server.machine_bytes * 3 // 4 if server.machine_bytes is not None else None
    command = f"CONFIG SET maxmemory {best // (1 << 20)}mb" if best else "CONFIG SET maxmemory <bytes>"
    fix = f"{command} on {server.address} (or less, if others need memory there), and the same in redis.conf"
    if limit is None:
        return it.warning("no maxmemory: it grows until its machine runs out of memory", fix)
    seen = f"{format_bytes(server.used_bytes)} of maxmemory {format_bytes(limit)} in use"
    if server.eviction_policy == "noeviction" and server.used_bytes >= _FULL_SHARE * limit:
        return it.failed(f"{seen}: it is full and evicts nothing", f"{_VOLATILE_FIX}; or {fix}")
    if limit < MEMORY_BYTES_MIN:
        return it.warning(f"{seen}: too little for the pages of long prompts", fix)
    if best is not None and limit > best * 6 // 5:
        return it.warning(f"{seen}, its machine has {format_bytes(server.machine_bytes or 0)}", fix)
    return it.ok(seen)


def _judge_policy(server: ServerFacts) -> Finding:
    it = Criterion("redis.policy", "maxmemory-policy volatile-lru, or another volatile-*")
    policy = server.eviction_policy
    if policy.startswith("allkeys"):
        seen = f"{policy}: it may evict the catalog, pending entries, and records that no other tier has"
        return it.failed(seen, _VOLATILE_FIX)
    if policy == "noeviction":
        return it.warning("noeviction: once it is full it accepts no new record", _VOLATILE_FIX)
    return it.ok(policy or "unknown")


def _judge_persistence(server: ServerFacts) -> Finding:
    it = Criterion("redis.persistence", "none is needed: a lost record is a cache miss")
    if server.disk_problem:
        seen = f"its last write to disk failed ({server.disk_problem}): it may refuse writes"
        return it.failed(seen, "free space on its disk, or: CONFIG SET save '' and CONFIG SET appendonly no")
    if server.writes_log:
        fix = "CONFIG SET appendonly no, and the same in redis.conf"
        return it.warning("it also writes every record to its append-only file", fix)
    return it.ok("no append-only file, no failed write")


def _judge_latency(server: ServerFacts) -> Finding:
    from kvstore.tiers.redis.examine import SLOW_S

    it = Criterion("redis.latency", f"at most {SLOW_S * 1000:g} ms, as in one data centre")
    seen = f"{server.latency_s * 1000:.2f} ms for the fastest of a few small round trips"
    if server.latency_s > SLOW_S:
        host = server.address.rpartition(":")[0]
        fix = f"move it closer; or find what blocks it: redis-cli -h {host} LATENCY DOCTOR, SLOWLOG GET"
        return it.warning(seen, f"{fix}; check that it does not swap")
    return it.ok(seen)
