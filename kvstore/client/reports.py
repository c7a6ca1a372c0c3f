"""Reports of an engine to its service: kept while the service does not answer, and sent once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace

from kvstore.api import Outcome
from kvstore.client.connection import Connection
from kvstore.errors import Closed, KVStoreError
from kvstore.model.page_blocks import PageBlocks
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.deadline import Deadline
from kvstore.wire import convert
from kvstore.wire.page_names import blocks_message, names_messages

_log = logging.getLogger(__name__)

Report = Outcome | PageBlocks | EndedPrompt

KEPT = 4096
"""Reports that wait for the service; of more, the oldest are dropped. A service keeps as many losses of a tenant."""

KEPT_S = 300.0
"""A report that has waited longer is dropped: a service's status counts the last five minutes."""

_TOGETHER = 64
"""Reports that are sent after one ping."""

_UNSENT_BYTES_MAX = 1 << 20
"""Nothing more is sent while the connection has more than this to send: too much of it ends the connection."""

_PAUSE_S = 0.25
"""Between two attempts while the service does not answer."""


class Reports:
    """A bounded queue of reports of one kind, which outlives connections. Belongs to one event loop.

    Reports have no answers. So each batch is sent once, after the service has answered a ping on the same connection:
    no report goes to a service that is frozen or gone, and none is sent twice. Reports that a service received are lost
    when it dies.

    Args:
        control: Lends the control connection; raises as `RemoteStore`'s calls do.
        patience_s: A ping that is not answered for this long has failed.
        kept: Reports that wait for the service; of more, the oldest are dropped.
        gather_s: How long a report waits for others that are sent after the same ping.
        clock: For the age of reports.
    """

    def __init__(
        self,
        control: Callable[[Deadline], AbstractAsyncContextManager[Connection]],
        patience_s: float,
        clock: Clock = SYSTEM_CLOCK,
        *,
        kept: int = KEPT,
        gather_s: float = 0.0,
    ) -> None:
        self._control = control
        self._patience_s = patience_s
        self._kept = kept
        self._gather_s = gather_s
        self._clock = clock
        self._waiting: deque[tuple[float, Report]] = deque()  # with the time of `add`, the oldest first
        self._num_dropped = 0
        self._turn = asyncio.Lock()
        self._tasks = Background("reports")
        self._sending: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, report: Report) -> None:
        """Have a report sent as soon as the service answers. Returns at once and never fails; on the loop's thread."""
        self._waiting.append((self._clock.monotonic_s(), report))
        if len(self._waiting) > self._kept:
            self._forget_some()
        if self._sending is None or self._sending.done():
            with suppress(Closed):
                self._sending = self._tasks.spawn(self._send_later(), "send", is_shared=True)

    async def send(self, deadline: Deadline) -> None:
        """Send what waits.

        Raises:
            Unavailable: The service does not answer; what was not sent is kept.
            Closed: The client is closed.

        If cancelled, what was not sent is kept.
        """
        if not self._waiting:
            return
        async with deadline.scope("sending reports to the service"):
            await self._turn.acquire()
        try:
            while self._waiting:
                async with self._control(deadline) as connection:
                    await connection.ping(deadline)
                    self._post(connection, _TOGETHER)
        finally:
            self._turn.release()

    async def aclose(self, connection: Connection | None) -> None:
        """Send what waits on `connection`, unless that is `None`, as far as it has room: the service is not waited for.
        Idempotent.
        """
        await self._tasks.aclose()
        if connection is not None:
            self._post(connection, len(self._waiting))
        self._waiting.clear()

    async def _send_later(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._gather_s)
            try:
                await self.send(Deadline.after(self._patience_s))
            except Closed:
                return
            except KVStoreError:
                await asyncio.sleep(_PAUSE_S)

    def _post(self, connection: Connection, most: int) -> None:
        """Send up to `most` of what waits, as far as the connection has room."""
        self._forget_some()
        now_s, welcome = self._clock.monotonic_s(), connection.welcome
        names: list[PageBlocks] = []
        for _ in range(min(most, len(self._waiting))):
            if not _has_room(connection):
                break
            at_s, report = self._waiting.popleft()
            if isinstance(report, PageBlocks):
                names.append(report)
            elif isinstance(report, EndedPrompt):
                if welcome.hints and len(report.boundaries) <= convert.ENDED_MAX:
                    connection.post(convert.ended_message(report))
            # an older service takes a loss for the outcome of the request itself
            elif welcome.explains and (welcome.losses or not report.is_loss):
                age_ms = int((now_s - at_s) * 1000)
                connection.post(convert.outcome_message(replace(report, age_ms=age_ms)))
        if welcome.page_names:
            for message in names_messages(names):
                connection.post(message)
        elif welcome.blocks:  # an older service
            for blocks in names:
                connection.post(blocks_message(blocks))
        if self._num_dropped:
            _log.warning(
                "the store service does not learn of %d reports of this engine: it did not answer for %d s, or "
                "more than %d were waiting",
                self._num_dropped,
                KEPT_S,
                self._kept,
            )
            self._num_dropped = 0

    def _forget_some(self) -> None:
        oldest_s = self._clock.monotonic_s() - KEPT_S
        while self._waiting and (len(self._waiting) > self._kept or self._waiting[0][0] < oldest_s):
            self._waiting.popleft()
            self._num_dropped += 1


def _has_room(connection: Connection) -> bool:
    return connection.open and connection.frames.unsent_bytes <= _UNSENT_BYTES_MAX
