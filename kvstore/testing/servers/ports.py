"""Free loopback ports."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different. Another process may take one first: then retry the start."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def free_address() -> str:
    """The loopback address with such a port, `host:port`."""
    return f"127.0.0.1:{free_ports(1)[0]}"
