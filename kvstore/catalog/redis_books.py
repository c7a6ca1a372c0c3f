"""Books in Redis, for services that share it: the hashes `c1/orders` and `c1/jobs`, without a TTL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvstore.catalog.base import Gate
from kvstore.catalog.books import Book, BookKind
from kvstore.catalog.redis_nodes import RedisNodes
from kvstore.catalog.redis_values import hash_items
from kvstore.runtime.deadline import Deadline

__all__ = ["RedisBook"]


class RedisBook(Book):
    """All texts in one hash, read in one round trip.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster` that answers in `bytes`; the caller closes it.
        kind: What it is for.
        gate: Asked before each call; `None`: calls are always allowed.
    """

    is_shared = True

    def __init__(self, client: Any, kind: BookKind, *, gate: Gate | None = None) -> None:
        super().__init__(kind)
        self._nodes = RedisNodes(client, f"the list of {kind.name}", gate=gate)

    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        found = hash_items(await self._ask("HGETALL", deadline=deadline))
        return {name.decode(errors="replace"): text.decode(errors="replace") for name, text in found}

    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        num_held = int(await self._ask("HLEN", deadline=deadline))
        is_there = await self._ask("HEXISTS", name, deadline=deadline)
        self.check(name, text, 0 if is_there else num_held)
        await self._ask("HSET", name, text, deadline=deadline)

    async def remove(self, names: Collection[str], *, deadline: Deadline) -> None:
        if names:
            await self._ask("HDEL", *names, deadline=deadline)

    async def _ask(self, verb: str, *arguments: str, deadline: Deadline) -> Any:
        return await self._nodes.one((verb, f"c1/{self.kind.name}", *arguments), deadline=deadline)
