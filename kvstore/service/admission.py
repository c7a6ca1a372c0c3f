"""Who may talk to this service, and as whom: by the token that a peer shows, on a Unix socket also by its user."""

from __future__ import annotations

import hmac
import os
import socket
import struct

from kvstore.errors import InvalidRequest
from kvstore.service.credentials import Credentials, Grant
from kvstore.wire.protocol import FrameConnection

__all__ = ["NO_TENANT", "PeerAdmission"]

NO_TENANT = ""
"""The tenant of peers that are admitted without a credential of their own."""

_ANYBODY = Grant(NO_TENANT)
_PEER_CREDENTIALS = struct.Struct("3i")


class PeerAdmission:
    """Checks a peer once, at its hello.

    Args:
        token: Admits a TCP peer without making it a tenant.
        credentials: Tokens that are tenants. With neither a token nor credentials every TCP peer is admitted.
    """

    def __init__(self, token: str = "", credentials: Credentials | None = None) -> None:
        self._token = token.encode()
        self._credentials = credentials or Credentials()

    def check(self, connection: FrameConnection, token: str) -> Grant:
        """Whose the peer is, and what it may do.

        Raises:
            InvalidRequest: Another user's process on the Unix socket, or a token that nobody has; on TCP also none.
        """
        sock = connection.extra("socket")
        is_local = getattr(sock, "family", None) == socket.AF_UNIX
        if is_local:
            _, user, _ = _PEER_CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)  # type: ignore[attr-defined]
            )
            if user not in (0, os.geteuid()):
                raise InvalidRequest("this Unix socket serves its own user only", expected=os.geteuid(), seen=user)
        if token and (grant := self._credentials.grant_of(token)) is not None:
            return grant
        if self._token and hmac.compare_digest(self._token, token.encode()):
            return _ANYBODY
        if not token and is_local:
            return _ANYBODY
        if not self._credentials and (is_local or not self._token):
            return _ANYBODY  # nobody was asked for a token
        raise InvalidRequest("the token is wrong: name a token of this service in token_file", field="token")
