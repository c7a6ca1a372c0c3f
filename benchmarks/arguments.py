"""Flags that benchmarks share: lists of names, sizes and counts, refused with what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from kvstore.runtime.sizes import parse_bytes

__all__ = ["count", "counts", "names_of", "sizes"]

SIZE_BYTES_MIN = 1024


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads some of `known`, separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}: choose from {', '.join(known)}")
        return names

    return read


def sizes(text: str) -> tuple[int, ...]:
    """Bytes of records, like 1MiB,4MiB."""
    read = tuple(parse_bytes(part) for part in text.split(","))
    if min(read) < SIZE_BYTES_MIN:
        raise argparse.ArgumentTypeError(f"sizes are {SIZE_BYTES_MIN} bytes or more")
    return read


def counts(text: str) -> tuple[int, ...]:
    """Counts, like 1,4."""
    return tuple(count(part) for part in text.split(","))


def count(text: str) -> int:
    """One count."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("counts are one or more")
    return number
