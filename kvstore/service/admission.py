"""Who may talk to this service: on a Unix socket its own user and root, on TCP whoever knows the token."""

from __future__ import annotations

import hmac
import os
import socket
import struct

from kvstore.errors import InvalidRequest
from kvstore.wire.protocol import FrameConnection

__all__ = ["PeerAdmission"]

_CREDENTIALS = struct.Struct("3i")


class PeerAdmission:
    """Checks a peer once, at its hello.

    Args:
        token: What TCP peers must show; empty admits every TCP peer.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token.encode()

    def check(self, connection: FrameConnection, token: str) -> None:
        """Pass, or raise.

        Raises:
            InvalidRequest: Another user's process on the Unix socket, or a wrong token on TCP.
        """
        sock = connection.extra("socket")
        if getattr(sock, "family", None) == socket.AF_UNIX:
            _, user, _ = _CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)  # type: ignore[attr-defined]
            )
            if user not in (0, os.geteuid()):
                raise InvalidRequest("this Unix socket serves its own user only", expected=os.geteuid(), seen=user)
        elif self._token and not hmac.compare_digest(self._token, token.encode()):
            raise InvalidRequest("the token is wrong: name the service's token in token_file", field="token")
