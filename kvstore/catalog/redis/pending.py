"""Pending writes in Redis, shared by all services of a hot tier.

Entries are spread over shards by their prefix hash. A shard is three keys with one hash tag, so that one script can
change them together on a Cluster too:

| key | contents |
|---|---|
| `kvstore:pending:<scope>:{p<shard>}:due` | sorted set: packed key to the end of its lease, ms of the server's clock |
| `kvstore:pending:<scope>:{p<shard>}:entry` | hash: packed key to an owner, bytes of the record, further owners |
| `kvstore:pending:<scope>:{p<shard>}:bytes` | bytes of all records of the shard |

An owner has 16 bytes. After the first one come the bytes of the record (u64) and its stop tokens (u32).

Leases are measured on the server's clock, so the services' clocks need not agree. None of the keys has a TTL, so that
no `volatile-*` policy evicts one.

A script that finds damage repairs it, since every later write to the shard would fail on it too. It removes a key of
another type and an entry that cannot be read, sets a lost due time again, and counts the bytes again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections.abc import Awaitable, Sequence
from copy import copy
from typing import Any, TypeVar, cast

from kvstore.catalog.base import Gate
from kvstore.catalog.pending import PendingEntry, PendingLog, PendingTotals
from kvstore.catalog.redis.nodes import NoRoom, RedisNodes
from kvstore.catalog.redis.replies import strange_reply
from kvstore.catalog.redis.scripts import ALWAYS
from kvstore.format.names import PACKED_KEY_BYTES, pack_key, unpack_key
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline

T = TypeVar("T")

NUM_SHARDS = 16
"""Part of the stored format. Several per node of a usual cluster, yet few enough for `claim` to visit one by one."""

_OWNER_BYTES = 16
_FACTS = struct.Struct(f"<{_OWNER_BYTES}sQI")
_CALLS_MAX = 8
"""Calls of one owner that run at a time, and so the connections that it takes."""

_COMMON = """
local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)
for at, kind in ipairs({'zset', 'hash', 'string'}) do
  local seen = redis.call('TYPE', KEYS[at]).ok
  if seen ~= kind and seen ~= 'none' then redis.call('DEL', KEYS[at]) end
end
if redis.call('HLEN', KEYS[2]) > redis.call('ZCARD', KEYS[1]) then
  for _, member in ipairs(redis.call('HKEYS', KEYS[2])) do redis.call('ZADD', KEYS[1], 'NX', now, member) end
end
local function size_of(member, facts)
  if #member ~= 52 or #facts < 28 or #facts % 16 ~= 12 then return nil end
  local size = struct.unpack('<I8', string.sub(facts, 17, 24))
  if size > 2 ^ 40 then return nil end
  return size
end
local function facts_of(member)
  local facts = redis.call('HGET', KEYS[2], member)
  if facts and not size_of(member, facts) then
    redis.call('HDEL', KEYS[2], member)
    redis.call('ZREM', KEYS[1], member)
    facts = false
  end
  return facts
end
local function counted()
  local bytes, all = 0, redis.call('HGETALL', KEYS[2])
  for at = 1, #all, 2 do bytes = bytes + (size_of(all[at], all[at + 1]) or 0) end
  redis.call('SET', KEYS[3], string.format('%d', bytes))
  return bytes
end
local function grow(bytes)
  if bytes == 0 then return end
  local sum = redis.pcall('INCRBY', KEYS[3], string.format('%d', bytes))
  if type(sum) ~= 'number' or sum < 0 or redis.call('HLEN', KEYS[2]) == 0 then counted() end
end
-- `released`, as an owner, marks an entry that one of its owners has released
local released = string.rep('\\0', 16)
local function with_owners(facts, owners)
  return string.sub(owners, 1, 16) .. string.sub(facts, 17, 28) .. string.sub(owners, 17)
end
local function owners_of(facts) return string.sub(facts, 1, 16) .. string.sub(facts, 29) end
local function without(owners, owner)
  local kept = ''
  for at = 1, #owners, 16 do
    local one = string.sub(owners, at, at + 15)
    if one ~= owner then kept = kept .. one end
  end
  return kept
end
-- the facts of an entry that ARGV[1] owns, and its other owners
local function ours(member)
  local facts = facts_of(member)
  if not facts then return end
  local owners = owners_of(facts)
  local others = without(owners, ARGV[1])
  if #others < #owners then return facts, others end
end
"""


def _script(body: str) -> str:
    return _COMMON + body


_ADD = _script("""
local grown = 0
for i = 2, #ARGV, 3 do
  local facts = ARGV[i + 1]
  local before = facts_of(ARGV[i])
  if before then
    grown = grown - struct.unpack('<I8', string.sub(before, 17, 24))
    facts = facts .. without(owners_of(before), string.sub(facts, 1, 16))
  end
  redis.call('HSET', KEYS[2], ARGV[i], facts)
  redis.call('ZADD', KEYS[1], 'GT', now + ARGV[1], ARGV[i])
  grown = grown + ARGV[i + 2]
end
grow(grown)
return 1
""")

_RENEW = ALWAYS + _script("""
local answers = {}
for i = 3, #ARGV do
  local facts, others = ours(ARGV[i])
  if facts then redis.call('ZADD', KEYS[1], 'XX', 'GT', now + ARGV[2], ARGV[i]) end
  answers[#answers + 1] = facts and #others / 16 + 1 or 0
end
return answers
""")

_FINISH = ALWAYS + _script("""
local removed = 0
for i = 2, #ARGV do
  local facts, others = ours(ARGV[i])
  if others == '' then
    removed = removed + struct.unpack('<I8', string.sub(facts, 17, 24))
    redis.call('HDEL', KEYS[2], ARGV[i])
    redis.call('ZREM', KEYS[1], ARGV[i])
  elseif facts then
    redis.call('HSET', KEYS[2], ARGV[i], with_owners(facts, others))
    if others == released then redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i]) end
  end
end
grow(-removed)
return 1
""")

_RELEASE = ALWAYS + _script("""
for i = 2, #ARGV do
  local facts, others = ours(ARGV[i])
  if facts then
    others = without(others, released)
    redis.call('HSET', KEYS[2], ARGV[i], with_owners(facts, others .. released))
    if #others == 0 then redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i]) end
  end
end
return 1
""")

_CLAIM = ALWAYS + _script("""
local members = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])
local answers = {}
for _, member in ipairs(members) do
  local facts = facts_of(member)
  if facts then
    facts = ARGV[1] .. string.sub(facts, 17, 28)
    redis.call('HSET', KEYS[2], member, facts)
    redis.call('ZADD', KEYS[1], now + ARGV[2], member)
    answers[#answers + 1] = member
    answers[#answers + 1] = facts
  else
    redis.call('ZREM', KEYS[1], member)
  end
end
return answers
""")


_TOTALS = ALWAYS + _script("""
local text = redis.call('GET', KEYS[3]) or '0'
local bytes = tonumber(text)
if not string.match(text, '^%d+$') or bytes > 2 ^ 53 then bytes = counted() end
return {redis.call('ZCARD', KEYS[1]), bytes}
""")


class RedisPendingLog(PendingLog):
    """The pending writes of the services that share a Redis and a cold tier.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster` that replies in `bytes`; the caller closes it.
        scope: Identifies the cold tier: services with the same scope can finish each other's entries.
        lease_s: Seconds that a lease lasts. The longer, the longer a dead service's records are in Redis alone.
        gate: As for `RedisNodes`.
    """

    def __init__(self, client: Any, scope: str, *, lease_s: float, gate: Gate | None = None) -> None:
        self._nodes = RedisNodes(client, "the list of pending writes", gate=gate, calls_max=_CALLS_MAX)
        self._root = f"kvstore:pending:{hashlib.sha256(scope.encode()).hexdigest()[:12]}"
        self._owner = _new_owner()
        self.lease_s = lease_s
        self._next_shard = self._owner[0] % NUM_SHARDS

    def other_owner(self) -> RedisPendingLog:
        other = copy(self)
        other._owner = _new_owner()
        return other

    async def add(self, entries: Sequence[PendingEntry], *, deadline: Deadline) -> bool:
        by_shard: dict[int, list[bytes | int]] = {}
        for entry in entries:
            facts = _FACTS.pack(self._owner, entry.num_bytes, entry.stop_tokens)
            by_shard.setdefault(_shard(entry.key), []).extend((pack_key(entry.key), facts, entry.num_bytes))
        calls = [self._run(_ADD, shard, deadline, self._lease_ms, *values) for shard, values in by_shard.items()]
        try:
            await _all(calls)
        except NoRoom:
            return False
        return True

    async def renew(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> list[int]:
        owners: dict[RecordKey, int] = {}
        for of_shard, reply in await self._each(_RENEW, keys, deadline, self._owner, self._lease_ms):
            owners.update(zip(of_shard, _listed(reply, int, len(of_shard)), strict=True))
        return [owners[key] for key in keys]

    async def finish(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        await self._each(_FINISH, keys, deadline, self._owner)

    async def release(self, keys: Sequence[RecordKey], *, deadline: Deadline) -> None:
        await self._each(_RELEASE, keys, deadline, self._owner)

    async def _each(
        self, script: str, keys: Sequence[RecordKey], deadline: Deadline, *arguments: bytes | int
    ) -> list[tuple[list[RecordKey], object]]:
        """Run a script on each shard of the keys; returns the keys of each, and its reply."""
        by_shard: dict[int, list[RecordKey]] = {}
        for key in keys:
            by_shard.setdefault(_shard(key), []).append(key)
        calls = [self._run(script, at, deadline, *arguments, *map(pack_key, part)) for at, part in by_shard.items()]
        return list(zip(by_shard.values(), await _all(calls), strict=True))

    async def claim(self, limit: int, *, deadline: Deadline) -> list[PendingEntry]:
        """Visits one shard after the other, starting where the last call ended, so that no shard is always last."""
        claimed: list[PendingEntry] = []
        for _ in range(NUM_SHARDS):
            shard = self._next_shard
            room = limit - len(claimed)
            reply = _listed(await self._run(_CLAIM, shard, deadline, self._owner, self._lease_ms, room), bytes)
            claimed += [_entry(*pair) for pair in zip(reply[::2], reply[1::2], strict=False)]
            if len(claimed) >= limit:
                break
            self._next_shard = (shard + 1) % NUM_SHARDS
        return sorted(claimed, key=lambda entry: entry.stop_tokens)

    async def totals(self, *, deadline: Deadline) -> PendingTotals:
        replies = await _all([self._run(_TOTALS, shard, deadline) for shard in range(NUM_SHARDS)])
        pairs = [_listed(reply, int, 2) for reply in replies]
        return PendingTotals(sum(count for count, _ in pairs), sum(num_bytes for _, num_bytes in pairs))

    async def aclose(self) -> None:
        """Does nothing: the caller closes the client."""

    @property
    def _lease_ms(self) -> int:
        return max(1, round(self.lease_s * 1000))

    def _keys(self, shard: int) -> tuple[str, str, str]:
        tag = f"{self._root}:{{p{shard}}}"
        return f"{tag}:due", f"{tag}:entry", f"{tag}:bytes"

    async def _run(self, script: str, shard: int, deadline: Deadline, *arguments: bytes | int) -> object:
        return await self._nodes.one(("EVAL", script, 3, *self._keys(shard), *arguments), deadline=deadline)


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results; raises the first error once every call has ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("list[T]", answers)


def _listed(reply: object, kind: type[T], num_items: int | None = None) -> list[T]:
    """A script's reply as a list of integers or texts.

    Raises:
        Unavailable: It is something else.
    """
    is_whole = isinstance(reply, list) and all(isinstance(item, kind) for item in reply)
    if not is_whole or (num_items is not None and len(cast("list[T]", reply)) != num_items):
        raise strange_reply("EVAL", reply)
    return cast("list[T]", reply)


def _new_owner() -> bytes:
    return secrets.token_bytes(_OWNER_BYTES)  # random, so that no two owners share an id


def _shard(key: RecordKey) -> int:
    return key.prefix[0] % NUM_SHARDS


def _entry(member: bytes, facts: bytes) -> PendingEntry:
    if (len(member), len(facts)) != (PACKED_KEY_BYTES, _FACTS.size):
        raise strange_reply("EVAL", facts)
    _, num_bytes, stop_tokens = _FACTS.unpack(facts)
    return PendingEntry(unpack_key(member), num_bytes, stop_tokens)
