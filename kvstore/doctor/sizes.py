"""Formats sizes so that the settings can read them back."""

from __future__ import annotations

__all__ = ["size"]


def size(num_bytes: int) -> str:
    """`512MiB`, `1.5GiB`, `96B`: the largest unit that leaves a number of at least one."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            text = f"{num_bytes / (1 << power):.1f}"
            return f"{text.removesuffix('.0')}{unit}"
    return f"{num_bytes}B"
