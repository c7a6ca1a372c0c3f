"""Sends many small commands to a Redis, or to the nodes of a cluster, in one round trip per node.

The catalog, leases, text stores and pending writes all call Redis through here. So errors and malformed replies are
handled in one place.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, cast

from hiredis import pack_command
from redis.asyncio import Redis, RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from kvstore.catalog.base import Gate
from kvstore.catalog.redis.entry_names import GetEntries
from kvstore.catalog.redis.replies import Command, check_reply, keys_of
from kvstore.catalog.redis.routes import LOST, Attempts, ClusterClient, Routes, is_elsewhere
from kvstore.catalog.redis.scripts import ALL, DAMAGED
from kvstore.catalog.redis.walks import MOVING, Position, digest_of_names, digest_of_slots, position_of
from kvstore.errors import Unavailable
from kvstore.runtime.background import gather_all
from kvstore.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

NUM_SLOTS = REDIS_CLUSTER_HASH_SLOTS

Call = tuple[int, Command]
"""A command and the slot of its keys; without a cluster any slot."""

_CALLS_MAX = 24
"""Connections in use at a time, over all nodes. A client's pool has a few more, and raises when it is exhausted."""

_packed = cast(Callable[[Command], bytes], pack_command)  # its stub allows for one argument only
_PART_BYTES = 16 << 10
"""At least this much is packed before it is sent."""
_TEXTS = {script.sha: script.text for script in ALL}
_NOT_UNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError)
"""Errors of redis-py for replies that it cannot convert."""


class NoRoom(Unavailable):
    """The server is at its memory limit."""


class RedisNodes:
    """Sends each command to the node of its slot. Errors of Redis, and replies that a command cannot have, become
    `Unavailable` here. A damaged key of ours is removed, and the command is sent again: its content can be rebuilt, and
    no service could write to it any more.

    Args:
        client: Replies in `bytes`; the caller closes it.
        what: The data that is kept there, for messages.
        gate: Called before each call; `None`: calls are always allowed.
        calls_max: Connections in use at a time, over all nodes. A client's pool must have more.

    Attributes:
        num_repaired: Damaged keys that were removed.
    """

    def __init__(
        self,
        client: Redis | RedisCluster,
        what: str = "the catalog",
        *,
        gate: Gate | None,
        calls_max: int = _CALLS_MAX,
    ) -> None:
        self.client = client
        self.num_repaired = 0
        self._what = what
        self._gate = gate
        self._calls = asyncio.Semaphore(calls_max)
        self.is_cluster = isinstance(client, RedisCluster)
        self._routes = Routes(cast(ClusterClient, client)) if self.is_cluster else None

    def slot_of(self, tag: str) -> int:
        """The slot of every key with this hash tag; 0 without a cluster."""
        return int(key_slot(tag.encode())) if self.is_cluster else 0

    def tag_of(self, slot: int) -> bytes:
        """A short hash tag whose keys are in `slot`."""
        return _tags()[slot] if self.is_cluster else b"0"

    async def run(self, calls: Sequence[Call], *, deadline: Deadline) -> list[Any]:
        """Run commands, in one round trip per node; returns their replies in order.

        Raises:
            Unavailable: Not reachable, out of time, or a command was refused.

        If cancelled, commands that were sent may still be executed.
        """
        if not calls:
            return []
        with self._translated():
            async with deadline.scope(f"calling Redis for {self._what}"):
                if self._routes is None:
                    return await self._on_node(None, [command for _, command in calls])
                by_node: dict[Any, list[int]] = {}
                for index, (slot, _) in enumerate(calls):
                    by_node.setdefault(await self._routes.owner(slot), []).append(index)
                parts = await gather_all(
                    self._on_node(node, [calls[index][1] for index in part]) for node, part in by_node.items()
                )
                replies: list[Any] = [None] * len(calls)
                for part, found in zip(by_node.values(), parts, strict=True):
                    for index, reply in zip(part, found, strict=True):
                        replies[index] = reply
                return replies

    async def one(self, command: Command, *, deadline: Deadline) -> Any:
        """Run one command, with a key in any slot."""
        with self._translated():
            async with deadline.scope(f"calling Redis for {self._what}"):
                try:
                    reply = await self._execute(command)
                except ResponseError as error:
                    if not await self._repair(command, error):
                        raise
                    reply = await self._execute(command)
                check_reply(command, reply)
                return reply

    async def _execute(self, command: Command, asked: Any = None, reply: object = None) -> Any:
        """Send one command to its node.

        Args:
            asked: A node of a cluster that it was sent to before.
            reply: That node's reply, with which it must be sent elsewhere.
        """
        if self._routes is None:
            async with self._calls:
                try:
                    return await cast(Awaitable[Any], self.client.execute_command(*command))
                except ReadOnlyError:
                    await self._leave_replica()
                    raise
        attempts, is_again = Attempts(self._routes, _slot_of(command)), False
        while True:
            asked, asking = await attempts.next(asked, reply)
            parts: list[Command] = [*([("ASKING",)] if asking else []), command]
            try:
                reply = (await self._exchange(asked, parts, strict=False, is_again=is_again))[-1]
            except LOST as error:
                reply, is_again = error, True
            if not is_elsewhere(reply):
                if isinstance(reply, RedisError):
                    raise reply
                return reply

    async def scan(
        self, pattern: str, cursor: str, count: int, *, deadline: Deadline
    ) -> tuple[list[bytes], str | None]:
        """Names that match a pattern among the next `count` of one node, and the cursor to continue with: node by node,
        `None` after the last. A name may come twice. None is missed if slots move, unless one moves twice.

        Raises:
            InvalidRequest: Not a cursor, or the nodes have changed since.
        """
        with self._translated():
            async with deadline.scope("scanning the names in Redis"):
                nodes = sorted(await self._primaries(), key=_name_of)
                names = [_name_of(node) for node in nodes]
                if cursor:
                    position = position_of(cursor, names)
                else:
                    position = Position(digest_of_names(names), await self._slots(nodes))
                command = ("SCAN", position.place, "MATCH", pattern, "COUNT", count)
                ((after, found),) = await self._exchange(nodes[position.index % len(nodes)], [command], strict=True)
                position = position.after(int(after))
                is_last = position.index == 2 * len(nodes)
                if position.index == len(nodes) and not position.place:
                    slots = await self._slots(nodes)
                    is_last = slots == position.slots and slots != MOVING
                    if not is_last and self._routes is not None:
                        await self._routes.read_again()  # if there are other nodes now, the cursor is refused
        return found, None if is_last else position.cursor

    async def _slots(self, nodes: Sequence[Any]) -> int:
        """A number for the slots of each node, see `walks.py`."""
        if self._routes is None:
            return 1
        replies = [(await self._exchange(node, [("CLUSTER", "NODES")], strict=True))[0] for node in nodes]
        return digest_of_slots([reply.decode(errors="replace") for reply in replies])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Call the gate, and translate errors. Any foreign error is the client's: it expects some replies to have their
        usual form.
        """
        if self._gate is not None:
            self._gate()
        try:
            yield
        except OutOfMemoryError as error:
            message = f"{self._what} in Redis has no room: raise maxmemory, or choose a volatile-* policy"
            raise NoRoom(message, error=str(error)[:200]) from error
        except (RedisError, RedisClusterException, OSError, *_NOT_UNDERSTOOD) as error:
            step = "check that the hot Redis runs and is not full"
            if isinstance(error, NoPermissionError):
                step = "give its user the keys and commands of docs/redis.md (ACL SETUSER)"
            elif isinstance(error, ReadOnlyError):
                step = "the server is a replica: name the primary"
            elif isinstance(error, AuthenticationError):
                step = "check user and password in the url, and that every node of a cluster has the user"
            elif isinstance(error, AskError | TryAgainError):
                step = "a slot of the cluster moves: wait for its end, redis-cli --cluster check shows what is open"
            elif isinstance(error, ClusterDownError):
                step = "bring the cluster's missing nodes back"
            elif isinstance(error, _NOT_UNDERSTOOD):
                step = "check the address: the server does not reply like Redis"
            message = f"{self._what} in Redis cannot be used: {step}"
            raise Unavailable(message, error=f"{type(error).__name__}: {error}"[:200]) from error

    async def _leave_replica(self) -> None:
        """Close connections to a server that is a replica by now: another one may have its name in DNS, and is found
        when a connection is opened. Nothing else would close them, while it runs.
        """
        if isinstance(self.client, Redis):
            await self.client.connection_pool.disconnect(inuse_connections=False)

    async def _primaries(self) -> list[Any]:
        """The nodes that hold keys; `None` is a standalone server."""
        return [None] if self._routes is None else await self._routes.primaries()

    async def info(self, section: str, *, deadline: Deadline) -> list[dict[str, str]]:
        """Each node's `INFO <section>`."""
        with self._translated():
            async with deadline.scope("reading INFO of Redis"):
                nodes = await self._primaries()
                texts = [(await self._exchange(node, [("INFO", section)], strict=True))[0] for node in nodes]
        lines = [text.decode(errors="replace").splitlines() for text in texts]
        return [dict(line.split(":", 1) for line in listed if ":" in line) for listed in lines]

    async def _on_node(self, node: Any, commands: Sequence[Command]) -> list[Any]:
        try:
            replies = await self._exchange(node, commands, strict=False)
        except LOST:
            if node is None:
                raise
            replies = await self._exchange_again(node, commands)
        missing = sorted({str(c[1]) for c, r in zip(commands, replies, strict=True) if isinstance(r, NoScriptError)})
        if missing:
            await self._exchange(node, [("SCRIPT", "LOAD", _TEXTS[sha]) for sha in missing], strict=True)
        for index, reply in enumerate(replies):
            is_redirected = node is not None and is_elsewhere(reply)
            is_repaired = isinstance(reply, ResponseError) and await self._repair(commands[index], reply)
            if is_redirected:
                replies[index] = await self._execute(_as_text(commands[index]), node, reply)
            elif is_repaired or isinstance(reply, NoScriptError):
                replies[index] = await self._execute(_as_text(commands[index]))
            elif isinstance(reply, RedisError):
                raise reply
            check_reply(commands[index], replies[index])
        return replies

    async def _exchange_again(self, node: Any, commands: Sequence[Command]) -> list[Any]:
        """With a node of a cluster, all at once on a new connection: mostly only connections were lost. If the node is,
        each command has that error for a reply, and is then sent by itself to who has its slot.
        """
        try:
            return await self._exchange(node, commands, strict=False, is_again=True)
        except LOST as error:
            return [error] * len(commands)

    async def _repair(self, command: Command, error: ResponseError) -> bool:
        """Remove the damaged keys of a command that was refused. False: none of them is damaged."""
        text = str(error)
        repairs: list[Command] = []
        if DAMAGED in text:
            entry, totals, *_ = keys_of(command)
            repairs = [("HDEL", totals, command[6]) if "totals" in text else ("UNLINK", entry)]
        elif "WRONGTYPE" in text:
            for key, kind in keys_of(command).items():
                if await self._execute(("TYPE", key)) not in (b"none", kind):
                    repairs.append(("UNLINK", key))
        for repair in repairs:
            await self._execute(repair)
            self.num_repaired += 1
            _log.warning("%s in Redis is damaged; removed a key key=%s error=%s", self._what, repair[1], text)
        return bool(repairs)

    async def _exchange(
        self, node: Any, commands: Sequence[Command], *, strict: bool, is_again: bool = False
    ) -> list[Any]:
        """Send all commands and read all replies on one connection; waits until one may be used (`_CALLS_MAX`).

        Errors of single commands are returned as replies, or raised if `strict`.

        Args:
            is_again: A connection was lost: another one is opened, since all that wait for use may be closed too.
        """
        async with self._calls:
            replies = await self._exchange_now(node, commands, is_again=is_again)
        if strict:
            for command, reply in zip(commands, replies, strict=True):
                if isinstance(reply, RedisError):
                    raise reply
                check_reply(command, reply)
        return replies

    async def _exchange_now(self, node: Any, commands: Sequence[Command], *, is_again: bool) -> list[Any]:
        pool = cast(Any, self.client).connection_pool if node is None else None
        connection = await pool.get_connection() if pool is not None else node.acquire_connection()
        replies: list[Any] = []
        try:
            if is_again:
                await connection.disconnect(nowait=True)
            is_first = True
            for part in _packed_parts(commands):
                if not (is_first or connection.is_connected):  # redis-py would send the rest on another connection
                    raise ConnectionError("the connection was closed while commands were sent")
                # redis-py's check sends PING and reads one reply: behind our first part that would be one of ours
                await connection.send_packed_command(part, check_health=is_first)
                is_first = False
            # `math.inf` disables redis-py's timer for each reply, which costs more than reading the reply
            while len(replies) < len(commands):
                try:
                    replies.append(await connection.read_response(disable_decoding=True, timeout=math.inf))
                except ResponseError as error:
                    replies.append(error)
            if any(isinstance(reply, ReadOnlyError) for reply in replies):
                await connection.disconnect(nowait=True)
                await self._leave_replica()
        except BaseException:
            await connection.disconnect(nowait=True)  # its next user must not read our replies
            raise
        finally:
            if pool is not None:
                await pool.release(connection)
            else:
                if self._routes is not None and not self._routes.is_known(node):
                    await connection.disconnect(nowait=True)
                node.release(connection)
        return replies


def _packed_parts(commands: Sequence[Command]) -> Iterator[list[bytes]]:
    """The commands as they are sent, some at a time: the server works on one part while the next is packed. hiredis
    packs quicker than redis-py.
    """
    part, num_bytes = list[bytes](), 0
    for command in commands:
        part.append(command.packed() if isinstance(command, GetEntries) else _packed(tuple(command)))
        num_bytes += len(part[-1])
        if num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _as_text(command: Command) -> Command:
    """The command for a node that may not know its script."""
    return ("EVAL", _TEXTS[str(command[1])], *command[2:]) if command[0] == "EVALSHA" else command


def _slot_of(command: Command) -> int:
    """The hash slot of a command's first key."""
    key = command[3] if command[0] in ("EVAL", "EVALSHA") else command[1]
    return int(key_slot(key if isinstance(key, bytes) else str(key).encode()))


@cache
def _tags() -> tuple[bytes, ...]:
    """For each slot the lowest decimal number that maps to it; found by trying, once per process."""
    tags: dict[int, bytes] = {}
    for number in count():
        tag = b"%d" % number
        if tags.setdefault(key_slot(tag), tag) is tag and len(tags) == NUM_SLOTS:
            return tuple(tags[slot] for slot in range(NUM_SLOTS))
    raise AssertionError("not reached")


def _name_of(node: Any) -> str:
    """The name by which a walk knows a node; empty for a standalone server, which is `None`."""
    return "" if node is None else str(node.name)
