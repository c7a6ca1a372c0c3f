"""What routers make of our events: the rules that llm-d and Dynamo publish, applied to the bytes that vLLM would send.

The rules are written here from the routers' sources; docs/routers.md names the commits. Nothing of theirs is run here:
`tests/integration/test_dynamo.py` runs Dynamo's index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from connector.scheduler.cache_events import PageEvent
from kvstore.model.media import MEDIA, parse_media
from tests.architecture.sources import ROOT
from tests.unit.connector.support import BLOCK
from tests.unit.connector.vllm_events import events_of

PAGE = Path(ROOT / "docs" / "routers.md")
LLMD_NAMES = "redis=SHARED_STORAGE,s3=OBJECT_STORE"


def on_the_wire(tier: str, names: str) -> dict[str, Any]:
    """The event for two blocks in a tier: encoded as vLLM's publisher does, decoded by another library."""
    from vllm.distributed.kv_events import KVEventBatch

    event = PageEvent(
        group=0,
        hashes=(b"one", b"two"),
        medium=parse_media(names)[tier],
        tokens=tuple(range(2 * BLOCK)),
        block_tokens=BLOCK,
    )
    _, full_attention = events_of(event)
    batch = KVEventBatch(ts=1.0, events=[full_attention], data_parallel_rank=0)
    encoded = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(encoded, type=KVEventBatch) == batch
    _, (told,), rank = msgpack.unpackb(encoded)
    assert rank == 0
    assert (told["type"], told["kv_cache_spec_kind"], told["block_size"]) == ("BlockStored", "full_attention", BLOCK)
    return dict(told)


def llmd(weights: Mapping[str, float], unknown: float) -> Callable[[dict[str, Any]], float]:
    """llm-d: the medium in lower case has a weight; locality and owner are not read. Full attention only."""

    def credit(event: dict[str, Any]) -> float:
        assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
        return weights.get(event["medium"].lower(), unknown)

    return credit


def dynamo(event: dict[str, Any]) -> float:
    """Dynamo: drops what is not local, what another system owns, and media without a tier; else the tier's weight."""
    if event.get("ownership") is not None or event.get("locality") not in (None, "LOCAL"):
        return 0.0
    tiers = {
        **dict.fromkeys(("GPU", "DEVICE"), 1.0),
        **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), 0.75),
        **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), 0.25),
        **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), 0.25),
    }
    return tiers.get(event["medium"], 0.0)


LLMD_0_9 = llmd({"gpu": 1.0, "cpu": 0.8}, unknown=1.0)
LLMD_NOW = llmd({"gpu": 1.0, "cpu": 0.8, "shared_storage": 0.4, "object_store": 0.2}, unknown=0.0)
COLUMNS: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("llm-d 0.9", "", LLMD_0_9),
    ("llm-d since #2809", "", LLMD_NOW),
    ("the same, with `event_media`", LLMD_NAMES, LLMD_NOW),
    ("Dynamo", "", dynamo),
)


def score(tier: str, names: str, rule: Callable[[dict[str, Any]], float]) -> float:
    return rule(on_the_wire(tier, names))


def table() -> str:
    """Credit for a block that is in one tier, of 1 for a block in the GPU's memory."""
    lines = [
        "| the page is in | " + " | ".join(title for title, _, _ in COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    words = {"memory": "this node's memory", "filesystem": "a directory", "redis": "Redis", "s3": "S3"}
    for tier in MEDIA:
        cells = (f"{score(tier, names, rule):g}" for _, names, rule in COLUMNS)
        lines.append(f"| {words[tier]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_every_router_credits_memory() -> None:
    """By default, with less than for a page on the GPU and more than for nothing."""
    for _, names, rule in COLUMNS:
        assert 0 < score("memory", names, rule) < 1


def test_llmd_weighs_shared_tiers_by_their_names() -> None:
    """With the operator's table Redis counts less than memory, and S3 less than Redis; without it, nothing."""
    with_names = [score(tier, LLMD_NAMES, LLMD_NOW) for tier in ("memory", "redis", "s3")]
    assert with_names == [0.8, 0.4, 0.2]
    assert [score(tier, "", LLMD_NOW) for tier in ("redis", "s3")] == [0, 0]


def test_dynamo_takes_no_page_of_a_pool_for_a_workers_own() -> None:
    """A pool is as near to one worker as to another, whatever it is called."""
    assert [score(tier, "", dynamo) for tier in MEDIA] == [0.75, 0.25, 0, 0]
    assert score("redis", "redis=SHARED", dynamo) == 0


def test_the_table_of_the_page() -> None:
    """docs/routers.md shows what these rules give."""
    assert table() in PAGE.read_text(), table()


@pytest.mark.parametrize(
    "text",
    ["redis", "redis=", "redis=a b", "disk=X", "redis=X,redis=Y", "redis=X,", "redis=" + "x" * 33, "s3=-X", "=X"],
)
def test_a_table_that_says_nothing_is_refused(text: str) -> None:
    from connector.settings import ConnectorSettings
    from kvstore.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match="event_media"):
        ConnectorSettings.parse({"event_media": text}, {})


def test_names_change_and_localities_do_not() -> None:
    assert parse_media("") == MEDIA
    named = parse_media(" s3 = OBJECT_STORE ,memory=HOST")
    assert (named["s3"].name, named["memory"].name, named["redis"]) == ("OBJECT_STORE", "HOST", MEDIA["redis"])
    assert all(named[tier].locality == MEDIA[tier].locality for tier in MEDIA)
