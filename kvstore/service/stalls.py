"""For how long nothing has moved."""

from __future__ import annotations

__all__ = ["PROGRESS_BYTES", "Stall"]

PROGRESS_BYTES = 64 << 10
"""Less than this is no progress: a peer that moves a byte now and then would hold what it likes for ever."""


class Stall:
    """Measures for how long a count of bytes has hardly grown. Made for looks a second apart."""

    def __init__(self) -> None:
        self._from_bytes = -PROGRESS_BYTES
        self._since_s = 0.0

    def seconds(self, num_bytes: int, now_s: float) -> float:
        """Seconds since the count has grown by 64 KiB.

        Args:
            num_bytes: The count.
            now_s: On the monotonic clock.
        """
        if num_bytes - self._from_bytes >= PROGRESS_BYTES:
            self._from_bytes, self._since_s = num_bytes, now_s
        return now_s - self._since_s

    def ended(self) -> float:
        """Nothing has to move: it begins anew at the next look. Returns 0."""
        self._from_bytes = -PROGRESS_BYTES
        return 0.0
