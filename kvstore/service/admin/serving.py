"""The thread of the administration interface: its loop, its HTTP server, its own way to the catalog."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import replace

import uvicorn
import uvloop

from kvstore.compose import open_job_book
from kvstore.errors import KVStoreError
from kvstore.runtime.background import Background
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.service.admin.access import Access
from kvstore.service.admin.app import make_app
from kvstore.service.admin.bridge import Bridge
from kvstore.service.admin.catalog_access import CatalogAccess
from kvstore.service.admin.connections import AdminServer
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.job_board import JobBoard
from kvstore.service.admin.job_keeper import JobKeeper
from kvstore.service.admin.models import amounts_of, sum_of
from kvstore.service.admin.port import Administered
from kvstore.service.told_settings import told_settings
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.wire.tls import ServerTls

__all__ = ["serve_admin"]

_STOP_POLL_S = 0.1
_GRACE_S = 2
_TOTALS_POLL_S, _TOTALS_S, _TOTALS_SHARE = 1.0, 60.0, 0.01
"""Totals are wanted or not; read so often at most; the share of the time that reading them may take."""
_HEAD_BYTES_MAX = 32 << 10


def serve_admin(
    sock: socket.socket,
    data_loop: asyncio.AbstractEventLoop,
    stop: threading.Event,
    service: Administered,
    tls: ServerTls | None = None,
) -> None:
    """Serve on a loop of this thread's own until `stop`.

    Args:
        sock: Listening; stays the caller's.
        data_loop: Where the store lives.
        stop: Ends it, some tenths of a second later.
        service: What is administered.
        tls: What is shown to peers; `None`: plain HTTP. This thread's own.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sock, Bridge(data_loop), stop, service, tls))


async def _serve(
    sock: socket.socket, bridge: Bridge, stop: threading.Event, service: Administered, tls: ServerTls | None
) -> None:
    async with open_job_book(service.settings) as book:
        keeper = JobKeeper(book, f"{socket.gethostname()} {service.settings.listen}") if book is not None else None
        await _serve_with(sock, bridge, stop, service, tls, jobs=JobBoard(keeper=keeper))


async def _serve_with(
    sock: socket.socket,
    bridge: Bridge,
    stop: threading.Event,
    service: Administered,
    tls: ServerTls | None,
    *,
    jobs: JobBoard,
) -> None:
    operations = service.store.operations
    catalog = CatalogAccess(service.settings, bridge, operations)
    context = AdminContext(
        bridge, catalog, operations, service.server.describe, service.store.events, service.history, stop.is_set
    )
    context = replace(context, jobs=jobs, health_bridge=Bridge(bridge.loop), settings=told_settings(service.settings))
    if service.credentials is not None:
        context = replace(context, holds=service.credentials.holds)
    if isinstance(service.store, EncryptedStore):
        context = replace(context, generations=service.store.generations)
    config = uvicorn.Config(
        make_app(context, Access(service.credentials), service.store.events),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # who asks is who is connected
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
    )
    config.load()
    http = AdminServer(config, tls)
    background = Background("administration")
    background.spawn(_stop_with(stop, http), "stop")
    background.spawn(_look_at_totals(context), "totals")
    try:
        await http.serve(sockets=[sock])
    finally:
        await background.aclose()
        await context.jobs.aclose()
        await catalog.aclose()


async def _look_at_totals(context: AdminContext) -> None:
    """What the catalog says that tiers hold which do not tell it themselves; from here, since it is long to read."""
    names = context.operations.tier_names
    while True:
        wait_s = _TOTALS_POLL_S
        if untold := context.history.untold:
            started_s = SYSTEM_CLOCK.monotonic_s()
            with suppress(KVStoreError):
                totals = await context.catalog.totals(deadline=context.soon(_TOTALS_S))
                held = amounts_of(sum_of(totals.values()), names)
                context.history.held = {name: amount.num_bytes for name, amount in held.items() if name in untold}
            wait_s = max(_TOTALS_S, (SYSTEM_CLOCK.monotonic_s() - started_s) / _TOTALS_SHARE)
        await asyncio.sleep(wait_s)


async def _stop_with(stop: threading.Event, http: uvicorn.Server) -> None:
    while not stop.is_set():
        await asyncio.sleep(_STOP_POLL_S)
    http.should_exit = True
