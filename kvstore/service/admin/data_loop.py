"""Calls from the administration's event loop into the data loop, on which the store runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore.errors import Unavailable
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.turns import Turns, who_asks
from kvstore.store.upkeep.operations import PIECE_RECORDS_MAX

T = TypeVar("T")

CALL_S = 5.0
"""The deadline of a call, unless the caller names another one."""
_CALLS_AT_ONCE = 4


class DataLoop:
    """Runs bounded pieces of work on the data loop. Belongs to the administration's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._turns = Turns(_CALLS_AT_ONCE)

    def soon(self, within_s: float = CALL_S) -> Deadline:
        """The deadline of a call that starts now."""
        return Deadline.after(within_s)

    async def call(self, work: Callable[[Deadline], Coroutine[Any, Any, T]], within_s: float = CALL_S) -> T:
        """Run `work` on the data loop and return its result. At most four calls run at a time, in turns that go round
        among tenants.

        Raises:
            Unavailable: The call did not end within `within_s`, or the service is stopping.

        If cancelled, the work is cancelled too.
        """
        deadline = self.soon(within_s)
        return await self._run(partial(work, deadline), deadline)

    async def call_short(self, work: Callable[[], T], within_s: float = CALL_S) -> T:
        """As `call`, of `work` that does not wait for anything."""

        async def run() -> T:
            return work()

        return await self._run(run, self.soon(within_s))

    async def call_in_pieces(
        self,
        keys: Sequence[RecordKey],
        work: Callable[[Sequence[RecordKey], Deadline], Coroutine[Any, Any, T]],
        within_s: float = CALL_S,
    ) -> list[T]:
        """As `call`, with at most `PIECE_RECORDS_MAX` keys at a time. All pieces share one deadline.

        Returns:
            The result of each piece.
        """
        deadline = self.soon(within_s)
        pieces = (keys[start : start + PIECE_RECORDS_MAX] for start in range(0, len(keys), PIECE_RECORDS_MAX))
        return [await self._run(partial(work, piece, deadline), deadline) for piece in pieces]

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        async with deadline.scope("a call into the data loop"), self._turns.turn(who_asks()):
            coroutine = work()
            try:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError as error:
                coroutine.close()
                raise Unavailable("the service is stopping") from error
            return await asyncio.wrap_future(future)
