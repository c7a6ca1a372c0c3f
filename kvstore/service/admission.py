"""Who may talk to this service, and as which tenant: by the peer's token, and on a Unix socket also by its user."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.service.credentials import Credentials, Grant
from kvstore.service.failures import FailureLimit
from kvstore.wire.protocol import FrameConnection

__all__ = ["NO_TENANT", "PeerAdmission"]

_log = logging.getLogger(__name__)

NO_TENANT = ""
"""The tenant of peers that are admitted without a credential of their own."""

_ANYBODY = Grant(NO_TENANT)
_PEER_CREDENTIALS = struct.Struct("3i")


class PeerAdmission:
    """Checks a peer once, at its hello.

    Args:
        token: Admits a TCP peer without a tenant.
        credentials: Tokens of tenants; with no entry they admit nobody. `None`: there are none. With neither these nor
            a token every TCP peer is admitted: a service of settings refuses to start so.
        failures: How often one TCP address may show a wrong token.
    """

    def __init__(
        self, token: str = "", credentials: Credentials | None = None, failures: FailureLimit | None = None
    ) -> None:
        self._token = token.encode()
        self._credentials = credentials
        self._failures = failures or FailureLimit()
        self._proven: set[str] = set()

    def check(self, connection: FrameConnection, token: str) -> Grant:
        """The peer's tenant, and what it may do.

        Raises:
            InvalidRequest: Another user's process on the Unix socket, or an unknown token; on TCP also a missing one.
            Unavailable: Too many wrong tokens came from this address within a minute.
        """
        sock = connection.extra("socket")
        is_local = getattr(sock, "family", None) == socket.AF_UNIX
        if is_local:
            _, user, _ = _PEER_CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)  # type: ignore[attr-defined]
            )
            if user not in (0, os.geteuid()):
                raise InvalidRequest("this Unix socket serves its own user only", expected=os.geteuid(), seen=user)
        grant = self._grant_of(token)
        if grant is None and self._needs_none(token, is_local=is_local):
            return _ANYBODY
        if not is_local:
            self._limit(_host(connection.extra("peername")), token, grant)
        if grant is None:
            raise InvalidRequest("the token is wrong: name a token of this service in token_file", field="token")
        return grant

    def still_admits(self, grant: Grant) -> bool:
        """Whether a peer that was admitted with a grant may stay."""
        return self._credentials is None or self._credentials.holds(grant)

    def _needs_none(self, token: str, *, is_local: bool) -> bool:
        """Whether a peer is admitted without a token of somebody's."""
        if self._credentials is not None:
            return is_local and not token
        return is_local or not self._token

    def _grant_of(self, token: str) -> Grant | None:
        if not token:
            return None
        if self._credentials is not None and (grant := self._credentials.grant_of(token)) is not None:
            return grant
        is_shared = bool(self._token) and hmac.compare_digest(self._token, token.encode())
        return _ANYBODY if is_shared else None

    def _limit(self, address: str, token: str, grant: Grant | None) -> None:
        """Count wrong tokens. After too many, a right token is refused too, unless it has been accepted before: a guess
        must not show whether it was right."""
        wait_s = self._failures.wait_s(address)
        if wait_s and (grant is None or grant.name not in self._proven):
            raise Unavailable("too many wrong tokens from this address: wait", seconds=wait_s)
        if grant is not None:
            self._proven.add(grant.name)
        elif token:
            self._failures.failed(address)
            _log.warning("a wrong token was shown on the data port peer=%s", address)


def _host(peer: object) -> str:
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
