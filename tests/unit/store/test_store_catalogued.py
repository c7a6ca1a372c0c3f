"""A tier that tells the catalog what it sees: what others do meanwhile is not taken back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from store_harness import slow_tier, soon

from kvstore.catalog.base import Addition, Removal
from kvstore.catalog.entry import Level
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.recorder import CataloguedTier, Recorder
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.prompts import ATTENTION, Prompt


@pytest.mark.parametrize("how", ["read", "put aside"])
async def test_a_record_that_comes_while_it_is_missed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read finds nothing, or puts a bad record aside; before the catalog is told so, another service stores a good
    one and tells of it. The catalog has it afterwards, with its bytes, and the read has it too.
    """
    prompt = Prompt(ATTENTION, "a", 64)
    record, cold, catalog = prompt.record(64), slow_tier("s3"), DictCatalog(CatalogBooks())
    recorder = Recorder(catalog, Instruments())
    recorder.register(prompt.namespace, prompt.layout, "")
    tier = CataloguedTier(cold, Level.COLD, recorder)
    if how == "put aside":
        await tier.put(prompt.record(64, seed=1), deadline=soon())
    remove = catalog.remove

    async def late(removals: Sequence[Removal], *, deadline: Deadline) -> None:
        await cold.inner.put(record, deadline=soon())
        added = Addition(record.key, Level.COLD, record.num_bytes, record.header.span.stop)
        await catalog.add([added], deadline=soon())
        await remove(removals, deadline=deadline)

    monkeypatch.setattr(catalog, "remove", late)
    if how == "read":
        assert await tier.get(record.key, deadline=soon()) is not None
    else:
        assert await tier.quarantine(record.key, "found bad", deadline=soon())
    entry = await catalog.get(prompt.namespace, record.key.prefix, deadline=soon())
    assert entry is not None
    assert entry.keys(Level.COLD) == [record.key]
    assert entry.num_bytes(Level.COLD) == record.num_bytes
    await recorder.aclose()
