"""Concurrent calls for one key share one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from kvstore.errors import Closed
from kvstore.runtime.background import Background

__all__ = ["SingleFlight"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SingleFlight(Generic[Key, Value]):
    """Runs one task per key at a time; all callers that ask meanwhile get its outcome."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._flights: dict[Key, _Flight[Value]] = {}

    async def run(self, key: Key, work: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """Return the outcome of the running flight for `key`, or start `work` as that flight.

        Raises:
            Closed: The owner of the flights was closed meanwhile.

        If cancelled, the flight continues while others wait for it, and is cancelled when nobody does.
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
