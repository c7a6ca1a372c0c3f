"""The bridge to the store's thread: submit a coroutine, get a future. Nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from kvstore.api import PageStore
from kvstore.client import trace_parent
from kvstore.errors import Closed, KVStoreError

Value = TypeVar("Value")


class Bridge(Protocol):
    """One loop thread with one store on it; `kvstore.client.BlockingStore` is the real one."""

    def submit(self, work: Callable[[PageStore], Coroutine[Any, Any, Value]]) -> Future[Value]:
        """Run `work(store)` on the loop. Cancelling the future cancels the task.

        Raises:
            Closed: The engine is shutting down.
        """
        ...


def post(bridge: Bridge, work: Callable[[PageStore], Coroutine[Any, Any, None]]) -> None:
    """Run `work(store)` on the loop; its result and its errors are dropped. At shutdown it may not run."""
    with suppress(Closed):
        bridge.submit(work)


def traced(
    trace: str, work: Callable[[PageStore], Coroutine[Any, Any, Value]]
) -> Callable[[PageStore], Coroutine[Any, Any, Value]]:
    """`work` as part of a trace, given as a W3C `traceparent`; unchanged if that is empty."""
    if not trace:
        return work

    async def work_in_trace(store: PageStore) -> Value:
        trace_parent.set(trace)  # of this task alone
        return await work(store)

    return work_in_trace


def result_or_none(future: Future[Value]) -> Value | None:
    """The result of a future that is done; `None` if it failed, which for a cache means: continue without."""
    return None if future.cancelled() or future.exception() is not None else future.result()


def failure_of(future: Future[Any] | None) -> dict[str, object]:
    """Why a future that is done failed, as an outcome's detail; empty: it did not fail, or was cancelled."""
    if future is None or future.cancelled() or (error := future.exception()) is None:
        return {}
    return {"error": str(error) if isinstance(error, KVStoreError) else type(error).__name__}
