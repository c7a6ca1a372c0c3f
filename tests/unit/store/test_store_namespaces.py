"""What a store keeps of a namespace ends when it is closed: a service runs for months, and weights change."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from store_harness import LIMITS, MIB, slow_tier

from kvstore.catalog.coordination import OPERATOR_RULES, FileTextStore
from kvstore.model.namespace import NamespaceNotOpen
from kvstore.model.prompt_hint import EndedPrompt
from kvstore.runtime.instruments import Instruments
from kvstore.store.encryption.encrypted import EncryptedStore
from kvstore.store.encryption.key_ring import watch_keys
from kvstore.store.explain.explainer import Explainer
from kvstore.store.recorder import Recorder
from kvstore.store.retention import RetentionParts
from kvstore.store.retention.operator_rules import OperatorRules
from kvstore.store.tiered import TieredStore
from kvstore.testing.dict_catalog import CatalogBooks, DictCatalog
from kvstore.testing.dict_pending import DictPendingLog, PendingBooks
from kvstore.testing.faults import FaultyTier
from kvstore.testing.keys import write_keys
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier

pytestmark = pytest.mark.virtual_time

OPEN_MAX = 3
UNUSED_S = 700.0
"""Longer than a namespace must be unused to be closed for another one."""


UNSEARCHED = (type, ModuleType, FunctionType, asyncio.AbstractEventLoop, Explainer, DictCatalog, FaultyTier)
"""The explainer keeps the last 1,024 names of namespaces, for reports; the catalog and the tiers what is stored."""


def reachable(root: object, texts: Collection[bytes]) -> set[bytes]:
    """Those of `texts` that objects have which can be reached from `root`."""
    seen, found, todo = set[int](), set[bytes](), [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, UNSEARCHED):
            continue
        seen.add(id(one))
        if isinstance(one, bytes) and one in texts:
            found.add(one)
        todo += gc.get_referents(one)
    return found


async def test_nothing_is_kept_of_closed_namespaces(tmp_path: Path) -> None:
    """Ten versions of the weights are opened one after the other, with every part of a store that learns of one. Of
    those that were closed only the catalog knows, as the medium behind it does.
    """
    instruments = Instruments()
    catalog = DictCatalog(CatalogBooks())
    recorder = Recorder(catalog, instruments)
    rules = OperatorRules(FileTextStore(tmp_path, OPERATOR_RULES), {}, instruments)
    inner = TieredStore(
        MemoryTier(16 * MIB),
        slow_tier("redis"),
        slow_tier("s3"),
        pending=DictPendingLog(PendingBooks(), lease_s=30.0),
        recorder=recorder,
        retention=RetentionParts(operator_rules=rules),
        limits=replace(LIMITS, namespaces_max=OPEN_MAX),
        instruments=instruments,
    )
    store = EncryptedStore(inner, watch_keys(str(write_keys(tmp_path / "keys.toml", [("*", 1, 1)]))))
    opened = []
    for number in range(10):
        opened.append(Prompt(ATTENTION, f"weights {number}", 64, model=f"model {number}", weights_id=f"w{number}"))
        await store.open_namespace(opened[-1].description, deadline=soon())
        await asyncio.sleep(UNUSED_S)
    ids = [prompt.description.id for prompt in opened]
    assert reachable(store, ids) == set(ids[-OPEN_MAX:])
    assert all(catalog.knows(namespace) for namespace in ids)
    closed = opened[0]
    query = closed.query()
    with pytest.raises(NamespaceNotOpen):
        await store.lookup(query, deadline=soon())
    store.end_prompt(EndedPrompt("late", query.namespace, query.boundaries, 16, 64))  # ends no connection
    await rules.retire(None, closed.weights_id, is_retired=True, deadline=soon())
    await store.open_namespace(closed.description, deadline=soon())
    assert (await store.stage(query, deadline=soon())).cut == "weights_retired"
    await store.aclose()
    await recorder.aclose()
