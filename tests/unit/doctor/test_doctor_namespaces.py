"""Which namespaces `kvstore doctor` takes for one that engines should share."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client import describe_pages
from kvstore.doctor.check import Finding, Verdict
from kvstore.doctor.namespaces import judge_namespaces
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout, field_differences

OK, WARNING, SKIPPED = Verdict.OK, Verdict.WARNING, Verdict.SKIPPED


def check(finding: Finding, verdict: Verdict, seen: str = "", fix: str = "") -> None:
    """A finding is as it should be, and names a fix if it complains."""
    assert finding.verdict is verdict, finding
    assert seen in finding.seen and fix in finding.fix, finding
    assert bool(finding.fix) == (verdict is WARNING), finding


def described(tenant: str = "", *, num_slices: int = 1, **fields: object) -> NamespaceDescription:
    layout = describe_layout(Layout(64, (GroupLayout(FullAttention(), num_slices),)), ({"layers": ["a", "b"]},))
    usual = {"architecture": "Llama", "weights_id": "a" * 64, "cache_dtype": "auto", "layout": layout}
    return NamespaceDescription.from_fields({**usual, **fields}, tenant)


def test_namespaces_that_should_be_one() -> None:
    """The same weights in another setting, with the causes first and what to have in common; a name for weights."""
    check(judge_namespaces([]), SKIPPED, "no engine")
    check(judge_namespaces([described()]), OK, "one namespace")
    check(judge_namespaces([described(), described(weights_id="b" * 64)]), OK, "2 namespaces")
    check(judge_namespaces([described(), described("team-b")]), OK)  # tenants share nothing, on purpose
    other = described(cache_dtype="fp8", num_slices=8)
    finding = judge_namespaces([described(), other])
    check(finding, WARNING, 'cache_dtype: "auto" / "fp8", layout.groups[0].num_slices: 1 / 8', "--kv-cache-dtype")
    assert other.id.hex()[:8] in finding.seen
    check(judge_namespaces([described(), described(weights_id="llama")]), WARNING, "weights_id", "for both engines")
    check(judge_namespaces([described(weights_id="one"), described(weights_id="two")]), OK)


def sglang(pool: str = "kv", stage: int = 0, release: str = "0.5.23", page_tokens: int = 64, **more: object) -> Any:
    fields = {"model": f"Llama sglang {pool}", "weights_id": "a" * 64, "engine": f"sglang {release}"}
    parts = {"pool": {"name": pool, "layout": "page_first", **more}, "pipeline": [stage, 2]}
    settings = {"engine_settings": {"page_size": str(page_tokens)}}
    return describe_pages({**fields, **parts, **settings}, page_tokens=page_tokens)


def test_parts_of_an_engine_and_other_doors_share_nothing() -> None:
    """Pools and stages of SGLang, groups of vLLM's offloading, and one model behind two doors are no mistake."""
    one = sglang()
    check(judge_namespaces([one, sglang("mamba")]), OK, "no two of which could be one")
    check(judge_namespaces([one, sglang(stage=1)]), OK, "no two of which could be one")
    groups = [describe_pages({"engine": "vllm 0.32.0 offloading", "group": at}, page_tokens=64) for at in range(2)]
    check(judge_namespaces(groups), OK, "no two of which could be one")
    check(judge_namespaces([one, described()]), OK, "no two of which could be one")
    check(judge_namespaces([one, sglang(release="0.5.24")]), WARNING, "engine: ", "settings of the engine")
    check(judge_namespaces([one, sglang(layout="layer_first")]), WARNING, "pool.layout", "--hicache-mem-layout")
    check(judge_namespaces([one, sglang(page_tokens=32)]), WARNING, "page_size", "settings of SGLang")


def test_many_namespaces_are_compared_field_by_field_only_where_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred are twenty thousand pairs: other checks, in other threads, must not be late for them."""
    compared: list[object] = []
    monkeypatch.setattr(
        "kvstore.doctor.namespaces.field_differences",
        lambda *pair: compared.append(pair) or field_differences(*pair),  # type: ignore[func-returns-value]
    )
    finding = judge_namespaces([described(cache_dtype=str(number)) for number in range(20)])
    check(finding, WARNING, "and 187 more pairs", "--kv-cache-dtype")
    assert len(compared) == 3


def test_fields_that_differ() -> None:
    """By path, whatever their depth; a field that is missing on one side differs; equal descriptions do not."""
    assert field_differences(described().fields, described().fields) == {}
    one = {"a": {"b": [1, 2]}, "c": [{"d": 1}], "e": 1}
    other = {"a": {"b": [1, 3]}, "c": [{"d": 1}, {"d": 2}]}
    assert field_differences(one, other) == {"a.b": ([1, 2], [1, 3]), "c[1].d": (None, 2), "e": (1, None)}
