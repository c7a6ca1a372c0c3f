"""Examines servers for operators: what they report, and what of that to change; what our user may do; their clocks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import Unavailable, next_step
from kvstore.runtime.background import gather_all
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.base import Concern, Severity
from kvstore.tiers.locations import HostPort, RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.cluster import Cluster
from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.replies import check_replies, strange_reply
from kvstore.tiers.redis.resp import Command, ErrorReply
from kvstore.tiers.redis.topology import Topology, open_topology, query_sentinel

MEMORY_BYTES_MIN = 256 << 20
"""Less does not hold the pages of one long prompt (8,192 tokens of a 7B model: 0.5-4 GiB)."""
VERSION_MIN = (6, 2)
SLOW_S = 0.005
_DIGITS_MAX = 18
"""Of a number that fits into 64 bits."""
_DISK_STATES = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
_KEYS = ("v1/", "quarantine:v1/", "c1/", "c1t/", "c1d/", "c1o/", "kvstore:")
"""Prefixes of our keys, as docs/redis.md lists them for the rights of a user."""
_PINGS_MAX = 10
_PAUSE_S = 0.03
_PROBE_MS = 10_000


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server that holds records.

    Attributes:
        address: `host:port`.
        product: `redis` or `valkey`.
        version: As reported, for example `7.0.15`; a Valkey's own version, not the Redis version it is compatible with.
        role: `master`, or `slave`.
        num_replicas: Replicas that are connected to it.
        used_bytes: Its memory in use, also by other users.
        limit_bytes: Its `maxmemory`; `None`: no limit.
        eviction_policy: Its `maxmemory-policy`.
        latency_s: One small round trip, just now.
        machine_bytes: Memory of its machine; `None`: not reported.
        writes_log: Whether it appends every write to a file.
        disk_problem: Which part of its persistence failed last; empty: none. It may refuse writes until this is fixed.
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
    latency_s: float
    machine_bytes: int | None = None
    writes_log: bool = False
    disk_problem: str = ""
    is_cluster_node: bool = False


@dataclass(frozen=True, slots=True)
class RedisExamination:
    """The result of `examine_redis`.

    Attributes:
        servers: Those that hold records; their latency is the best of a few round trips.
        clock_offsets_s: By address: how far a server's clock is ahead of ours, and the largest error of this number.
        refused: By attempt, in words: the server's refusal. Empty: this user may do everything that we do.
        num_slots_missing: Hash slots of a cluster that no node serves; 0 without a cluster.
        sentinels: By address: the primary that a sentinel names, or why it names none. Empty without sentinels.
        silent: By address: why a node of a cluster that should serve slots does not answer. If there is one, what is
            refused was not tried: names are on all nodes.
        num_slots_moving: By address: hash slots that this node of a cluster hands over or takes over now. Without the
            nodes that have none, or do not say.
    """

    servers: tuple[ServerFacts, ...]
    clock_offsets_s: Mapping[str, tuple[float, float]]
    refused: Mapping[str, str]
    num_slots_missing: int
    sentinels: Mapping[str, str]
    silent: Mapping[str, str] = field(default_factory=dict)
    num_slots_moving: Mapping[str, int] = field(default_factory=dict)


async def examine_redis(location: RedisLocation, *, deadline: Deadline) -> RedisExamination:
    """Examine a location. It writes one small key, which is removed again, or else expires.

    Raises:
        InvalidRequest: A certificate cannot be used.
        Unavailable: There is no server, or it refuses our login; the message names the next step and no secret.
    """
    topology = open_topology(location, 1)
    try:
        named = list(await topology.nodes(deadline))
        facts, silent = await _facts_of(named, deadline)
        nodes = [node for node in named if node.address in facts]
        offsets = await gather_all([_clock_offset_s(node, deadline) for node in nodes])
        return RedisExamination(
            servers=tuple(facts.values()),
            clock_offsets_s={node.address: offset for node, offset in zip(nodes, offsets, strict=True)},
            refused={} if silent else await _refused(topology, deadline),
            num_slots_missing=(await topology.placement(deadline)).count(None),
            sentinels=await _sentinels(location, deadline) if location.mode == "sentinel" else {},
            silent=silent,
            num_slots_moving=await _slots_moving(nodes, deadline) if isinstance(topology, Cluster) else {},
        )
    finally:
        await topology.aclose()


async def _facts_of(nodes: Sequence[Node], deadline: Deadline) -> tuple[dict[str, ServerFacts], dict[str, str]]:
    """By address what each node reports, and why the others of a cluster report nothing.

    Raises:
        Unavailable: None does.
    """
    if len(nodes) > 1:  # the rest of the time is for those that answer
        deadline = deadline.earlier(deadline.remaining_s / 2)
    facts: dict[str, ServerFacts] = {}
    silent: dict[str, Unavailable] = {}

    async def read(node: Node) -> None:
        try:
            facts[node.address] = await read_facts(node, deadline, _PINGS_MAX)
        except Unavailable as error:
            silent[node.address] = error

    await gather_all([read(node) for node in nodes])
    if not facts:
        raise next(iter(silent.values()))
    ordered = {node.address: facts[node.address] for node in nodes if node.address in facts}
    return ordered, {address: next_step(str(error))[0] for address, error in silent.items()}


async def read_facts(node: Node, deadline: Deadline, num_pings_max: int = 1) -> ServerFacts:
    """What a server reports. While its latency is high, it is measured again, because a busy processor of ours may be
    the cause.
    """
    await _ping_s(node, deadline)  # it may include a connection attempt
    latency_s = await _ping_s(node, deadline)
    for _ in range(num_pings_max - 1):
        if latency_s <= SLOW_S:
            break
        await asyncio.sleep(_PAUSE_S)
        latency_s = min(latency_s, await _ping_s(node, deadline))
    (info,) = await node.control(("INFO",), deadline=deadline)
    check_replies([info])
    return parse_info(bytes(info) if isinstance(info, memoryview) else b"", node.address, latency_s)


async def _ping_s(node: Node, deadline: Deadline) -> float:
    started_s = asyncio.get_running_loop().time()
    check_replies(await node.control(("PING",), deadline=deadline))
    return asyncio.get_running_loop().time() - started_s


async def _clock_offset_s(node: Node, deadline: Deadline) -> tuple[float, float]:
    """How far the server's clock is ahead of ours, and the largest error of this number."""
    before_ms, started_s = SYSTEM_CLOCK.wall_ms(), asyncio.get_running_loop().time()
    (reply,) = await node.control(("TIME",), deadline=deadline)
    taken_s = asyncio.get_running_loop().time() - started_s
    check_replies([reply])
    parts = reply if isinstance(reply, list) else []
    digits = [part for part in parts if isinstance(part, bytes) and part.isdigit() and len(part) <= _DIGITS_MAX]
    if len(digits) == len(parts) == 2:
        time_s = int(digits[0]) + int(digits[1]) / 1e6
        return time_s - (before_ms / 1000 + taken_s / 2), taken_s / 2
    raise strange_reply("TIME", reply, node.address)


async def _slots_moving(nodes: Sequence[Node], deadline: Deadline) -> dict[str, int]:
    """As in `RedisExamination`. A user without the right to `CLUSTER NODES` learns nothing."""

    async def count(node: Node) -> int:
        (reply,) = await node.control(("CLUSTER", "NODES"), deadline=deadline)
        text = bytes(reply).decode(errors="replace") if isinstance(reply, bytes | memoryview) else ""
        own = next((line for line in text.splitlines() if "myself" in line), "")
        return sum(word.startswith("[") for word in own.split())  # [93->-id] or [93-<-id]

    counts = await gather_all([count(node) for node in nodes])
    return {node.address: num_slots for node, num_slots in zip(nodes, counts, strict=True) if num_slots}


async def _refused(topology: Topology, deadline: Deadline) -> dict[str, str]:
    """Try what the tier, the catalog and pending writes do, as far as that changes nothing, and one write."""
    name = f"kvstore:doctor:{secrets.token_hex(8)}"  # unique, so that two examinations at a time do not collide
    tries: dict[str, tuple[str, Command]] = {
        f"keys {key}*": (f"{key}doctor", ("EXISTS", f"{key}doctor")) for key in _KEYS
    }
    tries["scripts"] = (name, ("EVAL", "return 1", 0))
    tries["writes"] = (name, ("SET", name, "1", "NX", "PX", _PROBE_MS))
    tries["deletes"] = (name, ("DEL", name))
    replies = await topology.query(list(tries.values()), deadline=deadline)
    found = zip(tries, replies, strict=True)
    return {what: reply.message[:200] for what, reply in found if isinstance(reply, ErrorReply)}


async def _sentinels(location: RedisLocation, deadline: Deadline) -> dict[str, str]:
    access = Access(location, to_sentinels=True)

    async def query(address: HostPort) -> str:
        sentinel = Node(access, address)
        try:
            return str(await query_sentinel(sentinel, location.service or "", deadline))
        except Unavailable as error:
            return f"no answer: {error}"
        finally:
            await sentinel.aclose()

    answers = await gather_all([query(address) for address in location.addresses])
    return dict(zip(map(str, location.addresses), answers, strict=True))


def parse_info(info: bytes, address: str, latency_s: float) -> ServerFacts:
    """Parse the reply to `INFO`; a missing value is 0 or empty."""
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
        latency_s=latency_s,
        machine_bytes=number("total_system_memory") or None,
        writes_log=facts.get("aof_enabled") == "1",
        disk_problem=", ".join(name for name in _DISK_STATES if facts.get(name, "ok") != "ok"),
        is_cluster_node=facts.get("cluster_enabled") == "1",
    )


def concerns_of(facts: Sequence[ServerFacts]) -> list[Concern]:
    """What an operator should change about these servers, dangers first."""
    concerns = [Concern(severity, one.address, text) for one in facts for severity, text in _concerns_of(one)]
    return sorted(concerns, key=lambda concern: concern.severity is not Severity.DANGER)


def _concerns_of(server: ServerFacts) -> Iterator[tuple[Severity, str]]:
    if server.eviction_policy.startswith("allkeys"):
        yield (
            Severity.DANGER,
            f"this Redis may evict any key (maxmemory-policy {server.eviction_policy}): records that no slower tier "
            "has, pending writes and the catalog too; run CONFIG SET maxmemory-policy volatile-lru, which evicts only "
            "records that the slower tier has",
        )
    elif server.eviction_policy == "noeviction" and server.limit_bytes is not None:
        yield (
            Severity.ADVICE,
            "this Redis evicts nothing (maxmemory-policy noeviction): once it is full it takes no new record; run "
            "CONFIG SET maxmemory-policy volatile-lru to let it evict records that the slower tier has",
        )
    if server.limit_bytes is None:
        yield (
            Severity.ADVICE,
            "this Redis has no memory limit (maxmemory 0): it grows until the machine kills it; run CONFIG SET "
            "maxmemory with at most three quarters of its machine's memory",
        )
    elif server.limit_bytes < MEMORY_BYTES_MIN:
        yield (
            Severity.ADVICE,
            f"this Redis has too little memory for pages (maxmemory {server.limit_bytes} bytes, useful from "
            f"{MEMORY_BYTES_MIN}): run CONFIG SET maxmemory with more, or set hot to memory:",
        )
    if (version := parse_version(server.version)) is not None and server.product == "redis" and version < VERSION_MIN:
        yield (
            Severity.ADVICE,
            f"this Redis is older than the versions that we test (version {server.version}): upgrade to 6.2 or later",
        )
    if server.latency_s > SLOW_S:
        yield (
            Severity.ADVICE,
            f"a small round trip takes {server.latency_s * 1000:.1f} ms (up to {SLOW_S * 1000:.0f} ms is usual in one "
            "data centre): check the network, SLOWLOG, and whether it swaps",
        )


def parse_version(text: str) -> tuple[int, ...] | None:
    """The first two numbers of a version, or `None`."""
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) and len(parts) == 2 else None
