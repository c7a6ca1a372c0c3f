"""Judges how far another machine's clock is from ours. Pure."""

from __future__ import annotations

from kvstore.doctor.finding import Finding, failed, ok, warning

__all__ = ["judge_clock"]

_FIX = "set the clocks by NTP on both machines: timedatectl set-ntp true (or start chronyd)"
_USUAL_S = 2.0
_REFUSED_S = 900.0
"""S3 refuses signatures that are older. Also, ages of records and leases are compared between machines."""


def judge_clock(name: str, whose: str, offset_s: float, error_s: float) -> Finding:
    """Judge a measured offset.

    Args:
        name: Name of the finding.
        whose: The other machine, in words.
        offset_s: How far its clock is ahead of ours.
        error_s: The uncertainty of `offset_s`.
    """
    apart_s = max(0.0, abs(offset_s) - error_s)
    seen = f"the clock of {whose} is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} ours"
    expected = f"at most {_USUAL_S:g} s apart"
    if apart_s <= _USUAL_S:
        return ok(name, f"the clock of {whose} agrees with ours", expected)
    return (failed if apart_s >= _REFUSED_S / 3 else warning)(name, seen, expected, _FIX)
