"""Which user's process is at the other end of a loopback connection, as the kernel tells."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path

__all__ = ["is_own_user", "user_in_table"]

_ESTABLISHED = "01"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ROOT = 0


def is_own_user(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    """Whether the process that connected from `peer` to `own`, both on the loopback, is our user's or root's.

    That user may end this process, read its files and use its Unix socket: it gains nothing here. False also where the
    kernel does not tell.
    """
    for table in _TABLES:
        try:
            with table.open() as lines:
                user = user_in_table(lines, peer, own)
        except OSError:
            continue
        if user is not None:
            return user in (_ROOT, os.geteuid())
    return False


def user_in_table(lines: Iterable[str], peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """The user of the peer's end in a table of the kernel's; `None`: it is not there.

    Only an established connection with a file behind it counts: what somebody has closed is shown as root's.
    """
    local, remote = _spellings(*peer), _spellings(*own)
    for line in lines:
        fields = line.split(maxsplit=10)
        if len(fields) > 9 and fields[1] in local and fields[2] in remote:
            return int(fields[7]) if fields[3] == _ESTABLISHED and fields[9] != "0" else None
    return None


def _spellings(host: str, port: int) -> set[str]:
    """How the tables write an address: 32-bit words of the machine's order, an IPv4 one also as mapped to IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    forms = [address.packed]
    if isinstance(address, ipaddress.IPv4Address):
        forms.append(bytes(10) + b"\xff\xff" + address.packed)
    return {"".join(f"{word:08X}" for word in struct.unpack(f"={len(f) // 4}I", f)) + f":{port:04X}" for f in forms}
