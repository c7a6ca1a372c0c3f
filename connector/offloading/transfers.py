"""Transfers between the primary tier's memory and the store: jobs in threads, each reported exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from connector.logs import LOG
from connector.offloading.lookups import Doors, Key, Request
from kvstore.api import Deadline
from kvstore.client import PageDoor
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK

_LOAD_THREADS, _STORE_THREADS = 2, 2


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the scheduler.

    Attributes:
        slots: For each key the primary tier's slot.
        loads: From the store; else to it.
    """

    id: int
    request: Request
    keys: Sequence[Key]
    slots: Sequence[int]
    loads: bool


@dataclass(frozen=True, slots=True)
class Done:
    """A job that has ended: nothing of it touches the primary tier any more.

    Attributes:
        succeeded: The keys that were loaded or stored.
        refused: Why it was not tried; empty: it was.
        seconds: Time in a thread.
    """

    job: Job
    succeeded: Sequence[Key]
    refused: str = ""
    seconds: float = 0.0


_Move = Callable[[Job, PageDoor, Sequence[int], Deadline], Sequence[Key]]
"""Loads or stores the chunks of one group: a job, the group's door, the chunks' indexes in the job, the job's deadline.
Returns the keys that succeeded."""


class Transfers:
    """Runs jobs. All calls belong to the scheduler's thread.

    Args:
        primary: The primary tier's memory: [slots, bytes of a slot], contiguous.
        max_wait_s: A job takes this long from its begin in a thread, about.
    """

    def __init__(self, primary: memoryview, max_wait_s: float) -> None:
        self.num_slots, self._slot_bytes = primary.shape or (0, 0)
        self._memory = primary.cast("B")
        self._max_wait_s = max_wait_s
        self._running: dict[int, tuple[Job, Future[None]]] = {}
        self._done: deque[Done] = deque()  # filled by the threads
        self._loads = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="kvstore-load")
        self._stores = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="kvstore-store")

    @property
    def num_running(self) -> int:
        """Jobs that were submitted and not yet returned by `finished`."""
        return len(self._running)

    @property
    def slots_to_store(self) -> int:
        """Slots of the primary tier that are being stored or wait for that."""
        return sum(len(job.keys) for job, _ in self._running.values() if not job.loads)

    def submit(self, job: Job, doors: Doors) -> None:
        """Start a job; returns at once."""
        threads, move = (self._loads, self._load) if job.loads else (self._stores, self._store)
        self._running[job.id] = job, threads.submit(self._run, job, doors, move)

    def refuse(self, job: Job, reason: str) -> None:
        """Report a job that is not tried."""
        self._done.append(Done(job, (), reason))

    def finished(self) -> list[Done]:
        """The jobs that have ended since the last call."""
        found = [self._done.popleft() for _ in range(len(self._done))]
        for done in found:
            self._running.pop(done.job.id, None)
        return found

    def drain(self) -> None:
        """Return when no job runs or waits: those that have not begun fail, the others end by themselves."""
        for job, future in self._running.values():
            if not future.cancelled() and future.cancel():
                self.refuse(job, "drained")
        wait([future for _, future in self._running.values() if not future.cancelled()])

    def close(self) -> None:
        """`drain`, and end the threads. The primary tier's memory is not used afterwards. Idempotent."""
        self.drain()
        self._loads.shutdown()
        self._stores.shutdown()
        self._memory.release()

    # on the threads

    def _run(self, job: Job, doors: Doors, move: _Move) -> None:
        """Move a job's chunks group by group. What succeeded before an error is reported as that."""
        succeeded: list[Key] = []
        started_s, deadline = SYSTEM_CLOCK.monotonic_s(), Deadline.after(self._max_wait_s)
        try:
            for group, indexes in job.request.by_group(job.keys).items():
                succeeded += move(job, doors[group], indexes, deadline)
        except Exception:  # noqa: BLE001 - a thread's top: the scheduler waits for the job
            LOG.exception("kvstore: job %d failed", job.id)
        self._done.append(Done(job, succeeded, seconds=SYSTEM_CLOCK.monotonic_s() - started_s))

    def _pages(self, job: Job, indexes: Sequence[int]) -> list[list[memoryview]]:
        starts = [job.slots[index] * self._slot_bytes for index in indexes]
        return [[self._memory[start : start + self._slot_bytes]] for start in starts]

    def _store(self, job: Job, door: PageDoor, indexes: Sequence[int], deadline: Deadline) -> list[Key]:
        """Store chunks of one group; returns those that are stored."""
        keys = [job.keys[index] for index in indexes]
        before, left_s = job.request.before(keys[0], door), deadline.remaining_s
        try:
            were_stored = door.write_from(keys, self._pages(job, indexes), after=before, timeout_s=left_s)
        except KVStoreError as error:
            LOG.debug("kvstore: job %d: %s", job.id, error)
            return []
        return [key for key, was_stored in zip(keys, were_stored, strict=True) if was_stored]

    def _load(self, job: Job, door: PageDoor, indexes: Sequence[int], deadline: Deadline) -> list[Key]:
        """Load chunks of one group; returns those that were loaded. In a chain what is behind a lost one is of no use;
        elsewhere each is tried. A chunk of another size, which only a wrong engine of this tenant can store, counts as
        lost.
        """
        keys, loaded, at, step = [job.keys[index] for index in indexes], list[Key](), 0, len(indexes)
        while at < len(keys) and not deadline.expired:
            part, pages = keys[at : at + step], self._pages(job, indexes[at : at + step])
            try:
                num_read = door.read_into(part, pages, timeout_s=deadline.remaining_s)
            except InvalidRequest as error:
                LOG.debug("kvstore: job %d: %s", job.id, error)
                if step > 1:
                    step = 1  # it says of no chunk that it was read: so each one by itself
                    continue
                num_read = 0
            except KVStoreError as error:
                LOG.debug("kvstore: job %d: %s", job.id, error)
                break
            loaded += part[:num_read]
            at += num_read
            if num_read < len(part):
                if door.layout.chained:
                    break
                at, step = at + 1, 1
        if len(loaded) < len(keys):
            job.request.report(door, keys, len(loaded), "load_failed")
        return loaded
