"""The life of a service: open the store, listen, wait for a reason to stop, close in order."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TypeVar

from kvstore.api import PageStore
from kvstore.runtime.background import on_loose_exception
from kvstore.runtime.tracing import Tracing
from kvstore.service.credentials import Credentials
from kvstore.service.limits import ServiceLimits
from kvstore.service.server import Server
from kvstore.wire.address import Address
from kvstore.wire.tls import ServerTls

__all__ = ["serve_until_told"]

_log = logging.getLogger(__name__)
_IDLE_POLL_S = 0.1

Store = TypeVar("Store", bound=PageStore)


def _nothing_beside(_: PageStore, __: Server) -> AbstractAsyncContextManager[object]:
    return nullcontext()


async def serve_until_told(
    store: AbstractAsyncContextManager[Store],
    addresses: Sequence[Address],
    *,
    limits: ServiceLimits | None = None,
    token: str = "",
    credentials: Credentials | None = None,
    tls: ServerTls | None = None,
    tracing: Tracing | None = None,
    settings: Mapping[str, object] | None = None,
    idle_exit_s: float | None = None,
    on_ready: Callable[[Server], None] | None = None,
    beside: Callable[[Store, Server], AbstractAsyncContextManager[object]] = _nothing_beside,
) -> None:
    """Serve until SIGTERM or SIGINT, or until there has been no client for `idle_exit_s`.

    Args:
        store: Opened first, closed last.
        addresses: Where to listen.
        limits: What peers can make the service hold.
        token: Required of TCP peers, unless empty.
        credentials: Tokens of tenants.
        tls: For addresses that speak it.
        tracing: Makes a span of each request.
        settings: Told to peers that may see everything.
        idle_exit_s: `None`: never ends by itself.
        on_ready: Called when all addresses accept.
        beside: Makes what else is open while it serves; opened after the addresses, closed before them.

    Raises:
        KVStoreError: The store does not open, or an address cannot be listened on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loose_exception)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with store as opened:
        server = Server(opened, limits, token, credentials, tls, tracing=tracing, settings=settings)
        try:
            await server.listen(addresses)
            async with beside(opened, server):
                if on_ready is not None:
                    on_ready(server)
                await _until(stop, server, idle_exit_s)
        finally:
            await server.aclose()
    _log.info("stopped")


async def _until(stop: asyncio.Event, server: Server, idle_exit_s: float | None) -> None:
    if idle_exit_s is None:
        await stop.wait()
        return
    while not stop.is_set() and server.quiet_s < idle_exit_s:
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_POLL_S):
                await stop.wait()
