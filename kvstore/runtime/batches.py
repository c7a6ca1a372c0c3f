"""Many small pieces of work in few calls: what comes while a call is under way goes with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

from kvstore.errors import Closed, KVStoreError
from kvstore.runtime.background import Background
from kvstore.runtime.deadline import Deadline

__all__ = ["Batches"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batches(Generic[Item, Answer]):
    """One call at a time carries all items that have come since the last one; nobody waits for company.

    Args:
        call: Takes some items; its answer, or its error, is everybody's. It needs a limit of its own.
        background: Owns the calls.
        items_max: Items in one call.
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
            item: What is carried.
            deadline: When to give up; `None`: the call ends by itself, and how it did must be known.

        Raises:
            Unavailable: At the deadline; the call goes on.
            KVStoreError: What the call raised.

        If cancelled, the item may still go with a call.
        """
        future: asyncio.Future[Answer | KVStoreError] = asyncio.get_running_loop().create_future()
        if not self._is_running:
            self._background.spawn(self._run(), "batches")
            self._is_running = True
        self._waiting.append((item, future))
        async with deadline.scope("a call for several") if deadline is not None else nullcontext():
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
                except KVStoreError as error:  # travels as a value: perhaps nobody waits any more
                    answer = error
                except BaseException:  # the owner ends: nobody will carry those that wait either
                    _tell(batch + self._waiting, Closed("closed before a call was made or had ended"))
                    self._waiting = []
                    raise
                _tell(batch, answer)
        finally:
            self._is_running = False


def _tell(batch: Sequence[tuple[Item, asyncio.Future[Answer | KVStoreError]]], answer: Answer | KVStoreError) -> None:
    for _, future in batch:
        if not future.done():
            future.set_result(answer)
