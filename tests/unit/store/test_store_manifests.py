"""Manifests beside the records: there from the first opening on, and again where the hot tier lost them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from store_harness import LIMITS, MIB, slow_tier

from kvstore.format.manifest import pack_manifest
from kvstore.runtime.instruments import Instruments
from kvstore.store.recorder import Recorder
from kvstore.store.tiered import TieredStore
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.faults import FaultyTier
from kvstore.testing.prompts import ATTENTION, HYBRID, Prompt
from kvstore.testing.waiting import soon, until
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time

OFTEN = replace(LIMITS, manifest_check_s=0.01)
PROMPT = Prompt(ATTENTION, "a", 64)
MANIFEST = pack_manifest(PROMPT.description)


def forget(tier: FaultyTier) -> None:
    assert isinstance(tier.inner, MemoryTier)
    tier.inner._manifests.clear()


def has(tier: FaultyTier, prompt: Prompt) -> bool:
    assert isinstance(tier.inner, MemoryTier)
    return prompt.description.id in tier.inner._manifests


async def test_a_hot_tier_that_lost_its_manifests_gets_them_again() -> None:
    """Redis is flushed under a running service: what is open there stands beside the records again."""
    hot = slow_tier("redis")
    store = TieredStore(MemoryTier(16 * MIB), hot, slow_tier("s3"), limits=OFTEN)
    await store.open_namespace(PROMPT.description, deadline=soon())
    await until(lambda: has(hot, PROMPT))
    forget(hot)
    await until(lambda: has(hot, PROMPT))
    assert await hot.get_manifest(PROMPT.description.id, deadline=soon()) == MANIFEST
    await store.aclose()


async def test_a_namespace_that_is_opened_often_is_described_once() -> None:
    """While a tier hangs, each opening would leave a write that waits for it."""
    cold = slow_tier("s3")
    cold.frozen = True
    store = TieredStore(MemoryTier(16 * MIB), None, cold, limits=OFTEN)
    await store.open_namespace(PROMPT.description, deadline=soon())
    num_tasks = len(asyncio.all_tasks())
    for _ in range(100):
        await store.open_namespace(PROMPT.description, deadline=soon())
    assert len(asyncio.all_tasks()) == num_tasks
    cold.frozen = False
    await until(lambda: has(cold, PROMPT))
    await store.aclose()


async def test_what_nobody_has_open_comes_from_the_cold_tier() -> None:
    """A service that has opened nothing, and a catalog that tells of two namespaces: the one that the cold tier
    describes is written to the hot one; of the other there is no manifest, which stops nothing."""
    hot, cold = slow_tier("redis"), slow_tier("s3")
    catalog = DictCatalog(CatalogBooks())
    await catalog.register(Prompt(HYBRID, "b", 64, model="other").description.id, HYBRID, "", deadline=soon())
    await catalog.register(PROMPT.description.id, ATTENTION, "", deadline=soon())
    await cold.put_manifest(PROMPT.description.id, MANIFEST, deadline=soon())
    recorder = Recorder(catalog, Instruments())
    store = TieredStore(MemoryTier(16 * MIB), hot, cold, recorder=recorder, limits=OFTEN)
    await until(lambda: has(hot, PROMPT))
    assert store.meters.get("manifest_failures", tier="redis") == 0
    await store.aclose()
    await recorder.aclose()


async def test_a_damaged_manifest_hides_no_good_one() -> None:
    """What the hot tier has cannot be read, and the cold tier has it whole: that one counts, for a namespace that is
    not open here. Where no tier has it whole, it is there all the same: nothing of the namespace is an orphan.
    """
    hot, cold = slow_tier("redis"), slow_tier("s3")
    store = TieredStore(MemoryTier(16 * MIB), hot, cold)
    namespace, damaged = PROMPT.description.id, MANIFEST[:-1]
    await hot.put_manifest(namespace, damaged, deadline=soon())
    assert await store.operations.manifest(namespace, deadline=soon()) == damaged
    await cold.put_manifest(namespace, MANIFEST, deadline=soon())
    assert await store.operations.manifest(namespace, deadline=soon()) == MANIFEST
    await store.aclose()


async def test_a_manifest_that_could_not_be_written_is_written_later(caplog: pytest.LogCaptureFixture) -> None:
    """Both tiers are away when the namespace is opened, and counted; once they are back they get the manifest. The log
    has a line for each.
    """
    hot, cold = slow_tier("redis"), slow_tier("s3")
    hot.down = cold.down = True
    store = TieredStore(MemoryTier(16 * MIB), hot, cold, limits=OFTEN)
    await store.open_namespace(PROMPT.description, deadline=soon())
    await until(lambda: all(store.meters.get("manifest_failures", tier=name) > 1 for name in ("redis", "s3")))
    hot.down = cold.down = False
    await until(lambda: has(hot, PROMPT) and has(cold, PROMPT))
    await store.aclose()
    for name in ("redis", "s3"):
        assert caplog.text.count(f"descriptions of namespaces cannot be written to {name}") == 1
