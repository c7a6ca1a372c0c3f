"""The thread of the administration interface: its event loop, its HTTP server and the limits of its connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.catalog.coordination import JOBS
from kvstore.compose import open_book
from kvstore.errors import KVStoreError
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.admin.access import PEER
from kvstore.service.admin.app import make_app
from kvstore.service.admin.catalog_access import CatalogAccess
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.data_loop import DataLoop
from kvstore.service.admin.jobs.board import JobBoard
from kvstore.service.admin.jobs.job import JobKeeper
from kvstore.service.admin.models import amounts_of, sum_of
from kvstore.service.admin.port import Administered
from kvstore.service.limits import UnauthenticatedConnection, UnauthenticatedConnections
from kvstore.service.listener import Acceptor
from kvstore.wire.tls import ServerTls

_STOP_POLL_S = 0.1
_GRACE_S = 2
_TOTALS_POLL_S, _TOTALS_S, _TOTALS_SHARE = 1.0, 60.0, 0.01
"""How often to check whether totals are needed, the least time between two reads, and the share of the time that reads
may take."""
_HEAD_BYTES_MAX = 32 << 10
_IDLE_OF_ADDRESS_MAX, _IDLE_MAX = 64, 128
"""Connections without a request, per address and in all. Above that the one that has waited longest is closed."""
_HEAD_S = 10.0
"""For a TLS handshake, and for the head of a request, counted from the connection or the previous response."""
_READ_S = 30.0
"""A peer that leaves the connection's buffers full for this long is disconnected."""


async def serve_admin(
    socks: Sequence[socket.socket],
    data_loop: asyncio.AbstractEventLoop,
    stop: threading.Event,
    service: Administered,
    tls: ServerTls | None,
) -> None:
    """Serve until `stop`, on an event loop in a thread of its own.

    Args:
        socks: Listening; stay the caller's.
        stop: Ends the server some tenths of a second later.
        tls: The certificate to present; `None`: plain HTTP.
    """
    calls = DataLoop(data_loop)
    catalog = CatalogAccess(service.settings, calls, service.store.operations)
    context = AdminContext(service, calls, DataLoop(data_loop), catalog, stop.is_set)
    async with open_book(service.settings, JOBS) as book:
        keeper = JobKeeper(book, f"{socket.gethostname()} {service.settings.listen}") if book is not None else None
        jobs = JobBoard(keeper)
        http = _Server(_config(make_app(context, jobs)), tls)
        background = Background("administration")
        background.spawn(_stop_with(stop, http), "stop")
        background.keep_running(partial(_read_totals, context), "totals")
        try:
            await http.serve(sockets=list(socks))
        finally:
            await background.aclose()
            await jobs.aclose()
            await catalog.aclose()


def _config(app: Any) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns of each malformed request: any peer could fill the log
        access_log=False,
        proxy_headers=False,  # the client's address is that of the connection
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
    )
    config.load()
    return config


async def _read_totals(context: AdminContext) -> None:
    """Read from the catalog what is held by tiers that cannot tell it themselves. It takes long, so it runs here. A
    catalog that may lack records does not tell it.
    """
    names, history = context.operations.tier_names, context.service.history
    while True:
        wait_s = _TOTALS_POLL_S
        if unmeasured := history.unmeasured:
            started_s = SYSTEM_CLOCK.monotonic_s()
            with suppress(KVStoreError):
                totals, at_s = await context.catalog.whole_totals(_TOTALS_S)
                for name, amount in amounts_of(sum_of(totals.values()), names).items():
                    if name in unmeasured and at_s is None:
                        context.operations.note_held(name, amount.num_bytes)
            wait_s = max(_TOTALS_S, (SYSTEM_CLOCK.monotonic_s() - started_s) / _TOTALS_SHARE)
        await asyncio.sleep(wait_s)


async def _stop_with(stop: threading.Event, http: uvicorn.Server) -> None:
    while not stop.is_set():
        await asyncio.sleep(_STOP_POLL_S)
    http.should_exit = True


class _Server(uvicorn.Server):
    """An HTTP server that bounds connections without a request; the `Gate` bounds requests."""

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._unauthenticated = UnauthenticatedConnections(_IDLE_OF_ADDRESS_MAX, _IDLE_MAX)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on these listening sockets."""
        await self.lifespan.startup()
        self.servers: Any = [
            Acceptor(sock, self._protocol, self._unauthenticated, tls=self._tls, handshake_s=_HEAD_S)
            for sock in sockets or ()
        ]
        self.started = True

    def _protocol(self, entry: UnauthenticatedConnection) -> asyncio.BaseProtocol:
        state = {**self.lifespan.state, PEER: {}}
        return _Connection(
            self._unauthenticated, entry, config=self.config, server_state=self.server_state, app_state=state
        )


class _Connection(H11Protocol):
    """A connection that is bounded, and has a deadline, while it has no request."""

    def __init__(
        self, unauthenticated: UnauthenticatedConnections, entry: UnauthenticatedConnection, **more: Any
    ) -> None:
        super().__init__(**more)
        self._unauthenticated = unauthenticated
        self._entry: UnauthenticatedConnection | None = entry
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        if self._entry is not None:
            self._entry.leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(_READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _update(self) -> None:
        """Start or end the deadline after a request may have begun or ended."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request and self._entry is not None:
            self._entry.leave()
            self._entry = None
            if self._head_timer is not None:
                self._head_timer.cancel()
        elif not has_request and self._entry is None:
            self._entry = self._unauthenticated.enter(self.client[0] if self.client else "")
            self._entry.end_with(self.transport.abort)
            self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)
