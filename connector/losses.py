"""Reports to the store what was computed and not saved, so that `kvstore explain` can say why a later prompt missed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvstore.api import Outcome, PageStore
from kvstore.errors import Closed
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.meters import Meters

if TYPE_CHECKING:  # both sides report losses; it stands below them
    from connector.scheduler.bridge import Bridge

__all__ = ["Losses", "Lost"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_MIB = 1 << 20

_TOLD_MAX = 100
"""Losses told one by one in a second, of this process; those beyond are summed up by group and reason."""

_WINDOW_S = 1.0

_REPEAT_S = 60.0
"""What can never be saved is told again after this: the service may have been started anew, and a service cannot know
otherwise that an engine with these settings still runs."""


class Lost(StrEnum):
    """Why a record was computed and not saved: words of docs/explain.md."""

    BUSY = "save_busy"
    """The processors were busy."""
    NO_ROOM = "save_no_room"
    """Host memory had no room while the engine held it."""
    TOO_LARGE = "save_too_large"
    """It is larger than half of `pinned_bytes`. Needs `pinned_bytes` and `needs_bytes` as details, the latter being the
    smallest `pinned_bytes` that would do."""
    STOPPED = "save_stopped"
    """The engine stopped first."""
    FAILED = "save_failed"
    """The service did not take it."""
    NOT_HASHED = "save_not_hashed"
    """It was computed before its prompt was hashed."""
    UNANSWERED = "save_unanswered"
    """Ranks did not answer."""


class Losses:
    """Reports on the store's thread. Nothing waits for it or fails by it; safe from any thread.

    Args:
        bridge: To the store.
        meters: Where to count `connector_saves_lost{reason}`; `None`: not here, since another side counts these.
        clock: Time.
    """

    def __init__(self, bridge: Bridge, meters: Meters | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._bridge = bridge
        self._meters = meters
        self._clock = clock
        self._lock = threading.Lock()
        self._window_ends_s = 0.0
        self._num_told = 0
        self._sums: dict[tuple[NamespaceId, int, Lost], Outcome] = {}
        self._always: dict[tuple[int, Lost], Outcome] = {}
        self._repeating: Future[None] | None = None

    def tell(
        self,
        *,
        request_id: str,
        namespace: NamespaceId,
        boundary: Boundary,
        group: int,
        reason: Lost,
        detail: Mapping[str, object] | None = None,
        records: int = 1,
    ) -> None:
        """Report records that are lost for good: some or all slices of one page, tail or state.

        Args:
            request_id: vLLM's id of the request that computed it.
            namespace: Where it would have been saved.
            boundary: Where it ends: its name would have been made of this prefix.
            group: Its group.
            reason: Why.
            detail: The evidence, plain values.
            records: How many: one for each slice.
        """
        if self._meters is not None:
            self._meters.add("connector_saves_lost", records, reason=reason.value)
        outcome = _loss(namespace, group, reason, {**(detail or {}), "records": records})
        outcome = replace(outcome, request=request_id, stop=boundary)
        with self._lock:
            now_s = self._clock.monotonic_s()
            if now_s >= self._window_ends_s:
                self._window_ends_s, self._num_told = now_s + _WINDOW_S, 0
            self._num_told += 1
            is_summed = self._num_told > _TOLD_MAX
            if is_summed:
                begins = not self._sums
                before = self._sums.get((namespace, group, reason))
                self._sums[namespace, group, reason] = _added(before, outcome)
        if not is_summed:
            self._submit(lambda store: _tell(store, outcome))
        elif begins:
            self._submit(self._tell_sums_later)

    def tell_always(
        self, *, namespace: NamespaceId, group: int, reason: Lost, detail: Mapping[str, object] | None = None
    ) -> None:
        """Report that no record of a group can ever be saved with these settings, again and again until `close`.

        Args:
            namespace: The namespace that is open; an earlier one's report of this group ends.
            group: The group.
            reason: Why.
            detail: The evidence, plain values.
        """
        outcome = _loss(namespace, group, reason, detail or {})
        with self._lock:
            before = self._always.get((group, reason))
            self._always[group, reason] = outcome
            if self._repeating is None:
                with suppress(Closed):
                    self._repeating = self._bridge.submit(self._repeat)
        if before is None:
            _log.warning("kvstore: records of group %d are never saved: %s", group, _told(reason, outcome.detail))
        self._submit(lambda store: _tell(store, outcome))

    def close(self) -> None:
        """Send what is summed up, and stop repeating. Idempotent."""
        self._submit(self._tell_sums)
        with self._lock:
            repeating, self._repeating = self._repeating, None
            self._always.clear()
        if repeating is not None:
            repeating.cancel()

    async def _tell_sums_later(self, store: PageStore) -> None:
        await asyncio.sleep(_WINDOW_S)
        await self._tell_sums(store)

    async def _tell_sums(self, store: PageStore) -> None:
        with self._lock:
            sums, self._sums = self._sums, {}
        for outcome in sums.values():
            store.report(outcome)

    async def _repeat(self, store: PageStore) -> None:
        while True:
            await asyncio.sleep(_REPEAT_S)
            with self._lock:
                always = list(self._always.values())
            for outcome in always:
                store.report(outcome)

    def _submit(self, work: Callable[[PageStore], Coroutine[Any, Any, None]]) -> None:
        with suppress(Closed):  # at the very end
            self._bridge.submit(work)


async def _tell(store: PageStore, outcome: Outcome) -> None:
    store.report(outcome)


def _loss(namespace: NamespaceId, group: int, reason: Lost, detail: Mapping[str, object]) -> Outcome:
    return Outcome("", namespace, 0, 0, 0, 0, reason.value, detail, groups=1 << group)


def _added(before: Outcome | None, loss: Outcome) -> Outcome:
    """A loss that stands for those before it too."""
    if before is None:
        return loss
    return replace(loss, detail={**loss.detail, "records": before.num_lost + loss.num_lost})


def _told(reason: Lost, detail: Mapping[str, object]) -> str:
    """A reason for the log, with the setting that would mend it where there is one."""
    needs_bytes, pinned_bytes = detail.get("needs_bytes"), detail.get("pinned_bytes")
    if reason is Lost.TOO_LARGE and isinstance(needs_bytes, int) and isinstance(pinned_bytes, int):
        least = f"{-(-needs_bytes // _MIB)}MiB"
        return (
            f"one is larger than half of pinned_bytes, which is {pinned_bytes:,} bytes: "
            f'set "pinned_bytes":"{least}" or more in kv_connector_extra_config'
        )
    return reason.value
