"""Sizes in bytes, and numbers with their nouns, as people write them: one grammar for the service and the connector."""

from __future__ import annotations

import re

BYTES_MAX = 1 << 60
"""No memory, disk or bucket is larger."""
_DIGITS_MAX = 40

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(value: object) -> int:
    """Parse a size in bytes: a whole number, or text like `8GiB`, `500 MB`, `1.5TiB`.

    Raises:
        ValueError: It is neither, or more than 1 EiB.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _checked(value)
    number = rf"\s*(\d{{1,{_DIGITS_MAX}}}(?:\.\d{{1,{_DIGITS_MAX}}})?)\s*([A-Za-z]*)\s*"
    match = re.fullmatch(number, value) if isinstance(value, str) else None
    unit = next((size for name, size in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None or ("." in match[1] and unit == 1):
        raise ValueError("expected bytes, like 8GiB, 500MB or 1048576")
    return _checked(int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit)


def _checked(num_bytes: int) -> int:
    if num_bytes > BYTES_MAX:
        raise ValueError(f"expected at most {BYTES_MAX} bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """`512MiB`, `1.5GiB`, `96B`: the largest unit that leaves a number of at least one; `parse_bytes` reads it."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            text = f"{num_bytes / (1 << power):.1f}"
            return f"{text.removesuffix('.0')}{unit}"
    return f"{num_bytes}B"


def counted(number: float, one: str, many: str = "") -> str:
    """A number with its noun, like `1 record` or `1,024 boundaries`; `many` if the plural is not `one` and an s."""
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"
