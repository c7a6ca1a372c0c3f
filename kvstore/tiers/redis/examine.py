"""Examines the servers of a location for operators: what they report, what this user may do, their clocks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.gather import gather_all
from kvstore.tiers.locations_redis import HostPort, RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.facts import SLOW_S, ServerFacts, parse_info
from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.replies import check_replies, strange_reply
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.redis.slots import NUM_SLOTS, parse_slots
from kvstore.tiers.redis.topology import Topology, open_topology

__all__ = ["RedisExamination", "examine_redis"]

_KEYS = ("v1/", "quarantine:v1/", "c1/", "c1t/", "c1d/", "c1o/", "kvstore:")
"""Prefixes of our keys, as docs/redis.md lists them for the rights of a user."""
_PINGS_MAX = 10
_PAUSE_S = 0.03
_PROBE_MS = 10_000
_DIGITS_MAX = 18


@dataclass(frozen=True, slots=True)
class RedisExamination:
    """What was seen.

    Attributes:
        servers: Those that hold records; their latency is the best of a few round trips.
        clock_offsets_s: By address: how far a server's clock is ahead of ours, and by how much that may be wrong.
        refused: By what was tried, in words: the server's refusal. Empty: this user may do all that we do.
        num_slots_missing: Hash slots of a cluster that no node serves; 0 without a cluster.
        sentinels: By address: the primary that a sentinel names, or why it names none. Empty without sentinels.
    """

    servers: tuple[ServerFacts, ...]
    clock_offsets_s: Mapping[str, tuple[float, float]]
    refused: Mapping[str, str]
    num_slots_missing: int
    sentinels: Mapping[str, str]


async def examine_redis(location: RedisLocation, *, deadline: Deadline) -> RedisExamination:
    """Examine a location. All that is written is one small key, which is removed again, or else expires.

    Raises:
        InvalidRequest: A certificate cannot be used.
        Unavailable: There is no server, or it refuses our login; the message names the next step and no secret.
    """
    topology = open_topology(location, 1)
    try:
        nodes = list(await topology.nodes(deadline))
        looks = await gather_all([_look_at(node, deadline) for node in nodes])
        return RedisExamination(
            servers=tuple(facts for facts, _ in looks),
            clock_offsets_s={facts.address: offset for facts, offset in looks},
            refused=await _refused(topology, deadline),
            num_slots_missing=await _slots_missing(nodes[0], deadline) if location.mode == "cluster" else 0,
            sentinels=await _sentinels(location, deadline) if location.mode == "sentinel" else {},
        )
    finally:
        await topology.aclose()


async def _look_at(node: Node, deadline: Deadline) -> tuple[ServerFacts, tuple[float, float]]:
    now_s = asyncio.get_running_loop().time
    await _ping(node, deadline)  # it may include a connection attempt
    latency_s = await _ping(node, deadline)
    for _ in range(_PINGS_MAX - 1):
        if latency_s <= SLOW_S:
            break
        await asyncio.sleep(_PAUSE_S)  # the delay may be ours: a processor that is busy for a moment
        latency_s = min(latency_s, await _ping(node, deadline))
    before_ms, started_s = SYSTEM_CLOCK.wall_ms(), now_s()
    (told,) = await node.control(("TIME",), deadline=deadline)
    taken_s = now_s() - started_s
    (info,) = await node.control(("INFO",), deadline=deadline)
    check_replies([told, info])
    seconds, micros = _pair(told) or ("", "")
    if not (seconds.isdecimal() and micros.isdecimal() and max(len(seconds), len(micros)) <= _DIGITS_MAX):
        raise strange_reply("TIME", told, node.address)
    offset_s = int(seconds) + int(micros) / 1e6 - (before_ms / 1000 + taken_s / 2)
    facts = parse_info(bytes(info) if isinstance(info, bytes | memoryview) else b"", node.address, latency_s)
    return facts, (offset_s, taken_s / 2)


async def _ping(node: Node, deadline: Deadline) -> float:
    started_s = asyncio.get_running_loop().time()
    check_replies(await node.control(("PING",), deadline=deadline))
    return asyncio.get_running_loop().time() - started_s


async def _refused(topology: Topology, deadline: Deadline) -> dict[str, str]:
    """Try what the tier, the catalog and pending writes do, where that changes nothing, and one write."""
    name = f"kvstore:doctor:{secrets.token_hex(8)}"  # unique, so that two examinations at a time do not collide
    tries: dict[str, tuple[str, Command]] = {
        f"keys {key}*": (f"{key}doctor", ("EXISTS", f"{key}doctor")) for key in _KEYS
    }
    tries["scripts"] = (name, ("EVAL", "return 1", 0))
    tries["writes"] = (name, ("SET", name, "1", "NX", "PX", _PROBE_MS))
    tries["deletes"] = (name, ("DEL", name))
    replies = await topology.ask(list(tries.values()), deadline=deadline)
    found = zip(tries, replies, strict=True)
    return {what: reply.message[:200] for what, reply in found if isinstance(reply, ErrorReply)}


async def _slots_missing(node: Node, deadline: Deadline) -> int:
    (reply,) = await node.control(("CLUSTER", "SLOTS"), deadline=deadline)
    slots = parse_slots(reply, HostPort("", 0))
    return NUM_SLOTS if slots is None else slots.count(None)


async def _sentinels(location: RedisLocation, deadline: Deadline) -> dict[str, str]:
    access = Access.to_sentinels(location)

    async def ask(address: HostPort) -> str:
        try:
            connection = await access.connect(address, deadline)
            try:
                question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", location.service or "")
                (reply,) = await connection.run([question], deadline=deadline)
                check_replies([reply])
            finally:
                await connection.aclose()
        except KVStoreError as error:
            return f"no answer: {error}"
        known = _pair(reply)
        return f"{known[0]}:{known[1]}" if known is not None else "it does not know the service"

    answers = await gather_all([ask(address) for address in location.addresses])
    return dict(zip(map(str, location.addresses), answers, strict=True))


def _pair(reply: Reply) -> tuple[str, str] | None:
    if isinstance(reply, list) and len(reply) == 2:
        first, second = reply
        if isinstance(first, bytes) and isinstance(second, bytes):
            return first.decode(errors="replace"), second.decode(errors="replace")
    return None
