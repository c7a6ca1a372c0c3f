"""The service as an object: a store, its listeners and its sessions."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial

import kvstore
from kvstore.api import PageStore
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, UnsupportedFormat
from kvstore.runtime.background import Background
from kvstore.runtime.budget import ByteBudget, Shares
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.tracing import Tracing
from kvstore.runtime.turns import Turns
from kvstore.runtime.watched_file import Watched
from kvstore.service.answers import Answers
from kvstore.service.authentication import Authenticator, Credentials
from kvstore.service.limits import ServiceLimits, UnauthenticatedConnection, UnauthenticatedConnections
from kvstore.service.listener import Listener
from kvstore.service.save_memory import SaveMemories
from kvstore.service.session import ConnectedEngine, Session, SessionContext
from kvstore.wire.address import Address
from kvstore.wire.tls import ServerTls

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_CHECK_S = 1.0
"""Pause between two checks of the files that may change, and of peers that have stopped to read or to send."""
_UNREAD_S = 1.0
_REFUSED_S = 60.0
_VERB = "kvstore "
"""Names of clients that are verbs of the command line begin with this; names of engines do not."""


class Server:
    """Serves a store on any number of addresses until it is closed.

    Args:
        store: Stays the caller's: it is not closed here.
        token: Required of TCP peers, unless empty.
        credentials: Tokens of tenants; `None`: there are none. Every second the server checks whether they have
            changed, and ends peers whose token is no longer valid.
        tls: For addresses that speak it, on both ports; its files are checked every second, too.
        settings: A part of `status` for peers that may see everything, as `reported_settings` returns it.

    Attributes:
        instance: Names this run of the service on both ports, so that a client knows whether they belong together.
    """

    def __init__(
        self,
        store: PageStore,
        limits: ServiceLimits | None = None,
        token: str = "",
        credentials: Watched[Credentials] | None = None,
        tls: ServerTls | None = None,
        *,
        tracing: Tracing | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.listeners: list[Listener] = []
        self.instance = secrets.token_hex(8)
        self._limits = limits or ServiceLimits()
        self.tls = tls
        self.answers = Answers(store, self.describe, settings or {})
        self._credentials = credentials
        self._unauthenticated = UnauthenticatedConnections(
            self._limits.unauthenticated_of_address, self._limits.unauthenticated
        )
        self._context = SessionContext(
            self.answers,
            Authenticator(token, credentials),
            self._limits,
            ByteBudget(self._limits.receive_bytes),
            Shares(self._limits.request_bytes),
            ByteBudget(self._limits.head_bytes),
            Shares(self._limits.connections),
            Turns(self._limits.frames_at_once),
            SaveMemories(self._limits),
            tracing,
        )
        self._sessions: set[Session] = set()
        self._closing = Background("server")
        self._checking = Background("server-checks")
        self._started_s = SYSTEM_CLOCK.monotonic_s()
        self._num_sessions = 0
        self._quiet_since_s = self._started_s
        self._refused_at_s = float("-inf")

    async def listen(self, addresses: Sequence[Address]) -> None:
        """Accept peers on further addresses.

        Raises:
            InvalidRequest: An address cannot be listened on.
        """
        handshake_s = self._limits.hello_timeout_s
        for address in addresses:
            self.listeners.append(
                await Listener.open(address, self._new_peer, self._unauthenticated, self.tls, handshake_s=handshake_s)
            )
            _log.info("listening address=%s", self.listeners[-1].address)
        if not len(self._checking):
            self._checking.repeat(self._check, "checks", every_s=_CHECK_S)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it listens."""
        return tuple(listener.address for listener in self.listeners)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last peer left, or since the start; zero while a peer is connected."""
        return 0.0 if self._sessions else SYSTEM_CLOCK.monotonic_s() - self._quiet_since_s

    def describe(self, tenant: str = "") -> Mapping[str, object]:
        """The service's own part of `status`. Safe from any thread.

        Args:
            tenant: The tenant whose connections are counted. Empty: all tenants, and the process itself is described.
        """
        sessions = list(self._sessions)  # in one step: the loop's thread may add and remove some
        if tenant:
            sessions = [session for session in sessions if session.tenant == tenant]
        of_engines = [session for session in sessions if not session.client.startswith(_VERB)]
        values = {
            "release": kvstore.__version__,
            "uptime_s": round(SYSTEM_CLOCK.monotonic_s() - self._started_s, 3),
            "sessions": len(sessions),
            "sessions_of_engines": len(of_engines),
            "requests_running": sum(session.num_running for session in sessions),
            "clients": sorted({session.client for session in sessions if session.client}),
            "engines": sorted({session.client for session in of_engines if session.client}),
        }
        if tenant:
            return values
        return {
            **values,
            "pid": os.getpid(),
            "instance": self.instance,
            "not_reloaded": {one.what: one.problem for one in (self._credentials, self.tls) if one and one.problem},
            "addresses": [str(address) for address in self.addresses],
            "sessions_total": self._num_sessions,
            "request_bytes_used": self._context.requests.used,
            "receive_bytes_used": self._context.budget.used_bytes,
            "receive_bytes_limit": self._context.budget.limit_bytes,
            "save_memory_bytes_used": self._context.memories.used_bytes,
        }

    def engines(self) -> list[ConnectedEngine]:
        """The engines of all tenants that load from this service now. Safe from any thread."""
        sessions = list(self._sessions)  # in one step: the loop's thread may add and remove some
        return [session.engine for session in sessions if session.engine is not None]

    async def _check(self) -> None:
        if self._credentials is not None and await asyncio.to_thread(self._credentials.poll):
            self._end_unauthorized()
        if self.tls is not None:
            await asyncio.to_thread(self.tls.poll)
        self._end_unread(SYSTEM_CLOCK.monotonic_s())

    def _end_unauthorized(self) -> None:
        for session in list(self._sessions):
            if session.grant is not None and not self._context.authenticator.still_admits(session.grant):
                _log.info("ended a connection whose token is no longer valid who=%s", session.grant.name)
                session.connection.refuse(
                    InvalidRequest(
                        "the token is no longer valid, or its scopes have changed: connect again", field="token"
                    )
                )

    def _end_unread(self, now_s: float) -> None:
        """End peers that have read nothing for too long; while too much is unread, for a second."""
        checked = [(session.check(now_s), session.held_bytes, session) for session in self._sessions]
        unread_bytes = sum(held_bytes for _, held_bytes, _ in checked)
        for silent_s, held_bytes, session in sorted(checked, key=lambda one: one[1], reverse=True):
            is_too_much = unread_bytes > self._limits.unread_bytes and silent_s >= _UNREAD_S
            if silent_s >= self._limits.silence_timeout_s or is_too_much:
                _log.warning(
                    "ended a connection whose peer does not read client=%s seconds=%.0f bytes=%d",
                    session.client,
                    silent_s,
                    held_bytes,
                )
                unread_bytes -= held_bytes
                session.connection.abort()

    def _new_peer(self, entry: UnauthenticatedConnection) -> asyncio.BaseProtocol:
        ended = partial(self._ended, entry.source)
        return Session(self._context, entry, on_made=self._made, on_ended=ended).connection

    def _made(self, session: Session) -> None:
        self._sessions.add(session)
        self._num_sessions += 1
        session.number = self._num_sessions

    def _ended(self, source: str, session: Session) -> None:
        if session.grant is None and isinstance(session.connection.refusal, InvalidRequest | UnsupportedFormat):
            self._report_refused(source, session.connection.refusal)
        self._sessions.discard(session)
        self._quiet_since_s = SYSTEM_CLOCK.monotonic_s()
        self._closing.spawn(session.aclose(), "session")

    def _report_refused(self, source: str, error: KVStoreError) -> None:
        """Log a peer that was refused at its hello, one in a minute: a client that can connect could fill the log."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s < self._refused_at_s + _REFUSED_S:
            return
        self._refused_at_s = now_s
        text = "a peer was refused at its hello (others are not reported for a minute) peer=%s reason=%s"
        _log.warning(text, source or "a process of this machine", error)

    async def aclose(self) -> None:
        """Stop listening, end every session, let received saves finish for a few seconds. Idempotent."""
        await self._checking.aclose()
        for listener in self.listeners:
            await listener.aclose()
        for session in list(self._sessions):
            session.connection.refuse(Unavailable("the service is shutting down"))
        deadline_s = SYSTEM_CLOCK.monotonic_s() + _CLOSE_S
        while (self._sessions or len(self._closing)) and SYSTEM_CLOCK.monotonic_s() < deadline_s:
            await asyncio.sleep(0.01)
        await self._closing.aclose()
        self._context.memories.shutdown()
