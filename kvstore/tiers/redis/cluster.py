"""A Redis Cluster: maps names to nodes by hash slot, follows redirections, and reloads the map when it is stale."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.background import Background, gather_all
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.locations import HostPort, RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.node import Node, at
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.replies import Redirect, check_reply, redirect_of
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.redis.slots import SlotMap, parse_slots, slot_of

__all__ = ["Cluster", "Member"]

_log = logging.getLogger(__name__)

_ROUNDS_MAX = 6
_TRY_AGAIN_S = 0.02
_REFRESH_S = 1.0
_WATCH_FIRST_S = 0.05
_WATCH_MAX_S = 0.5


class Cluster:
    """The nodes of a cluster that hold slots. Reads and writes go to primaries.

    A node that fails is left alone by its own breaker; meanwhile the map is reloaded until another node has its slots
    or it answers again. Calls about names on other nodes are not affected.

    Args:
        location: Seed nodes, of which one must answer.
        num_data_connections: Connections per node that carry pages.
    """

    def __init__(self, location: RedisLocation, num_data_connections: int) -> None:
        self._access = Access.to_servers(location)
        self._seeds = location.addresses
        self._num_data_connections = num_data_connections
        self._members: dict[HostPort, Member] = {}
        self._slots: SlotMap | None = None
        self._reading = asyncio.Lock()
        self._background = Background("Redis Cluster")
        self._watching = False
        self._is_troubled = False
        self._turn = 0
        self._closed = False

    async def ask(self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline) -> list[Reply]:
        """See `Topology.ask`."""
        slots = [slot_of(name) for name, _ in commands]
        replies: list[Reply] = [None] * len(commands)
        open_: dict[int, Redirect | None] = dict.fromkeys(range(len(commands)))
        for _ in range(_ROUNDS_MAX):
            batches: dict[Member, list[int]] = {}
            owners = await self._map(deadline)
            for index, redirect in open_.items():
                member = self._member(redirect.address) if redirect else self._owner(owners, slots[index])
                batches.setdefault(member, []).append(index)
            answered = await _together(
                [
                    self._ask_one(member, [(commands[index][1], open_[index]) for index in batch], deadline)
                    for member, batch in batches.items()
                ]
            )
            redirected: dict[int, Redirect | None] = {}
            for (member, batch), part in zip(batches.items(), answered, strict=True):
                for index, reply in zip(batch, part, strict=True):
                    replies[index] = reply
                    if self._is_elsewhere(reply):
                        redirected[index] = self._follow(reply, member.address)
            if not redirected:
                return replies
            open_ = dict(sorted(redirected.items()))
            await self._pause(replies[index] for index in open_)
        raise _in_circles()

    async def move(self, name: str, command: Command, *, deadline: Deadline) -> Reply:
        """See `Topology.move`."""
        slot = slot_of(name)
        redirect: Redirect | None = None
        for _ in range(_ROUNDS_MAX):
            owners = await self._map(deadline)
            member = self._member(redirect.address) if redirect else self._owner(owners, slot)
            asking: list[Command] = [("ASKING",)] if redirect is not None and redirect.once else []
            reply = (await member.data(*asking, command, deadline=deadline))[-1]
            if not self._is_elsewhere(reply):
                return reply
            redirect = self._follow(reply, member.address)
            await self._pause([reply])
        raise _in_circles()

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """See `Topology.read`."""
        owner = self._owner(await self._map(deadline), slot_of(reading.name))
        await owner.read(reading, deadline=deadline)
        if self._is_elsewhere(reading.error):
            # while a slot moves, a record's values are on two nodes: ask for each part, wherever it is
            reading.begin()
            while (command := reading.next()) is not None:
                reading.take(await self.move(reading.name, command, deadline=deadline))

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """See `Topology.nodes`."""
        slots = await self._map(deadline)
        return [self._member(address).node for address in dict.fromkeys(slots) if address is not None]

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        self._closed = True
        await self._background.aclose()
        await asyncio.gather(*(member.node.aclose() for member in self._members.values()))

    async def _ask_one(
        self, member: Member, commands: Sequence[tuple[Command, Redirect | None]], deadline: Deadline
    ) -> list[Reply]:
        sent: list[Command] = []
        places: list[int] = []
        for command, redirect in commands:
            if redirect is not None and redirect.once:
                sent.append(("ASKING",))
            places.append(len(sent))
            sent.append(command)
        replies = await member.control(*sent, deadline=deadline)
        return [replies[place] for place in places]

    # Redirections

    def _is_elsewhere(self, reply: Reply) -> bool:
        """Whether to ask again, here or at another node."""
        if isinstance(reply, ErrorReply):
            if reply.code in ("MOVED", "ASK", "TRYAGAIN"):
                return True
            if reply.code in ("CLUSTERDOWN", "READONLY", "LOADING"):
                self._trouble()
        return False

    def _follow(self, reply: Reply, asked: HostPort) -> Redirect | None:
        redirect = redirect_of(reply, asked)
        if redirect is not None and not redirect.once:
            if self._slots is not None:
                self._slots[redirect.slot] = redirect.address
            self._trouble()  # where one slot has moved, others have
        return redirect

    async def _pause(self, replies: Any) -> None:
        """Wait a moment if only some of a record's names have moved to another node."""
        if any(isinstance(reply, ErrorReply) and reply.code == "TRYAGAIN" for reply in replies):
            await asyncio.sleep(_TRY_AGAIN_S)

    # The map

    def _owner(self, owners: SlotMap, slot: int) -> Member:
        address = owners[slot]
        if address is None:
            self._trouble()
            raise Unavailable("no node of the Redis Cluster serves this slot: check CLUSTER INFO", slot=slot)
        return self._member(address)

    async def _map(self, deadline: Deadline) -> SlotMap:
        if self._slots is None:
            async with deadline.scope("reading the map of the Redis Cluster"), self._reading:
                if self._slots is None:
                    self._slots = await self._read(deadline)
        return self._slots

    async def _read(self, deadline: Deadline) -> SlotMap:
        """The map, from the first node that answers; each call starts with another node."""
        known = [*dict.fromkeys((*self._members, *self._seeds))]
        self._turn = (self._turn + 1) % len(known)
        problem = Unavailable("no node was asked")
        for address in sorted(
            known[self._turn :] + known[: self._turn], key=lambda one: self._member(one).is_left_alone
        ):
            try:
                node = self._member(address).node
                (reply,) = await node.control(("CLUSTER", "SLOTS"), deadline=deadline.earlier(_REFRESH_S))
                check_reply(reply)
            except Unavailable as error:
                problem = error
                continue
            if (slots := parse_slots(reply, address)) is not None:
                return slots
            problem = Unavailable("the node serves no slots, and knows none that does", address=str(address))
        raise Unavailable(f"cannot read the map of the Redis Cluster: {problem.message}", **problem.details)

    def _member(self, address: HostPort) -> Member:
        if self._closed:
            raise Closed("the connections to the Redis Cluster are closed")
        if address not in self._members:
            self._members[address] = Member(self._access, address, self._num_data_connections, self._trouble)
        return self._members[address]

    def _trouble(self) -> None:
        """Reload the map soon: something is not where it says."""
        self._is_troubled = True
        if not self._watching and not self._closed:
            self._watching = True
            self._background.spawn(self._watch(), "watch")

    async def _watch(self) -> None:
        """Reload the map and probe nodes that are left alone, until the map is whole and all nodes answer."""
        pause_s = _WATCH_FIRST_S
        try:
            while self._is_troubled:
                self._is_troubled = False
                await self._look()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _WATCH_MAX_S)
        finally:
            self._watching = False

    async def _look(self) -> None:
        try:
            self._slots = await self._read(Deadline.after(2 * _REFRESH_S))
        except Unavailable as error:
            _log.debug("the map of the Redis Cluster cannot be read: %s", error)
            self._is_troubled = True
            return
        if None in self._slots:
            self._is_troubled = True
        serving = set(self._slots)
        for address, member in list(self._members.items()):
            if address not in serving:
                if member.node.num_in_flight == 0:
                    del self._members[address]
                    await member.node.aclose()
            elif member.is_left_alone:
                await member.probe()
                self._is_troubled = True


async def _together(work: Sequence[Coroutine[Any, Any, list[Reply]]]) -> list[list[Reply]]:
    return [await work[0]] if len(work) == 1 else await gather_all(work)


def _in_circles() -> Unavailable:
    return Unavailable("the nodes of the Redis Cluster send us in circles: check CLUSTER NODES on each")


_PROBE_S = 1.0


class Member:
    """One node of a cluster.

    Args:
        access: How to log in.
        address: Where it is.
        num_data_connections: Connections that carry pages.
        on_trouble: Called when a call to it fails or is refused.
    """

    def __init__(
        self, access: Access, address: HostPort, num_data_connections: int, on_trouble: Callable[[], None]
    ) -> None:
        self.address = address
        self.node = Node(access, at(address), str(address), num_data_connections)
        self._breaker = Breaker()
        self._on_trouble = on_trouble

    @property
    def is_left_alone(self) -> bool:
        """True while calls are refused."""
        return self._breaker.is_open

    async def control(self, *commands: Command, deadline: Deadline) -> list[Reply]:
        """As `Node.control`; refused at once while the node is left alone."""
        with self._call(deadline):
            return await self.node.control(*commands, deadline=deadline)

    async def data(self, *commands: Command, deadline: Deadline) -> list[Reply]:
        """As `Node.data`; refused at once while the node is left alone."""
        with self._call(deadline):
            return await self.node.data(*commands, deadline=deadline)

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """As `Node.read`; refused at once while the node is left alone."""
        with self._call(deadline):
            await self.node.read(reading, deadline=deadline)

    async def probe(self) -> None:
        """Ask whether the node is back; if so, calls are let through again. Never raises `Unavailable`."""
        try:
            await self.node.control(("PING",), deadline=Deadline.after(_PROBE_S))
        except Unavailable:
            self._breaker.probe_failed()
        else:
            self._breaker.probe_succeeded()

    @contextmanager
    def _call(self, deadline: Deadline) -> Iterator[None]:
        if self._breaker.is_open:
            self._on_trouble()
            raise Unavailable(
                "a node of the Redis Cluster failed and is left alone until it answers or another takes its slots",
                address=str(self.address),
            )
        now_s = asyncio.get_running_loop().time
        started_s = now_s()
        try:
            yield
        except Closed as error:  # it left between our look at the map and this call
            self._on_trouble()
            raise Unavailable("the node has just left the Redis Cluster", address=str(self.address)) from error
        except Unavailable:
            if deadline.expired:
                self._breaker.ran_out(started_s, now_s(), by_deadline=True)
            else:
                self._breaker.failed()
            self._on_trouble()
            raise
        except asyncio.CancelledError:
            if self._breaker.ran_out(started_s, now_s(), by_deadline=False):
                self._on_trouble()
            raise
        else:
            self._breaker.succeeded(now_s())
