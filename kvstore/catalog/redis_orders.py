"""Orders in Redis, for services that share it: the hash `c1/orders`, without a time to live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from redis.exceptions import RedisError

from kvstore.catalog.orders import OrderBook, check_order
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["RedisOrders"]

_NAME = "c1/orders"


class RedisOrders(OrderBook):
    """All orders in one hash, read in one round trip.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster` that answers in `bytes`; stays the caller's.
    """

    is_shared = True

    def __init__(self, client: Any) -> None:
        self._client = client

    async def read(self, *, deadline: Deadline) -> Mapping[str, str]:
        found = await self._ask(lambda: self._client.execute_command("HGETALL", _NAME), deadline)
        pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return {bytes(name).decode(errors="replace"): bytes(text).decode(errors="replace") for name, text in pairs}

    async def write(self, name: str, text: str, *, deadline: Deadline) -> None:
        num_held = await self._ask(lambda: self._client.execute_command("HLEN", _NAME), deadline)
        is_there = await self._ask(lambda: self._client.execute_command("HEXISTS", _NAME, name), deadline)
        check_order(name, text, 0 if is_there else int(num_held))
        await self._ask(lambda: self._client.execute_command("HSET", _NAME, name, text), deadline)

    @staticmethod
    async def _ask(call: Callable[[], Awaitable[Any]], deadline: Deadline) -> Any:
        try:
            async with deadline.scope("asking Redis for the orders"):
                return await call()
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("Redis did not answer for the orders: check the server", error=error) from error
