"""Leases, text stores and marks in Redis, for services that share it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any

from kvstore.catalog.base import Gate
from kvstore.catalog.coordination import MARKS_MAX, MarkBook, Ownership, TextStore, TextStoreKind
from kvstore.catalog.redis.nodes import RedisNodes
from kvstore.catalog.redis.replies import Command, strange_reply
from kvstore.catalog.redis.scripts import ALWAYS, hash_items
from kvstore.model.keys import NamespaceId
from kvstore.runtime.deadline import Deadline

_OWNER_BYTES = 16
_CALLS_MAX = 2
"""Connections of leases, of texts and of marks. They share the client of a catalog, see `_CONNECTIONS_MAX` in
`kvstore.tiers.redis.control`."""
_MARKS_S = 604_800
_MARKS_AT_ONCE = 1024
"""Marks that are set, read or dropped in one command: Redis serves no other client until it has ended."""

# A key that is no lease, or one without an end, would block all owners for ever: it is deleted, or gets an end.
_HOLD = (
    ALWAYS
    + """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'string' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
if redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
local held = redis.call('GET', KEYS[1]) or ''
if held ~= '' and string.sub(held, 1, 16) ~= ARGV[1] then return {0, string.sub(held, 17)} end
local word = ARGV[3] or string.sub(held, 17)
redis.call('SET', KEYS[1], ARGV[1] .. word, 'PX', ARGV[2])
return {1, word}
"""
)

_RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, 16) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisOwnership(Ownership):
    """Leases in Redis: a key per name, `c1o/<name>`, whose TTL is the lease; its value is the owner (16 bytes) and its
    word in UTF-8.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`; the caller closes it.
        lease_s: The longer the lease, the longer the work of a dead owner is left undone.
        gate: As for `RedisNodes`.
    """

    def __init__(self, client: Any, *, lease_s: float, gate: Gate | None = None) -> None:
        self._nodes = RedisNodes(client, "the leases", gate=gate, calls_max=_CALLS_MAX)
        self._lease_ms = max(1, round(lease_s * 1000))
        self._owner = secrets.token_bytes(_OWNER_BYTES)  # identifies this process among all that share the server

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        is_ours, _ = await self._hold(name, deadline)
        return is_ours

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        _, holders_word = await self._hold(name, deadline, word)
        return holders_word.decode(errors="replace")

    async def _hold(self, name: str, deadline: Deadline, *word: str) -> tuple[bool, bytes]:
        command: Command = ("EVAL", _HOLD, 1, f"c1o/{name}", self._owner, self._lease_ms, *word)
        reply = await self._nodes.one(command, deadline=deadline)
        match reply:
            case [int(is_ours), bytes(holders_word)]:
                return bool(is_ours), holders_word
        raise strange_reply("EVAL", reply)

    async def release(self, name: str, *, deadline: Deadline) -> None:
        await self._nodes.one(("EVAL", _RELEASE, 1, f"c1o/{name}", self._owner), deadline=deadline)


class RedisTextStore(TextStore):
    """Texts in Redis: all in one hash without a TTL, `c1/<name>`, read in one round trip.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster` that replies in `bytes`; the caller closes it.
        kind: The contents.
        gate: As for `RedisNodes`.
    """

    is_shared = True

    def __init__(self, client: Any, kind: TextStoreKind, *, gate: Gate | None = None) -> None:
        super().__init__(kind)
        self._nodes = RedisNodes(client, f"the list of {kind.name}", gate=gate, calls_max=_CALLS_MAX)

    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        found = hash_items(await self._call("HGETALL", deadline=deadline))
        return {name.decode(errors="replace"): text.decode(errors="replace") for name, text in found}

    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        num_held = int(await self._call("HLEN", deadline=deadline))
        is_there = await self._call("HEXISTS", name, deadline=deadline)
        self.check(name, text, 0 if is_there else num_held)
        await self._call("HSET", name, text, deadline=deadline)

    async def remove(self, names: Collection[str], *, deadline: Deadline) -> None:
        if names:
            await self._call("HDEL", *names, deadline=deadline)

    async def _call(self, verb: str, *arguments: str, deadline: Deadline) -> Any:
        return await self._nodes.one((verb, f"c1/{self.kind.name}", *arguments), deadline=deadline)


class RedisMarkBook(MarkBook):
    """Marks in Redis: a hash per namespace, `c1/hints/<namespace>`, from prefix to mark. It ends a week after the last
    mark.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster` that replies in `bytes`; the caller closes it.
        gate: As for `RedisNodes`.
    """

    def __init__(self, client: Any, *, gate: Gate | None = None) -> None:
        self._nodes = RedisNodes(client, "the marks of hints", gate=gate, calls_max=_CALLS_MAX)

    async def put(self, namespace: NamespaceId, marks: Mapping[bytes, bytes], *, deadline: Deadline) -> bool:
        if int(await self._nodes.one(("HLEN", _marks(namespace)), deadline=deadline)) >= MARKS_MAX:
            return False
        listed = list(marks.items())
        for start in range(0, len(listed), _MARKS_AT_ONCE):
            pairs = [part for pair in listed[start : start + _MARKS_AT_ONCE] for part in pair]
            await self._nodes.one(("HSET", _marks(namespace), *pairs), deadline=deadline)
            # after each piece: what is there has an end, although a later one may fail
            await self._nodes.one(("EXPIRE", _marks(namespace), _MARKS_S), deadline=deadline)
        return True

    async def read(self, namespace: NamespaceId, *, deadline: Deadline) -> Mapping[bytes, bytes]:
        marks: dict[bytes, bytes] = {}
        cursor: bytes | int | None = 0
        while cursor is not None:
            command: Command = ("HSCAN", _marks(namespace), cursor, "COUNT", _MARKS_AT_ONCE)
            after, found = await self._nodes.one(command, deadline=deadline)
            marks.update(hash_items(found))
            cursor = after if int(after) else None
        return marks

    async def drop(self, namespace: NamespaceId, prefixes: Collection[bytes], *, deadline: Deadline) -> None:
        listed = list(prefixes)
        for start in range(0, len(listed), _MARKS_AT_ONCE):
            part = listed[start : start + _MARKS_AT_ONCE]
            await self._nodes.one(("HDEL", _marks(namespace), *part), deadline=deadline)


def _marks(namespace: NamespaceId) -> str:
    return f"c1/hints/{namespace.hex()}"
