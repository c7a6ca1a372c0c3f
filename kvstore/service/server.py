"""The service as an object: a store, its listeners and its sessions."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence

import kvstore
from kvstore.api import PageStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.background import Background
from kvstore.runtime.budget import ByteBudget, Shares
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.tracing import Tracing
from kvstore.service.answers import Answers
from kvstore.service.authentication import NO_TENANT, Credentials, CredentialsFile, PeerAdmission
from kvstore.service.limits import Newcomer, Newcomers, ServiceLimits
from kvstore.service.listener import Listener
from kvstore.service.session import Session
from kvstore.wire.address import Address
from kvstore.wire.tls import ServerTls

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_LOOK_S = 1.0
"""Between two looks at the credentials and at peers that have stopped to read or to send."""
_UNREAD_S = 1.0
_VERB = "kvstore "
"""What a verb of the command line calls itself begins so; engines do not."""


class Server:
    """Serves a store on any number of addresses until it is closed.

    Args:
        store: Stays the caller's: it is not closed here.
        limits: What peers can make it hold.
        token: Required of TCP peers, unless empty.
        credentials: Tokens of tenants; `None`: there are none. The server looks every second whether their file has
            changed, and ends peers whose token is not good any more.
        tls: For addresses that speak it.
        tracing: Makes a span of each request.
        settings: As `told_settings` returns them; told to peers that may see everything.
    """

    def __init__(
        self,
        store: PageStore,
        limits: ServiceLimits | None = None,
        token: str = "",
        credentials: Credentials | None = None,
        tls: ServerTls | None = None,
        *,
        tracing: Tracing | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._tracing = tracing
        self.listeners: list[Listener] = []
        self._limits = limits or ServiceLimits()
        self.tls = tls
        self._answers = Answers(store, self.describe, settings or {})
        self._credentials = credentials
        self._admission = PeerAdmission(token, credentials)
        self._newcomers = Newcomers(self._limits.newcomers_of_address, self._limits.newcomers)
        self._budget = ByteBudget(self._limits.receive_bytes)
        self._requests = Shares(self._limits.request_bytes)
        self._receive_shares: dict[str, ByteBudget] = {}
        self._sessions: set[Session] = set()
        self._closing = Background("server")
        self._looking = Background("server-looks")
        self._started_s = SYSTEM_CLOCK.monotonic_s()
        self._num_sessions = 0
        self._quiet_since_s = self._started_s

    async def listen(self, addresses: Sequence[Address]) -> None:
        """Accept peers on further addresses.

        Raises:
            InvalidRequest: An address cannot be listened on.
        """
        handshake_s = self._limits.hello_timeout_s
        for address in addresses:
            self.listeners.append(
                await Listener.open(address, self._new_peer, self._newcomers, self.tls, handshake_s=handshake_s)
            )
            _log.info("listening address=%s", self.listeners[-1].address)
        if not len(self._looking):
            self._looking.spawn(self._look_again_and_again(), "looks")

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it listens."""
        return tuple(listener.address for listener in self.listeners)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last peer left, or since the start; zero while a peer is connected."""
        return 0.0 if self._sessions else SYSTEM_CLOCK.monotonic_s() - self._quiet_since_s

    def describe(self, tenant: str = "") -> Mapping[str, object]:
        """What `status` says of the service itself. Safe from any thread.

        Args:
            tenant: Whose connections; empty: everybody's, with what the service has of them together.
        """
        sessions = list(self._sessions)  # in one go: peers come and go on the loop meanwhile
        if tenant:
            sessions = [session for session in sessions if session.tenant == tenant]
        of_engines = [session for session in sessions if not session.client.startswith(_VERB)]
        told = {
            "release": kvstore.__version__,
            "uptime_s": round(SYSTEM_CLOCK.monotonic_s() - self._started_s, 3),
            "sessions": len(sessions),
            "sessions_of_engines": len(of_engines),
            "requests_running": sum(session.num_running for session in sessions),
            "clients": sorted({session.client for session in sessions if session.client}),
            "engines": sorted({session.client for session in of_engines if session.client}),
        }
        if tenant:
            return told
        return {
            **told,
            "pid": os.getpid(),
            "addresses": [str(address) for address in self.addresses],
            "sessions_total": self._num_sessions,
            "request_bytes_used": self._requests.used,
            "receive_bytes_used": self._budget.used_bytes,
            "receive_bytes_limit": self._budget.limit_bytes,
        }

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if isinstance(self._credentials, CredentialsFile) and await asyncio.to_thread(self._credentials.file.poll):
                self._end_those_without_credential()
            if self.tls is not None:
                await asyncio.to_thread(self.tls.poll)
            self._end_those_that_do_not_read(SYSTEM_CLOCK.monotonic_s())

    def _end_those_without_credential(self) -> None:
        for session in list(self._sessions):
            if session.grant is not None and not self._admission.still_admits(session.grant):
                _log.info("a peer is ended, its token is not good any more who=%s", session.grant.name)
                session.connection.refuse(
                    InvalidRequest(
                        "the token is not good any more, or for something else: connect again", field="token"
                    )
                )

    def _end_those_that_do_not_read(self, now_s: float) -> None:
        """Cut off who has read nothing for too long, and while too much is unread who has read nothing for a second."""
        looked = [(session.look(now_s), session.held_bytes, session) for session in self._sessions]
        unread_bytes = sum(held_bytes for _, held_bytes, _ in looked)
        for silent_s, held_bytes, session in sorted(looked, key=lambda one: one[1], reverse=True):
            is_too_much = unread_bytes > self._limits.unread_bytes and silent_s >= _UNREAD_S
            if silent_s >= self._limits.silence_timeout_s or is_too_much:
                _log.warning(
                    "a peer that does not read is cut off client=%s seconds=%.0f bytes=%d",
                    session.client,
                    silent_s,
                    held_bytes,
                )
                unread_bytes -= held_bytes
                session.connection.abort()

    def _new_peer(self, newcomer: Newcomer) -> asyncio.BaseProtocol:
        made = Session(
            self._answers,
            self._admission,
            self._limits,
            self._budget,
            tracing=self._tracing,
            share_of=self._share_of,
            newcomer=newcomer,
            requests=self._requests,
            on_made=self._made,
            on_ended=self._ended,
        )
        return made.connection

    def _share_of(self, tenant: str) -> ByteBudget | None:
        """What a tenant may take of the room for saves; the peers without one are our own user's, and may take all."""
        if tenant == NO_TENANT:
            return None
        if tenant not in self._receive_shares:
            self._receive_shares[tenant] = ByteBudget(max(1, self._limits.receive_bytes * 3 // 4))
        return self._receive_shares[tenant]

    def _made(self, session: Session) -> None:
        self._sessions.add(session)
        self._num_sessions += 1
        session.number = self._num_sessions

    def _ended(self, session: Session) -> None:
        self._sessions.discard(session)
        self._quiet_since_s = SYSTEM_CLOCK.monotonic_s()
        self._closing.spawn(session.aclose(), "session")

    async def aclose(self) -> None:
        """Stop listening, end every session, let received saves finish for a few seconds. Idempotent."""
        await self._looking.aclose()
        for listener in self.listeners:
            await listener.aclose()
        for session in list(self._sessions):
            session.connection.refuse(Unavailable("the service is shutting down"))
        deadline_s = SYSTEM_CLOCK.monotonic_s() + _CLOSE_S
        while (self._sessions or len(self._closing)) and SYSTEM_CLOCK.monotonic_s() < deadline_s:
            await asyncio.sleep(0.01)
        await self._closing.aclose()
