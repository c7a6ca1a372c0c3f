"""The servers' counters as of the last comparison of entries with records, as a text for all services. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.catalog.coordination import FOREIGN_TEXT

_DIGITS_MAX = 20
"""A counter of Redis has at most 19 digits."""


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """How many keys one Redis server has removed by itself.

    Attributes:
        run_id: Changes when the server is restarted or replaced.
        num_removed: Keys that it evicted or that expired, since its start.
    """

    run_id: str
    num_removed: int


def counters_of(server: dict[str, str], stats: dict[str, str]) -> ServerCounters:
    """From `INFO server` and `INFO stats`."""
    texts = [stats.get(name, "").strip() for name in ("evicted_keys", "expired_keys")]
    num_removed = sum(int(text) for text in texts if text.isascii() and text.isdecimal() and len(text) < _DIGITS_MAX)
    return ServerCounters(server.get("run_id", ""), num_removed)


def format_counters(counters: list[ServerCounters]) -> str:
    """The counters as a text."""
    return json.dumps([[one.run_id, one.num_removed] for one in counters])


def parse_counters(text: str) -> list[ServerCounters] | None:
    """The inverse of `format_counters`; `None`: not such a text."""
    try:
        return [ServerCounters(str(run_id), int(num_removed)) for run_id, num_removed in json.loads(text)]
    except FOREIGN_TEXT:
        return None


def run_ids(counters: Iterable[ServerCounters]) -> set[str]:
    """Other ones after a server was restarted or replaced: then entries may be lost."""
    return {one.run_id for one in counters}
