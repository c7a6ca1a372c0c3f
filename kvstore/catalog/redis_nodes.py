"""Many small commands to a Redis, or to all nodes of a cluster: one round trip per node."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from hiredis import pack_command
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import (
    AskError,
    ConnectionError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from kvstore.catalog.cursors import numbers_of_cursor
from kvstore.catalog.redis_scripts import ALL
from kvstore.errors import Unavailable
from kvstore.runtime.deadline import Deadline

__all__ = ["Argument", "Command", "RedisNodes"]

Argument = bytes | str | int
Command = Sequence[Argument]

_CALLS_MAX = 24
"""Connections in use at a time, over all nodes. A client's pool has a few more, and raises when it is exhausted."""

_packed = cast(Callable[[Command], bytes], pack_command)  # its stub allows for one argument only
_TEXTS = {script.sha: script.text for script in ALL}
_RESOLVED_BY_CLIENT = (MovedError, AskError, TryAgainError, ConnectionError)
"""Errors that the client resolves itself when a command is sent again: a slot that moved, a primary that died."""


class RedisNodes:
    """Sends each command to the node of its slot. Redis errors become `Unavailable` here.

    Args:
        client: Answers in `bytes`; the caller closes it.
    """

    def __init__(self, client: Redis | RedisCluster) -> None:
        self.client = client
        self._calls = asyncio.Semaphore(_CALLS_MAX)
        self.is_cluster = isinstance(client, RedisCluster)
        self._position = (0, 0)  # where `next_names` continues: number of a node, and its cursor

    async def run(self, commands: Mapping[int, Sequence[Command]], *, deadline: Deadline) -> dict[int, list[Any]]:
        """Run commands and return their replies, slot by slot as they were given.

        Args:
            commands: By slot; without a cluster any slot number will do.
            deadline: When to give up.

        Raises:
            Unavailable: Not reachable, out of time, or a command was refused.

        If cancelled, what was sent may still be executed.
        """
        with _translated():
            async with deadline.scope("asking the catalog in Redis"):
                if not self.is_cluster:
                    return await self._on_node(None, commands)
                cluster = cast(RedisCluster, self.client)
                await cluster.initialize()
                by_node: dict[Any, dict[int, Sequence[Command]]] = {}
                for slot, listed in commands.items():
                    by_node.setdefault(cluster.nodes_manager.get_node_from_slot(slot), {})[slot] = listed
                parts = await asyncio.gather(*(self._on_node(node, part) for node, part in by_node.items()))
                return {slot: replies for part in parts for slot, replies in part.items()}

    async def one(self, command: Command, *, deadline: Deadline) -> Any:
        """Run one command whose key need not share a slot with others."""
        with _translated():
            async with deadline.scope("asking the catalog in Redis"), self._calls:
                return await cast(Awaitable[Any], self.client.execute_command(*command))

    async def scan(self, pattern: str, *, count: int, deadline_s: float) -> AsyncIterator[list[bytes]]:
        """Yield batches of names that match a pattern, over all nodes; a name may come twice."""
        with _translated():
            nodes = await self._primaries()
        for node in nodes:
            cursor: int | bytes = 0
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
                with _translated():
                    async with Deadline.after(deadline_s).scope("scanning the catalog in Redis"):
                        ((cursor, names),) = await self._exchange(node, [command], strict=True)
                if names:
                    yield names
                if int(cursor) == 0:
                    break

    async def scan_step(
        self, pattern: str, cursor: str, count: int, *, deadline: Deadline
    ) -> tuple[list[bytes], str | None]:
        """Names that match a pattern among the next `count` of one node, and the cursor to continue with: node by node,
        `None` after the last.

        Raises:
            InvalidRequest: Not a cursor, or the number of nodes has changed since.
        """
        with _translated():
            async with deadline.scope("scanning the catalog in Redis"):
                nodes = sorted(await self._primaries(), key=lambda node: "" if node is None else str(node.name))
                index, place = numbers_of_cursor(cursor, len(nodes))
                command = ("SCAN", place, "MATCH", pattern, "COUNT", count)
                ((after, names),) = await self._exchange(nodes[index], [command], strict=True)
        index += 0 if int(after) else 1
        return names, f"{len(nodes)}.{index}.{int(after)}" if index < len(nodes) else None

    async def next_names(self, count: int, *, deadline: Deadline) -> list[bytes]:
        """About `count` names of any kind. Each call continues where the last one ended, and starts over at the end."""
        number, cursor = self._position
        with _translated():
            async with deadline.scope("scanning the catalog in Redis"):
                nodes = await self._primaries()
                node = nodes[number % len(nodes)]
                ((after, names),) = await self._exchange(node, [("SCAN", cursor, "COUNT", count)], strict=True)
        self._position = (number, int(after)) if int(after) else (number + 1, 0)
        return cast("list[bytes]", names)

    async def _primaries(self) -> list[Any]:
        """The nodes that hold keys; `None` stands for a standalone server."""
        if not self.is_cluster:
            return [None]
        cluster = cast(RedisCluster, self.client)
        await cluster.initialize()
        return list(cluster.get_primaries())

    async def info(self, section: str, *, deadline: Deadline) -> list[dict[str, str]]:
        """Each node's `INFO <section>`."""
        with _translated():
            async with deadline.scope("asking Redis about itself"):
                nodes = await self._primaries()
                texts = [(await self._exchange(node, [("INFO", section)], strict=True))[0] for node in nodes]
        return [dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line) for text in texts]

    async def _on_node(self, node: Any, commands: Mapping[int, Sequence[Command]]) -> dict[int, list[Any]]:
        flat = [command for listed in commands.values() for command in listed]
        try:
            replies = await self._exchange(node, flat, strict=False)
        except ConnectionError as error:
            if node is None:
                raise
            replies = [error] * len(flat)
        missing = sorted({str(c[1]) for c, r in zip(flat, replies, strict=True) if isinstance(r, NoScriptError)})
        if missing:
            await self._exchange(node, [("SCRIPT", "LOAD", _TEXTS[sha]) for sha in missing], strict=True)
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError) or (node is not None and isinstance(reply, _RESOLVED_BY_CLIENT)):
                replies[index] = await self._retry(flat[index])
            elif isinstance(reply, RedisError):
                raise reply
        rest = iter(replies)
        return {slot: [next(rest) for _ in listed] for slot, listed in commands.items()}

    async def _retry(self, command: Command) -> Any:
        """Send one command through the client, which finds the slot's new node; a script is sent as text."""
        if command[0] == "EVALSHA":
            command = ("EVAL", _TEXTS[str(command[1])], *command[2:])
        async with self._calls:
            return await cast(Awaitable[Any], self.client.execute_command(*command))

    async def _exchange(self, node: Any, commands: Sequence[Command], *, strict: bool) -> list[Any]:
        """Send all commands and read all replies on one connection; waits until one may be used (`_CALLS_MAX`).

        Errors of single commands are returned as replies, or raised if `strict`.
        """
        async with self._calls:
            replies = await self._exchange_now(node, commands)
        if strict:
            for reply in replies:
                if isinstance(reply, RedisError):
                    raise reply
        return replies

    async def _exchange_now(self, node: Any, commands: Sequence[Command]) -> list[Any]:
        pool = cast(Any, self.client).connection_pool if node is None else None
        connection = await pool.get_connection() if pool is not None else node.acquire_connection()
        replies: list[Any] = []
        try:
            # `math.inf` disables the parser's own timer for each reply, which costs more than reading the reply
            # packed by hiredis: redis-py's own packing of a lookup's thousands of names takes longer than Redis does
            await connection.send_packed_command([_packed(tuple(command)) for command in commands])
            while len(replies) < len(commands):
                try:
                    replies.append(await connection.read_response(disable_decoding=True, timeout=math.inf))
                except ResponseError as error:
                    replies.append(error)
        except BaseException:
            await connection.disconnect(nowait=True)  # the next user of the connection must not read our replies
            raise
        finally:
            if pool is not None:
                await pool.release(connection)
            else:
                node.release(connection)
        return replies


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        text = str(error)
        step = "check that the hot Redis runs and is not full"
        if text.startswith("CATALOG"):
            step = "run `kvstore reindex`"
        elif isinstance(error, NoPermissionError):
            step = "give its user the keys and commands of docs/redis.md (ACL SETUSER)"
        raise Unavailable(f"the catalog in Redis cannot be used: {step}", error=text[:200]) from error
