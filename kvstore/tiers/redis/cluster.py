"""A Redis Cluster: maps names to nodes by hash slot, follows redirections, and reloads an outdated map.

The map is our own, not redis-py's: see README.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvstore.errors import Closed, Unavailable
from kvstore.runtime.background import Background, gather_all
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.io_loops import IoLoop
from kvstore.tiers.breaker import Breaker
from kvstore.tiers.locations import HostPort, RedisLocation
from kvstore.tiers.redis.access import Access
from kvstore.tiers.redis.node import Node
from kvstore.tiers.redis.reading import Reading
from kvstore.tiers.redis.replies import SlotMoves, check_reply
from kvstore.tiers.redis.resp import Command, ErrorReply, Reply
from kvstore.tiers.refusals import PartDown

_log = logging.getLogger(__name__)

_ROUNDS_MAX = 6
_TRY_AGAIN_S = 0.02
_MAP_S = 1.0
_RELOAD_FIRST_S = 0.05
_RELOAD_MAX_S = 0.5
_PROBE_S = 1.0
_CURRENT_S = 2.0
"""How long a map counts as current for who asks for all nodes."""

SlotMap = list[HostPort | None]
"""The primary of each hash slot; `None`: no node serves it."""


def slot_of(name: str) -> int:
    """The hash slot of a name, or of its hash tag."""
    return int(key_slot(name.encode()))


def parse_slots(reply: Reply, asked: HostPort) -> SlotMap | None:
    """Parse the reply to `CLUSTER SLOTS`: items `[first, last, [host, port, ...] of the primary, replicas...]`.

    Args:
        asked: The node that sent it. If it does not know a host, it leaves it empty and means its own. It gives `?` for
            the host name of a node that has none, and then adds that node's address.

    Returns:
        The map; `None` if the reply has another form, or names no slot at all (a node outside any cluster).
    """
    if not isinstance(reply, list):
        return None
    slots: SlotMap = [None] * REDIS_CLUSTER_HASH_SLOTS
    for item in reply:
        match item:
            case [int(first), int(last), [host, int(port), *further], *_] if 0 <= first <= last < len(slots):
                match [host, *further]:
                    case [b"?", _, [b"ip", bytes(ip), *_]]:
                        host = ip
                name = host.decode(errors="replace") if isinstance(host, bytes) else ""
                address = HostPort(asked.host if name in ("", "?") else name, port)
                slots[first : last + 1] = [address] * (last + 1 - first)
            case _:
                return None
    return slots if any(slots) else None


def ranges_of(slots: SlotMap) -> Iterator[tuple[int, int, HostPort]]:
    """First slot, last slot and node of each range that a node serves."""
    for address, group in groupby(range(len(slots)), key=slots.__getitem__):
        if address is not None:
            numbers = list(group)
            yield numbers[0], numbers[-1], address


@dataclass(frozen=True, slots=True)
class Redirect:
    """A cluster node's reply that another node has the name.

    Attributes:
        once: Only these names have moved so far: send `ASKING` first, and send commands on other names as before.
    """

    address: HostPort
    slot: int
    once: bool


def redirect_of(reply: Reply, asked: HostPort) -> Redirect | None:
    """Parse `MOVED <slot> <host>:<port>` and `ASK ...`; `None` for any other reply."""
    if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
        return None
    try:
        _, slot, place = reply.message.split(" ")[:3]
        host, _, port = place.rpartition(":")
        # an empty host: the node does not know its own address, and means the one that we used
        redirect = Redirect(HostPort(host.strip("[]") or asked.host, int(port)), int(slot), reply.code == "ASK")
    except ValueError:
        return None
    return redirect if 0 <= redirect.slot < REDIS_CLUSTER_HASH_SLOTS else None


class Cluster:
    """The nodes of a cluster that hold slots. Reads and writes go to primaries.

    A node that fails is not used until a probe succeeds; until then the map is reloaded, in case another node has taken
    its slots. Calls about names on other nodes are not affected.

    Args:
        location: Seed nodes, of which one must answer.
        num_data_connections: Connections per node that carry records.
        io_loops: Where these move their bytes, see `Node`.
    """

    def __init__(self, location: RedisLocation, num_data_connections: int, io_loops: Sequence[IoLoop] = ()) -> None:
        self._access = Access(location)
        self._seeds = location.addresses
        self._num_data_connections = num_data_connections
        self._io_loops = io_loops
        self._members: dict[HostPort, _Member] = {}
        self._slots: SlotMap | None = None
        self._loading = asyncio.Lock()
        self._background = Background("Redis Cluster")
        self._is_reloading = False
        self._is_outdated = False
        self._turn = 0
        self._silent: set[HostPort] = set()  # did not answer when last asked for the map
        self._read_s = -math.inf
        self._closed = False

    async def query(
        self, commands: Sequence[tuple[str, Command]], *, deadline: Deadline, carries_bytes: bool = False
    ) -> list[Reply]:
        """See `Topology.query`."""
        slots = [slot_of(name) for name, _ in commands]
        replies: list[Reply] = [None] * len(commands)
        open_: dict[int, Redirect | None] = dict.fromkeys(range(len(commands)))
        for _ in range(_ROUNDS_MAX):
            batches: dict[_Member, list[int]] = {}
            owners = await self._map(deadline)
            for index, redirect in open_.items():
                member = self._member(redirect.address) if redirect else self._owner(owners, slots[index])
                batches.setdefault(member, []).append(index)
            work = [
                self._query_one(
                    member, [(commands[index][1], open_[index]) for index in batch], deadline, carries_bytes
                )
                for member, batch in batches.items()
            ]
            answered = [await work[0]] if len(work) == 1 else await gather_all(work)
            redirected: dict[int, Redirect | None] = {}
            for (member, batch), part in zip(batches.items(), answered, strict=True):
                for index, reply in zip(batch, part, strict=True):
                    replies[index] = reply
                    if self._is_elsewhere(reply):
                        redirected[index] = self._follow(reply, member.address)
            if not redirected:
                return replies
            open_ = dict(sorted(redirected.items()))
            if is_moving := any(_is_try_again(replies[index]) for index in open_):
                await asyncio.sleep(_TRY_AGAIN_S)
        if is_moving:
            raise SlotMoves("a slot of the Redis Cluster moves, and values that belong together are on two nodes")
        raise Unavailable("the nodes of the Redis Cluster redirect in circles: check CLUSTER NODES on each")

    async def read(self, reading: Reading, *, deadline: Deadline) -> None:
        """See `Topology.read`."""
        owner = self._owner(await self._map(deadline), slot_of(reading.name))
        with owner.call(deadline):
            await owner.node.read(reading, deadline=deadline)
        if self._is_elsewhere(reading.error):
            # while a slot moves, a record's values may be on two nodes: request each part from the node that has it
            reading.begin()
            while (command := reading.next()) is not None:
                (reply,) = await self.query([(reading.name, command)], deadline=deadline, carries_bytes=True)
                reading.take(reply)

    async def nodes(self, deadline: Deadline) -> Sequence[Node]:
        """See `Topology.nodes`. Callers send commands to these nodes, and not to a slot's owner: no redirection and no
        failed call would show a failover. So an older map is read again, for the next call.
        """
        slots = await self.owners(deadline)
        return [self._member(address).node for address in dict.fromkeys(slots) if address is not None]

    async def placement(self, deadline: Deadline, *, is_fresh: bool = False) -> Sequence[HostPort | None]:
        """See `Topology.placement`."""
        return [*await (self.read_map(deadline) if is_fresh else self.owners(deadline))]

    async def owners(self, deadline: Deadline) -> SlotMap:
        """Who has which slots. As for `nodes`, an older map is read again for the next call."""
        slots = await self._map(deadline)
        if asyncio.get_running_loop().time() - self._read_s > _CURRENT_S:
            self._reload_soon()
        return slots

    async def read_map(self, deadline: Deadline) -> SlotMap:
        """Who has which slots, as a node says now."""
        async with deadline.scope("reading the map of the Redis Cluster"):
            self._slots = await self._load(deadline)
        return self._slots

    async def aclose(self) -> None:
        """Drop all connections. Idempotent."""
        self._closed = True
        await self._background.aclose()
        await asyncio.gather(*(member.node.aclose() for member in self._members.values()))

    async def _query_one(
        self,
        member: _Member,
        commands: Sequence[tuple[Command, Redirect | None]],
        deadline: Deadline,
        carries_bytes: bool,
    ) -> list[Reply]:
        sent: list[Command] = []
        places: list[int] = []
        for command, redirect in commands:
            if redirect is not None and redirect.once:
                sent.append(("ASKING",))
            places.append(len(sent))
            sent.append(command)
        run = member.node.data if carries_bytes else member.node.control
        with member.call(deadline):
            replies = await run(*sent, deadline=deadline)
        return [replies[place] for place in places]

    # Redirections

    def _is_elsewhere(self, reply: Reply) -> bool:
        """Whether the command must be sent again, to this or another node."""
        if isinstance(reply, ErrorReply):
            if reply.code in ("MOVED", "ASK", "TRYAGAIN"):
                return True
            if reply.code in ("CLUSTERDOWN", "READONLY", "LOADING"):
                self._reload_soon()
        return False

    def _follow(self, reply: Reply, asked: HostPort) -> Redirect | None:
        redirect = redirect_of(reply, asked)
        if redirect is not None and not redirect.once:
            if self._slots is not None:
                self._slots[redirect.slot] = redirect.address
            self._reload_soon()  # other slots may have moved too
        return redirect

    # The map

    def _owner(self, owners: SlotMap, slot: int) -> _Member:
        address = owners[slot]
        if address is None:
            self._reload_soon()
            raise Unavailable("no node of the Redis Cluster serves this slot: check CLUSTER INFO", slot=slot)
        return self._member(address)

    def _member(self, address: HostPort) -> _Member:
        if self._closed:
            raise Closed("the connections to the Redis Cluster are closed")
        if address not in self._members:
            node = Node(self._access, address, self._num_data_connections, io_loops=self._io_loops)
            self._members[address] = _Member(address, node, self._reload_soon)
        return self._members[address]

    async def _map(self, deadline: Deadline) -> SlotMap:
        if self._slots is None:
            async with deadline.scope("reading the map of the Redis Cluster"), self._loading:
                if self._slots is None:
                    self._slots = await self._load(deadline)
        return self._slots

    async def _load(self, deadline: Deadline) -> SlotMap:
        """The map, from the first node that answers. Each call starts with another node; failed nodes come last."""
        known = [*dict.fromkeys((*self._members, *self._seeds))]
        self._silent.intersection_update(known)  # others have left, and their addresses may never come back
        self._turn = (self._turn + 1) % len(known)
        problem = Unavailable("no node was queried")
        in_turn = known[self._turn :] + known[: self._turn]
        for address in sorted(in_turn, key=lambda one: one in self._silent or self._member(one).is_refused):
            try:
                node = self._member(address).node
                (reply,) = await node.control(("CLUSTER", "SLOTS"), deadline=deadline.earlier(_MAP_S))
                check_reply(reply)
            except Unavailable as error:
                problem = error
                self._silent.add(address)
                continue
            self._silent.discard(address)
            if (slots := parse_slots(reply, address)) is not None:
                self._read_s = asyncio.get_running_loop().time()
                return slots
            problem = Unavailable("the node serves no slots, and knows none that does", address=str(address))
        raise Unavailable(f"cannot read the map of the Redis Cluster: {problem.message}", **problem.details)

    def _reload_soon(self) -> None:
        """Reload the map in the background: it is outdated, or a node fails."""
        self._is_outdated = True
        if not self._is_reloading and not self._closed:
            self._is_reloading = True
            self._background.spawn(self._reload_until_settled(), "reload")

    async def _reload_until_settled(self) -> None:
        """Reload the map and probe failed nodes, until the map is complete and all nodes answer."""
        pause_s = _RELOAD_FIRST_S
        try:
            while self._is_outdated:
                self._is_outdated = False
                await self._reload()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RELOAD_MAX_S)
        finally:
            self._is_reloading = False

    async def _reload(self) -> None:
        try:
            self._slots = await self._load(Deadline.after(2 * _MAP_S))
        except Unavailable as error:
            _log.debug("the map of the Redis Cluster cannot be read: %s", error)
            self._is_outdated = True
            return
        if None in self._slots:
            self._is_outdated = True
        serving = set(self._slots)
        for address, member in list(self._members.items()):
            if address not in serving:
                if member.node.num_in_flight == 0:
                    del self._members[address]
                    member.node.has_left = True
                    await member.node.aclose()
            elif member.is_refused:
                await member.probe()
                self._is_outdated = True


class _Member:
    """A node of a cluster behind its own breaker, so that if it hangs only one call waits for its deadline.

    Args:
        node: Its connections; owned.
        on_failure: Called when a call fails or is refused.
    """

    def __init__(self, address: HostPort, node: Node, on_failure: Callable[[], None]) -> None:
        self.address = address
        self.node = node
        self._breaker = Breaker()
        self._breaker.on_open = lambda _: on_failure()
        self._on_failure = on_failure

    @property
    def is_refused(self) -> bool:
        """True while calls are refused."""
        return self._breaker.is_open

    async def probe(self) -> None:
        """Check whether the node is back; if so, calls are accepted again. Never raises `Unavailable`."""
        try:
            await self.node.control(("PING",), deadline=Deadline.after(_PROBE_S))
        except Unavailable:
            self._breaker.probe_failed()
        else:
            self._breaker.probe_succeeded()

    @contextmanager
    def call(self, deadline: Deadline) -> Iterator[None]:
        """Refuse a call to the node, or run it and count how it ended."""
        try:
            if self._breaker.is_open:
                raise PartDown(
                    "a node of the Redis Cluster failed and is not used until it answers or another takes its slots",
                    address=str(self.address),
                )
            with self._breaker.observe(deadline):
                yield
        except Unavailable:
            self._on_failure()
            raise


def _is_try_again(reply: Reply) -> bool:
    return isinstance(reply, ErrorReply) and reply.code == "TRYAGAIN"
