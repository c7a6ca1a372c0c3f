"""Reports to the store what was computed and not saved, so that `kvstore explain` can say why a later prompt missed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

from connector.bridge import Bridge, post
from connector.logs import LOG
from kvstore.api import Outcome, PageStore
from kvstore.errors import Closed
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters

_MIB = 1 << 20

_WINDOW_S, _WINDOW_LOSSES_MAX = 1.0, 100
"""In each second this process reports this many losses one by one. It sums up the others by group and reason."""

_REPEAT_S = 60.0
"""What can never be saved is reported again after this: a service that was restarted would not know of it otherwise."""


class LossReason(StrEnum):
    """Why a record was computed and not saved: words of docs/explain.md."""

    BUSY = "save_busy"
    """The engine's processors were busy."""
    REFUSED = "save_refused"
    """The service was over its limits for saves."""
    NO_ROOM = "save_no_room"
    """Host memory was full while the engine held the record's blocks."""
    TOO_LARGE = "save_too_large"
    """It is larger than half of `pinned_bytes`."""
    STOPPED = "save_stopped"
    """The engine stopped, or dropped its own cache, first."""
    FAILED = "save_failed"
    """The service did not take it."""
    UNANSWERED = "save_unanswered"
    """Ranks did not answer."""


class LossReporter:
    """Reports on the store's thread; may be called on any thread. Nothing waits for a report or fails with it.

    Args:
        meters: Counts `connector_saves_lost{reason}`.
    """

    def __init__(self, bridge: Bridge, meters: Meters, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._bridge = bridge
        self._meters = meters
        self._clock = clock
        self._lock = threading.Lock()
        self._window_ends_s = 0.0
        self._num_reported = 0
        self._sums: dict[tuple[NamespaceId, int, LossReason], Outcome] = {}
        self._too_large: dict[int, Outcome] = {}  # by group
        self._repeating: Future[None] | None = None

    def report(
        self,
        *,
        request_id: str,
        namespace: NamespaceId,
        boundary: Boundary,
        group: int,
        reason: LossReason,
        detail: Mapping[str, object] | None = None,
        records: int = 1,
    ) -> None:
        """Report records that are lost for good: some or all slices of one page, tail or state.

        Args:
            request_id: vLLM's id of the request that computed it.
            namespace: Where it would have been saved.
            boundary: Where it ends; its name would have included this prefix.
            detail: The evidence, plain values.
            records: How many: one for each slice.
        """
        self._meters.add("connector_saves_lost", records, reason=reason.value)
        outcome = _loss(namespace, group, reason, {**(detail or {}), "records": records})
        outcome = replace(outcome, request=request_id, stop=boundary)
        with self._lock:
            now_s = self._clock.monotonic_s()
            if now_s >= self._window_ends_s:
                self._window_ends_s, self._num_reported = now_s + _WINDOW_S, 0
            self._num_reported += 1
            is_summed = self._num_reported > _WINDOW_LOSSES_MAX
            if is_summed:
                is_first_sum = not self._sums
                before = self._sums.get((namespace, group, reason))
                num_before = before.num_lost if before is not None else 0
                detail = {**outcome.detail, "records": num_before + outcome.num_lost}
                self._sums[namespace, group, reason] = replace(outcome, detail=detail)
        if not is_summed:
            post(self._bridge, lambda store: _send(store, outcome))
        elif is_first_sum:
            post(self._bridge, self._send_sums_later)

    def report_too_large(self, *, namespace: NamespaceId, group: int, pinned_bytes: int, needs_bytes: int) -> None:
        """Report that no record of a group can ever be saved with these settings, every minute until `close`.

        Args:
            namespace: The open namespace. It replaces an earlier one's report of this group.
            pinned_bytes: The setting.
            needs_bytes: The smallest sufficient value of it.
        """
        detail = {"pinned_bytes": pinned_bytes, "needs_bytes": needs_bytes}
        outcome = _loss(namespace, group, LossReason.TOO_LARGE, detail)
        with self._lock:
            is_first = group not in self._too_large
            self._too_large[group] = outcome
            if self._repeating is None:
                with suppress(Closed):
                    self._repeating = self._bridge.submit(self._repeat)
        if is_first:
            LOG.warning(
                "kvstore: records of group %d are never saved: one is larger than half of pinned_bytes, which is"
                ' %s bytes: set "pinned_bytes":"%dMiB" or more in kv_connector_extra_config',
                group,
                f"{pinned_bytes:,}",
                -(-needs_bytes // _MIB),
            )
        post(self._bridge, lambda store: _send(store, outcome))

    def close(self) -> None:
        """Send the sums, and stop repeating. Idempotent."""
        post(self._bridge, self._send_sums)
        with self._lock:
            repeating, self._repeating = self._repeating, None
            self._too_large.clear()
        if repeating is not None:
            repeating.cancel()

    async def _send_sums_later(self, store: PageStore) -> None:
        await asyncio.sleep(_WINDOW_S)
        await self._send_sums(store)

    async def _send_sums(self, store: PageStore) -> None:
        with self._lock:
            sums, self._sums = self._sums, {}
        for outcome in sums.values():
            store.report(outcome)

    async def _repeat(self, store: PageStore) -> None:
        while True:
            await asyncio.sleep(_REPEAT_S)
            with self._lock:
                outcomes = list(self._too_large.values())
            for outcome in outcomes:
                store.report(outcome)


async def _send(store: PageStore, outcome: Outcome) -> None:
    store.report(outcome)


def _loss(namespace: NamespaceId, group: int, reason: LossReason, detail: Mapping[str, object]) -> Outcome:
    return Outcome("", namespace, 0, 0, 0, 0, reason.value, detail, groups=1 << group)
