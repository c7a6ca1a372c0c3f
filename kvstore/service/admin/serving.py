"""The thread of the administration interface: its loop, its HTTP server, its own way to the catalog."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace

import uvicorn
import uvloop

from kvstore.runtime.background import Background
from kvstore.service.admin.access import Access
from kvstore.service.admin.app import make_app
from kvstore.service.admin.bridge import Bridge
from kvstore.service.admin.catalog_access import CatalogAccess
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.port import Administered
from kvstore.store.encrypted import EncryptedStore

__all__ = ["serve_admin"]

_STOP_POLL_S = 0.1
_GRACE_S = 2
_CONNECTIONS_MAX = 128
_HEAD_BYTES_MAX = 32 << 10


def serve_admin(
    sock: socket.socket,
    data_loop: asyncio.AbstractEventLoop,
    stop: threading.Event,
    service: Administered,
) -> None:
    """Serve on a loop of this thread's own until `stop`.

    Args:
        sock: Listening; stays the caller's.
        data_loop: Where the store lives.
        stop: Ends it, some tenths of a second later.
        service: What is administered.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sock, Bridge(data_loop), stop, service))


async def _serve(sock: socket.socket, bridge: Bridge, stop: threading.Event, service: Administered) -> None:
    operations = service.store.operations
    catalog = CatalogAccess(service.settings, bridge, operations)
    context = AdminContext(bridge, catalog, operations, service.server.describe)
    if isinstance(service.store, EncryptedStore):
        context = replace(context, generations=service.store.generations)
    config = uvicorn.Config(
        make_app(context, Access(service.credentials)),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # who asks is who is connected
        server_header=False,
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
    )
    http = uvicorn.Server(config)
    background = Background("administration")
    background.spawn(_stop_with(stop, http), "stop")
    try:
        await http.serve(sockets=[sock])
    finally:
        await background.aclose()
        await catalog.aclose()


async def _stop_with(stop: threading.Event, http: uvicorn.Server) -> None:
    while not stop.is_set():
        await asyncio.sleep(_STOP_POLL_S)
    http.should_exit = True
