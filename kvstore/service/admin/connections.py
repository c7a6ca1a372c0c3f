"""Connections of the administration's port: few that wait for a request, none that waits for long."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.service.limits import UnauthenticatedConnection, UnauthenticatedConnections
from kvstore.service.listener import Acceptor
from kvstore.wire.tls import ServerTls

__all__ = ["AdminServer"]

_IDLE_OF_ADDRESS_MAX, _IDLE_MAX = 64, 128
"""Connections without a request, of one address and in all: the one that has waited longest is closed."""
_HEAD_S = 10.0
"""For a TLS handshake, and for the head of a request from the connection or the last answer on."""
_READ_S = 30.0
"""A peer that has not read what fills a connection's buffers is cut off."""


class AdminServer(uvicorn.Server):
    """An HTTP server that bounds connections without a request; requests at once are bounded by the `Gate`.

    Args:
        config: Loaded.
        tls: What is shown to peers; `None`: plain HTTP.
    """

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._unauthenticated = UnauthenticatedConnections(_IDLE_OF_ADDRESS_MAX, _IDLE_MAX)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on these sockets, which are listening."""
        await self.lifespan.startup()
        self.servers: Any = [
            Acceptor(sock, self._protocol, self._unauthenticated, tls=self._tls, handshake_s=_HEAD_S)
            for sock in sockets or ()
        ]
        self.started = True

    def _protocol(self, entry: UnauthenticatedConnection) -> asyncio.BaseProtocol:
        state = self.lifespan.state
        return _Connection(
            self._unauthenticated, entry, config=self.config, server_state=self.server_state, app_state=state
        )


class _Connection(H11Protocol):
    """While it has no request, it counts as unauthenticated and has a deadline.

    Args:
        unauthenticated: Connections without a request.
        entry: Its place among them.
        more: As of `H11Protocol`.
    """

    def __init__(
        self, unauthenticated: UnauthenticatedConnections, entry: UnauthenticatedConnection, **more: Any
    ) -> None:
        super().__init__(**more)
        self._unauthenticated = unauthenticated
        self._entry: UnauthenticatedConnection | None = entry
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(_HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        if self._entry is not None:
            self._entry.leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _look(self) -> None:
        """Whether it has a request now may have changed."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request and self._entry is not None:
            self._entry.leave()
            self._entry = None
            if self._late is not None:
                self._late.cancel()
        elif not has_request and self._entry is None:
            self._entry = self._unauthenticated.enter(self.client[0] if self.client else "")
            self._entry.end_with(self.transport.abort)
            self._late = self.loop.call_later(_HEAD_S, self.transport.abort)
