"""Steps of a service's last hours, and what a look at it finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import Outcome
from kvstore.runtime.clock import SYSTEM_CLOCK
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.events import EventKind, Events
from kvstore.service.authentication import watch_credentials
from kvstore.service.history import History, Sample, window_of
from kvstore.service.watcher import Watcher
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.tiers.base import TierUsage
from kvstore.tiers.memory import MemoryTier


@pytest.fixture
async def store() -> AsyncIterator[TieredStore]:
    memory = MemoryTier(32 << 20)
    opened = TieredStore(memory)
    yield opened
    await opened.aclose()
    await memory.aclose()


def test_a_window_sums_up_steps() -> None:
    """Samples of one step are added up, the last bytes count, what is outside is left out, gaps are known as such."""
    samples = [
        Sample(60_000, {"lookups": 9}, {"redis": 1}),
        Sample(60_001, {"lookups": 2}, {"redis": 5}),
        Sample(120_000, {"lookups": 3}, {"redis": 7}, frozenset({"s3"})),
        Sample(240_000, {"lookups": 1, "lookup_hits": 1}),
        Sample(240_001, {"lookups": 50}),
    ]
    window = window_of(samples, now_ms=239_999, num_steps=3, step_s=60)
    assert window.at_s == [120, 180, 240]
    assert window.of("lookups") == [5, 0, 1] and window.of("lookup_hits") == [0, 0, 1]
    assert window.of("never") == [0, 0, 0] and window.sum_of("lookups", "lookup_hits") == [5, 0, 2]
    assert window.tier_bytes == {"redis": [7, None, None]} and window.away == {"s3": [1, 0, 0]}


def test_the_history_is_bounded() -> None:
    """The oldest step goes."""
    history = History(samples_max=3)
    for number in range(5):
        history.add(Sample(number))
    assert [sample.at_ms for sample in history.samples()] == [2, 3, 4]


async def test_a_look_keeps_what_has_grown(store: TieredStore) -> None:
    """Lookups, outcomes and bytes of the step; a step in which nothing happened is empty but for the bytes."""
    history = History()
    watcher = Watcher(store, history, Events(), clock=SYSTEM_CLOCK)
    prompt = Prompt(ATTENTION, "a", 128)
    await store.open_namespace(prompt.description, deadline=Deadline.after(60))
    await store.lookup(prompt.query(), deadline=Deadline.after(60))
    store.report(Outcome("one", prompt.namespace, 128, 128, 16, 64, "nothing_stored"))
    store.report(Outcome("two", prompt.namespace, 128, 128, 0, 0, "a word of a newer engine"))
    await watcher.step()
    await watcher.step()
    first, second = history.samples()
    assert first.counts == {
        "lookups": 1,
        'requests{reason="nothing_stored",result="part"}': 1,
        'requests{reason="other",result="miss"}': 1,
        'request_tokens{part="prompt"}': 256,
        'request_tokens{part="local"}': 16,
        'request_tokens{part="resumed"}': 48,
    }
    assert (second.counts, second.tier_bytes, second.away) == ({}, {"memory": 0}, frozenset())


async def test_sums_become_events(store: TieredStore) -> None:
    """Evictions, saves that were turned away, records that are not copied and changes that the catalog misses: one
    event for each step, with the counts of that step.
    """
    events = Events()
    store.meters.add("retention_boundaries", 5, tier="s3", reason="evicted")
    watcher = Watcher(store, History(), events)
    store.meters.add("retention_boundaries", 2, tier="s3", reason="evicted")
    store.meters.add("retention_boundaries", 1, tier="s3", reason="expired")
    store.meters.add("retention_bytes", 4096, tier="s3", reason="evicted")
    store.meters.add("saves", 3, outcome="busy")
    store.meters.add("saves", 8, outcome="stored")
    store.meters.add("saves_lost", 9, reason="save_busy")
    store.meters.add("write_back_dropped", 1, tier="redis", reason="full")
    store.meters.add("catalog_changes_lost", 6)
    store.meters.set("catalog_complete", 1)
    await watcher.step()
    store.meters.set("catalog_complete", 0)
    await watcher.step()
    told = [(event.kind, event.text, dict(event.detail)) for event in events.after(0)]
    assert [kind for kind, _, _ in told] == [
        *(EventKind.EVICTED, EventKind.SAVES_DROPPED, EventKind.SAVES_DROPPED, EventKind.SAVES_DROPPED),
        *(EventKind.CATALOG, EventKind.CATALOG),
    ]
    assert told[0][1].startswith("evicted 3 boundaries from s3")
    assert told[0][2] == {"tier": "s3", "num_bytes": 4096, "evicted": 2, "expired": 1}
    assert told[1][2] == {"records": 3} and told[3][2] == {"tier": "redis", "full": 1}
    assert told[3][1] == "1 saved record was not copied to redis"
    assert told[2][1].startswith("9 records of engines are missing: it was computed, but not saved: the engine's proc")
    assert "6 changes" in told[4][1] and "a service adds them" in told[5][1]


class Silent(MemoryTier):
    """Does not report what it holds, as S3 does not."""

    async def usage(self, *, deadline: Deadline) -> TierUsage:
        return replace(await super().usage(deadline=deadline), used_bytes=None)


async def test_what_a_tier_does_not_tell_the_catalog_knows() -> None:
    """For a tier that would have to be scanned, the history has what was read from the catalog, or nothing; it is the
    last known size of the tier too, in an outage and before."""
    memory, cold = MemoryTier(32 << 20), Silent(32 << 20, name="s3")
    store, history = TieredStore(memory, None, cold), History()
    watcher = Watcher(store, history, Events())
    await watcher.step()
    assert history.unmeasured == {"s3"}
    store.operations.note_held("s3", 4096)
    await watcher.step()
    (state,) = [one for one in await store.operations.tiers(deadline=Deadline.after(60)) if one.name == "s3"]
    assert state.last_usage is not None and state.last_usage.used_bytes == 4096 and state.last_at_ms > 0
    assert [sample.tier_bytes for sample in history.samples()] == [{"memory": 0}, {"memory": 0, "s3": 4096}]
    for closed in (watcher, store, cold, memory):
        await closed.aclose()


async def test_credentials_that_change_are_told(store: TieredStore, tmp_path: Path) -> None:
    """A token is added: an event. The file becomes invalid: another event, and the previous credentials stay."""
    path, events = tmp_path / "credentials.toml", Events()
    path.write_text(f'[[credential]]\ntenant = "red"\ntoken_sha256 = "{"0" * 64}"\n')
    path.chmod(0o600)
    credentials = watch_credentials(path)
    watcher = Watcher(store, History(), events, credentials=credentials)
    path.write_text(path.read_text() + f'[[credential]]\ntenant = "blue"\ntoken_sha256 = "{"1" * 64}"\n')
    for text in ("", "wrong"):
        path.write_text(path.read_text() + text)
        for _ in range(2):
            credentials.poll()
        await watcher.step()
    assert [(event.kind, event.detail.get("tokens")) for event in events.after(0)] == [
        (EventKind.SETTINGS, 2),
        (EventKind.SETTINGS, None),
    ]
