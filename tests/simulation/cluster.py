"""A cluster from one seed: services that share a Redis and an S3, engines that use them, and everything that fails."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from dataclasses import dataclass

from kvstore.store.tiered import TieredStore
from tests.simulation import process as processes
from tests.simulation.clients import Client
from tests.simulation.faults import Faults
from tests.simulation.invariants import ServiceWatch
from tests.simulation.media import Medium
from tests.simulation.oracle import Oracle, Trace, Violation
from tests.simulation.plan import draw_plan
from tests.simulation.redis_catalog import Loss, RedisBooks
from tests.simulation.rest import check_at_rest, check_at_the_end, settle
from tests.simulation.seen_again import check_what_is_seen_again
from tests.simulation.servers import Server
from tests.simulation.service import Deployment, Service
from tests.simulation.sightings import RULE, Sightings
from tests.virtual_time import Deadlock, VirtualClock, VirtualLoop

_NAMES = ("one", "two")
_LOG = logging.getLogger("kvstore")


@dataclass(frozen=True)
class Outcome:
    """A simulation that found nothing wrong.

    Attributes:
        digest: Of the trace: equal for equal seeds.
        num_promised: Saves acknowledged at hot or cold.
        num_served: Records that clients loaded.
        num_kills: Of services.
    """

    digest: str
    num_promised: int
    num_served: int
    num_kills: int


class SimulatedCluster:
    """See above; made and run by `simulate`.

    Attributes:
        services: The runs that are under way, one per name.
        losses: What Redis has lost so far.
    """

    def __init__(self, seed: int, loop: VirtualLoop, store_class: type[TieredStore]) -> None:
        self._seed = seed
        self._loop = loop
        self._store_class = store_class
        self.plan = plan = draw_plan(self.numbers("plan"))
        self.trace = Trace(loop.time)
        self.oracle = oracle = Oracle(self.trace)
        if plan.sizes.admission == RULE:
            oracle.sightings = Sightings()
        self.num_kills = 0
        self.losses: list[Loss] = []
        self.deployment = Deployment(
            VirtualClock(loop),
            oracle,
            Server("redis", 0.0005, self.numbers("redis")),
            Server("s3", 0.015, self.numbers("s3")),
            RedisBooks(Medium("redis", plan.hot_bytes, oracle)),
            Medium("s3", None, oracle),
        )
        oracle.media = {"redis": self.deployment.hot, "s3": self.deployment.cold}
        self.services: list[Service] = []
        self._watches: dict[Service, ServiceWatch] = {}
        loop.on_time = self._look
        loop.on_task = processes.adopt
        loop.set_exception_handler(self._unhandled)

    def numbers(self, what: str) -> random.Random:
        """A stream of its own for each who draws, so that one more draw of one changes nothing for the others."""
        return random.Random(f"{self._seed}/{what}")

    async def live(self) -> Outcome:
        for server in (self.deployment.redis, self.deployment.s3):
            server.weather.failing = self.plan.failing
        self.services = [self.new_service(name) for name in _NAMES]
        for service in self.services:
            await service.start()
        clients = [
            Client(f"client{i}", self._pick, self.plan.prompts, self.numbers(f"client{i}"), self.oracle)
            for i in range(self.plan.num_clients)
        ]
        faults = Faults(self, self.numbers("faults"), self.plan.fault_every_s)
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.live(self.plan.lasts_s))
            group.create_task(faults.rage(self.plan.lasts_s))
        self.trace.add("WORLD", "faults end")
        await settle(self)
        await check_at_rest(self)
        await check_what_is_seen_again(self)
        await check_at_the_end(self)
        digest = hashlib.sha256("\n".join(self.trace.lines()).encode()).hexdigest()
        return Outcome(digest, self.oracle.num_promised, self.oracle.num_served, self.num_kills)

    # services

    def new_service(self, name: str) -> Service:
        service = Service(name, self.deployment, self.plan.sizes, self._store_class)
        self._watches[service] = ServiceWatch(service, self.oracle)
        return service

    def _pick(self, numbers: random.Random) -> Service | None:
        service = numbers.choice(self.services)
        return service if service.is_open else None

    async def kill_one(self, numbers: random.Random) -> None:
        index = numbers.randrange(len(self.services))
        service = self.services[index]
        if not service.process.is_alive:
            return
        self.num_kills += 1
        self.trace.add("FAULT", f"{service.name} is killed")
        await service.kill()
        await self._start_again(index, numbers)

    async def restart_one(self, numbers: random.Random) -> None:
        index = numbers.randrange(len(self.services))
        service = self.services[index]
        if not service.is_open:
            return
        self.trace.add("FAULT", f"{service.name} stops in order")
        await self.stop(service)
        await self._start_again(index, numbers)

    async def _start_again(self, index: int, numbers: random.Random) -> None:
        await asyncio.sleep(numbers.expovariate(1 / 1.0))
        self.services[index] = fresh = self.new_service(_NAMES[index])
        self.trace.add("WORLD", f"{fresh.name} starts")
        await fresh.start()

    async def stop(self, service: Service) -> None:
        """Stop a service in order, and see that nothing of it is left."""
        try:
            async with asyncio.timeout(60):
                await service.stop()
        except TimeoutError:
            self.oracle.violate(f"{service.name} does not stop")
        for name in service.process.task_names():
            if ":" in name:  # else a client's call, which has a deadline of its own
                self.oracle.violate(f"{service.name} left a task behind: {name}")
        await service.kill()

    def lose(self, loss: Loss) -> None:
        """Redis loses what it keeps; pins are the catalog's."""
        self.losses.append(loss)
        self.deployment.books.lose(loss)
        if loss is not Loss.RECORDS:
            self.oracle.pins.clear()

    def end(self) -> None:
        """Nobody looks any more, and whatever still runs reaches nothing."""
        self._loop.on_time = lambda: None
        for service in self._watches:
            service.process.is_alive = False

    # what is seen from outside

    def _look(self) -> None:
        now_s = self._loop.time()
        for service in self.services:
            if service.is_open:
                self._watches[service].look(now_s)
        self.oracle.check()

    def watch(self, service: Service) -> ServiceWatch:
        return self._watches[service]

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if not isinstance(context.get("exception"), processes.ProcessDied):
            self.oracle.violate(f"nobody handled: {context['message']}: {context.get('exception')!r}")


class _Complaints(logging.Handler):
    """Errors that the store logs are bugs: a task that failed, a record that nobody will ever take."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(logging.ERROR)
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        process = processes.current_process()
        if isinstance(error, processes.ProcessDied) or (process is not None and not process.is_alive):
            return
        self._oracle.violate(f"logged: {record.getMessage()}{f': {error!r}' if error else ''}")


def simulate(seed: int, store_class: type[TieredStore] = TieredStore) -> Outcome:
    """Run one cluster to its end.

    Raises:
        Violation: An invariant did not hold; the message ends with the trace.
    """
    loop = VirtualLoop()
    cluster = SimulatedCluster(seed, loop, store_class)
    complaints = _Complaints(cluster.oracle)
    level = _LOG.level
    _LOG.addHandler(complaints)
    _LOG.setLevel(logging.ERROR)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                outcome = runner.run(cluster.live())
                cluster.oracle.check()
            except Deadlock as error:
                raise Violation(f"{error}\n{cluster.trace.readable()}") from error
            finally:
                cluster.end()
            return outcome
    finally:
        _LOG.setLevel(level)
        _LOG.removeHandler(complaints)
