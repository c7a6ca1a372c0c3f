"""Leases in Redis, for services that share it."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from kvstore.catalog.ownership import Ownership
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["RedisOwnership"]

_ROOT = "c1o"

_OWNER_BYTES = 16

_HOLD = """
local held = redis.call('GET', KEYS[1]) or ''
if held ~= '' and string.sub(held, 1, 16) ~= ARGV[1] then return {0, string.sub(held, 17)} end
local word = ARGV[3] or string.sub(held, 17)
redis.call('SET', KEYS[1], ARGV[1] .. word, 'PX', ARGV[2])
return {1, word}
"""

_RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, 16) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisOwnership(Ownership):
    """A key per name, `c1o/<name>`, whose TTL is the lease; its value is the owner (16 bytes) and its word in UTF-8.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`; the caller closes it.
        lease_s: The longer the lease, the longer the work of a dead owner is left undone.
    """

    def __init__(self, client: Any, *, lease_s: float) -> None:
        self._client = client
        self._lease_ms = max(1, round(lease_s * 1000))
        self._owner = secrets.token_bytes(_OWNER_BYTES)  # identifies this process among all that share the server

    async def hold(self, name: str, *, deadline: Deadline) -> bool:
        is_ours, _ = await self._hold(name, deadline)
        return bool(is_ours)

    async def agree(self, name: str, word: str, *, deadline: Deadline) -> str:
        _, said = await self._hold(name, deadline, word)
        return bytes(said).decode(errors="replace")

    async def _hold(self, name: str, deadline: Deadline, *word: str) -> Any:
        values = (f"{_ROOT}/{name}", self._owner, self._lease_ms, *word)
        return await self._ask(lambda: self._client.eval(_HOLD, 1, *values), deadline)

    async def release(self, name: str, *, deadline: Deadline) -> None:
        await self._ask(lambda: self._client.eval(_RELEASE, 1, f"{_ROOT}/{name}", self._owner), deadline)

    @staticmethod
    async def _ask(call: Callable[[], Awaitable[Any]], deadline: Deadline) -> Any:
        """Await a command within the deadline. It is created here, since a coroutine never awaited is a warning."""
        try:
            async with deadline.scope("asking Redis for a lease"):
                return await call()
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("Redis did not answer for a lease: check the server", error=error) from error
