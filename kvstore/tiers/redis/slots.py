"""Which node of a cluster holds which hash slot. Pure."""

from __future__ import annotations

from binascii import crc_hqx

from kvstore.tiers.locations import HostPort
from kvstore.tiers.redis.resp import Reply

__all__ = ["NUM_SLOTS", "SlotMap", "parse_slots", "slot_of"]

NUM_SLOTS = 16384

SlotMap = list[HostPort | None]
"""The primary of each slot; `None`: no node serves it."""


def slot_of(name: str) -> int:
    """The hash slot of a name, or of its hash tag: what is between its first brace and the next closing one."""
    start = name.find("{")
    if start >= 0 and (end := name.find("}", start + 1)) > start + 1:
        name = name[start + 1 : end]
    return crc_hqx(name.encode(), 0) % NUM_SLOTS  # CRC-16/XMODEM, as the cluster specification says


def parse_slots(reply: Reply, asked: HostPort) -> SlotMap | None:
    """Read the answer to `CLUSTER SLOTS`: items `[first, last, [host, port, ...] of the primary, replicas...]`.

    Args:
        reply: The answer.
        asked: The node that sent it, which leaves its own host empty if it does not know it.

    Returns:
        The map; `None` when the answer has another form, or names no slot at all (a node outside any cluster).
    """
    if not isinstance(reply, list):
        return None
    slots: SlotMap = [None] * NUM_SLOTS
    for item in reply:
        match item:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < NUM_SLOTS:
                name = host.decode(errors="replace") if isinstance(host, bytes) else ""
                address = HostPort(asked.host if name in ("", "?") else name, port)
                slots[first : last + 1] = [address] * (last + 1 - first)
            case _:
                return None
    return slots if any(slots) else None
