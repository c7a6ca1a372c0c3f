"""Hooks that neither save nor load: called directly, as an engine calls them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.scheduler.cache_events import NamedPage, PageEvent
from connector.vllm.observability import ObservabilityHooks, split_tokens
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.media import MEDIA
from kvstore.runtime.meters import Meters
from kvstore.store.cache_events.encoding import encode_batch, stored
from tests.unit.connector.support import BLOCK
from tests.unit.connector.vllm_events import events_of, two_feeds


def test_every_rank_is_counted() -> None:
    """vLLM counts one report of each rank by itself; another number would lose loads or wait for ever."""
    assert ObservabilityHooks().get_finished_count() is None


def test_an_uncached_engine_shows_nothing() -> None:
    """Without a side there are neither statistics nor events."""
    surface = ObservabilityHooks()
    assert surface.get_kv_connector_stats() is None
    assert surface.take_events() == []
    assert surface.guarded_errors == 0


def test_a_hit_that_is_not_ours() -> None:
    """vLLM may ask where it came from, since 0.32."""
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="this vLLM does not ask")
    surface, request = ObservabilityHooks(), SimpleNamespace(request_id="r")
    assert surface.get_external_cache_hit_sources(request, 0) == {}
    external = {sources.CacheHitSource.EXTERNAL_UNSPECIFIED: 128}
    assert surface.get_external_cache_hit_sources(request, 128) == external
    assert surface.guarded_errors == 0


def test_a_worker_tells_what_it_counted_and_what_was_guarded() -> None:
    """An error that was kept from the engine is in the statistics, once."""
    surface = ObservabilityHooks()
    surface.worker_side = SimpleNamespace(meters=Meters())  # type: ignore[assignment]
    assert surface.get_kv_connector_stats() is None
    surface.guarded_errors += 1
    surface.worker_side.meters.add("connector_load_errors")  # type: ignore[union-attr]
    told = surface.get_kv_connector_stats()
    assert told is not None
    assert told.data == {"counters": {"connector_load_errors": 1, "connector_guarded_errors": 1}}
    assert surface.get_kv_connector_stats() is None


EVENT = PageEvent(
    medium=MEDIA["redis"],
    group=0,
    hashes=(b"one", b"two"),
    parent=b"none",
    tokens=tuple(range(2 * BLOCK)),
    block_tokens=BLOCK,
    lora_name="adapter",
    lora_id=7,
)


def as_told(*hashes: bytes) -> list[Any]:
    """Hashes as vLLM's own events have them, numbers or bytes."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in hashes]


def test_a_page_is_an_event_for_each_group_of_vllm() -> None:
    """With everything that vLLM's own events say of the same blocks, in its words for media."""
    first, second = events_of(EVENT)
    assert (first.group_idx, second.group_idx) == (0, 2)
    assert (first.kv_cache_spec_kind, second.kv_cache_spec_kind) == ("sliding_window", "full_attention")
    assert (first.kv_cache_spec_sliding_window, second.kv_cache_spec_sliding_window) == (64, None)
    for event in (first, second):
        assert (event.block_hashes, event.parent_block_hash) == (as_told(b"one", b"two"), *as_told(b"none"))
        assert (event.token_ids, event.block_size) == (list(range(2 * BLOCK)), BLOCK)
        assert (event.medium, event.locality) == ("STORAGE", "REMOTE")
        assert (event.lora_name, event.lora_id) == ("adapter", 7)


@pytest.mark.parametrize(
    ("tier", "medium", "locality"),
    [
        ("memory", "CPU", "LOCAL"),
        ("filesystem", "STORAGE", "LOCAL"),
        ("redis", "STORAGE", "REMOTE"),
        ("s3", "STORAGE", "REMOTE"),
    ],
)
def test_a_removed_page_names_its_blocks(tier: str, medium: str, locality: str) -> None:
    """Hashes and groups are what a router needs to forget it."""
    from vllm.distributed.kv_events import BlockRemoved

    events = events_of(PageEvent(0, EVENT.hashes, MEDIA[tier], removed=True))
    assert [type(event) for event in events] == [BlockRemoved] * 2
    assert [event.group_idx for event in events] == [0, 2]
    assert all((event.medium, event.locality) == (medium, locality) for event in events)
    assert all(event.block_hashes == as_told(b"one", b"two") for event in events)


def test_media_have_vllms_names() -> None:
    """vLLM's own constants, as far as a release has them."""
    from vllm.distributed import kv_events

    known = {getattr(kv_events, name) for name in dir(kv_events) if name.startswith("MEDIUM_")}
    assert {medium.name for medium in MEDIA.values()} <= known | {"STORAGE"}  # releases before 0.31 lack the last


TIERS = ("memory", "filesystem", "redis", "s3", "a tier of tomorrow")


@pytest.mark.parametrize(
    ("records", "shares"),
    [
        ({"memory": 4}, {"host": 2432}),
        ({"filesystem": 1}, {"disk": 2432}),
        ({"redis": 3, "s3": 1}, {"external_unspecified": 2432}),
        ({"memory": 1, "redis": 3}, {"host": 608, "external_unspecified": 1824}),
        ({}, {"external_unspecified": 2432}),
    ],
)
def test_tiers_have_vllms_names(records: dict[str, int], shares: dict[str, int]) -> None:
    """Memory is the host, the directory its disk, Redis and S3 are elsewhere; several share the hit by records."""
    assert split_tokens(records, 2432) == shares


@given(st.dictionaries(st.sampled_from(TIERS), st.integers(0, 1000)), st.integers(0, 1_000_000))
def test_shares_add_up(records: dict[str, int], tokens: int) -> None:
    """For any tiers: no token is lost, none comes twice, and no share is zero."""
    shares = split_tokens(records, tokens)
    assert sum(shares.values()) == tokens
    assert all(share > 0 for share in shares.values())


def test_vllm_knows_every_name() -> None:
    """Where it asks for them: since 0.32."""
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="this vLLM does not ask")
    assert all(sources.CacheHitSource(place) for tier in TIERS for place in split_tokens({tier: 1}, 128))


@pytest.mark.parametrize("tells_tokens", [False, True])
@pytest.mark.parametrize("numbers", ["0", "1"])
def test_a_page_is_named_as_its_events_name_it(
    monkeypatch: pytest.MonkeyPatch, numbers: str, tells_tokens: bool
) -> None:
    """The service's event of a page that an engine named is vLLM's event of it, but for the adapter's number. vLLM
    publishes hashes as numbers or as bytes."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    from connector.vllm.observability import page_blocks

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", numbers)
    event = replace(EVENT, parent=bytes(range(32)), hashes=(bytes(range(1, 33)), bytes(range(2, 34))))
    shape, config = two_feeds()
    page = NamedPage(NamespaceId(bytes(16)), Boundary(2 * BLOCK, PrefixHash(bytes(32))), event)
    blocks = page_blocks(page, shape, config, "org/model", tells_tokens=tells_tokens)
    assert (blocks.model, blocks.boundary.tokens) == ("org/model", 2 * BLOCK)
    encoded = encode_batch(1.0, [stored(blocks, range(2), group, MEDIA["redis"]) for group in blocks.groups])
    decoded = msgspec.msgpack.decode(encoded, type=KVEventBatch).events
    expected = events_of(event)
    for told in expected:
        told.lora_id = None
        told.token_ids = told.token_ids if tells_tokens else []
    assert decoded == expected


def test_a_page_is_named_as_vllm_converts_its_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a release makes its numbers from other bytes of a hash than the last ones."""
    from connector.vllm.observability import page_blocks

    name = "connector.vllm.observability.maybe_convert_block_hash"
    monkeypatch.setattr(name, lambda block_hash: int.from_bytes(block_hash[:8], "big"))
    event = replace(EVENT, parent=bytes(range(32)), hashes=(bytes(range(1, 33)), bytes(range(2, 34))))
    page = NamedPage(NamespaceId(bytes(16)), Boundary(2 * BLOCK, PrefixHash(bytes(32))), event)
    blocks = page_blocks(page, *two_feeds(), "org/model", tells_tokens=False)
    assert blocks.all_hashes() == [bytes(range(1, 9)), bytes(range(2, 10))]
    assert blocks.parent == bytes(range(8))


def test_only_an_engine_that_may_names_pages() -> None:
    from connector.settings import ConnectorSettings
    from kvstore.errors import InvalidRequest

    assert ConnectorSettings().name_blocks == "off"
    with pytest.raises(InvalidRequest, match="name_blocks"):
        ConnectorSettings.parse({"name_blocks": "all"}, {})
