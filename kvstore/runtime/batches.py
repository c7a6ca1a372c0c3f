"""Batches small items: those that arrive while a call runs are sent together in the next call."""

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
    """Runs one call at a time, with all items that have arrived since the last one; an item that finds no call running
    is sent at once.

    Args:
        call: Takes some items; all of them get its answer, or its error. It must end by itself, as by a timeout.
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
            item: What to send.
            deadline: When to stop waiting; `None`: wait for the call, however it ends.

        Raises:
            Unavailable: At the deadline; the call continues.
            KVStoreError: What the call raised.

        If cancelled, the item may still be sent.
        """
        future: asyncio.Future[Answer | KVStoreError] = asyncio.get_running_loop().create_future()
        if not self._is_running:
            self._background.spawn(self._run(), "batches")
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
                except KVStoreError as error:  # set as a result: perhaps nobody waits for the future any more
                    answer = error
                except BaseException:  # the owner closes: those that wait are not sent either
                    _resolve(batch + self._waiting, Closed("closed before a call was made or had ended"))
                    self._waiting = []
                    raise
                _resolve(batch, answer)
        finally:
            self._is_running = False


def _resolve(
    batch: Sequence[tuple[Item, asyncio.Future[Answer | KVStoreError]]], answer: Answer | KVStoreError
) -> None:
    for _, future in batch:
        if not future.done():
            future.set_result(answer)
