"""Tells whoever started the process that it is ready: systemd's notification, for units with `Type=notify`."""

from __future__ import annotations

import logging
import os
import socket

__all__ = ["notify_ready"]

_log = logging.getLogger(__name__)
_SEND_S = 1.0


def notify_ready(status: str) -> None:
    """Send `READY=1` and a line for `systemctl status` to where `$NOTIFY_SOCKET` says; without it there is nobody to
    tell. That nobody receives it is a warning: systemd will say so itself, by its own timeout.
    """
    place = os.getenv("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return
    address = "\0" + place[1:] if place[0] == "@" else place  # an abstract one
    message = f"READY=1\nSTATUS={status.splitlines()[0] if status else ''}\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_SEND_S)
            sock.sendto(message.encode(), address)
    except OSError as error:
        _log.warning("systemd could not be told that the service is ready error=%s", error)
