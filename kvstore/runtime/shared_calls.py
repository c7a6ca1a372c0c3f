"""Calls that several callers share: one for equal keys, or one for all items that arrive during the previous one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

from kvstore.errors import Closed, InternalError, KVStoreError
from kvstore.runtime.background import Background, Work
from kvstore.runtime.deadline import Deadline

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SingleFlight(Generic[Key, Value]):
    """Runs one task per key at a time; all callers for that key get its outcome while it runs."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._flights: dict[Key, _Flight[Value]] = {}

    async def run(self, key: Key, work: Work[Value]) -> Value:
        """Return the outcome of the running flight for `key`, or start `work` as that flight.

        Raises:
            Closed: The owner of the flights was closed during the call.

        If cancelled, the flight continues while other callers wait for it, and is cancelled when none is left.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(self._background.spawn(work(), "flight", is_awaited=True))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if flight.task.cancelled() and caller is not None and not caller.cancelling():
                raise Closed("the flight ended with its owner", key=key) from error
            raise
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._forget(key, flight)
                flight.task.cancel()

    def _forget(self, key: Key, flight: _Flight[Value]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def __len__(self) -> int:
        return len(self._flights)


class _Flight(Generic[Value]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[Value]) -> None:
        self.task = task
        self.waiters = 0


_CLOSED = "closed before a call was made or had ended"

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batches(Generic[Item, Answer]):
    """Runs one call at a time, with all items that have arrived since the last one; an item that finds no call running
    is sent at once.

    Args:
        call: Takes some items; all of them get its answer, or its error. It must end by itself, as by a timeout.
        background: Owns the calls.
    """

    def __init__(
        self, call: Callable[[Sequence[Item]], Awaitable[Answer]], background: Background, *, items_max: int = 256
    ) -> None:
        self._call = call
        self._background = background
        self._items_max = items_max
        self._waiting: list[tuple[Item, asyncio.Future[Answer | KVStoreError]]] = []
        self._is_running = False

    async def run(self, item: Item, deadline: Deadline | None) -> Answer:
        """Wait for the call that carries `item`.

        Args:
            deadline: When to stop waiting; `None`: wait for the call, however it ends.

        Raises:
            Unavailable: At the deadline; the call continues.
            KVStoreError: What the call raised; `InternalError` for what is no such error, which the log has.

        If cancelled, the item may still be sent.
        """
        future: asyncio.Future[Answer | KVStoreError] = asyncio.get_running_loop().create_future()
        if not self._is_running:
            self._background.spawn(self._run(), "batches").add_done_callback(self._ended)
            self._is_running = True
        self._waiting.append((item, future))
        async with deadline.scope("a batched call") if deadline is not None else nullcontext():
            answer = await future
        if isinstance(answer, KVStoreError):
            raise answer
        return answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._items_max], self._waiting[self._items_max :]
                answer: Answer | KVStoreError
                try:
                    answer = await self._call([item for item, _ in batch])
                except KVStoreError as error:  # set as a result: an exception that no caller retrieves would be logged
                    answer = error
                except BaseException as error:  # a bug, or the owner closes: those that wait are not sent either
                    is_bug = isinstance(error, Exception)
                    _resolve(
                        batch + self._waiting, InternalError("a batched call failed") if is_bug else Closed(_CLOSED)
                    )
                    self._waiting = []
                    raise
                _resolve(batch, answer)
        finally:
            self._is_running = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and self._is_running:  # the owner was closed before it began
            _resolve(self._waiting, Closed(_CLOSED))
            self._waiting, self._is_running = [], False


def _resolve(
    batch: Sequence[tuple[Item, asyncio.Future[Answer | KVStoreError]]], answer: Answer | KVStoreError
) -> None:
    for _, future in batch:
        if not future.done():
            future.set_result(answer)
