"""Where a hit's tokens came from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.vllm.observability import split_tokens

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
    """Whatever the tiers, no token is lost, none comes twice, and no share is zero."""
    shares = split_tokens(records, tokens)
    assert sum(shares.values()) == tokens
    assert all(share > 0 for share in shares.values())


def test_vllm_knows_every_name() -> None:
    """Where it asks for them: since 0.32."""
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="this vLLM does not ask")
    assert all(sources.CacheHitSource(place) for tier in TIERS for place in split_tokens({tier: 1}, 128))
