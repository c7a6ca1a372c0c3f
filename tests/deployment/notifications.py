"""A socket on which a service says that it is ready, as it does to systemd."""

from __future__ import annotations

import socket
from pathlib import Path

START_S = 60


def receiver(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(path))
    sock.settimeout(START_S)
    return sock
