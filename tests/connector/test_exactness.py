"""What a fresh engine restores is, bit for bit, what an engine without connector resumes from its own cache.

For every kind of model, form of engine, store, model runner and way of scheduling: see `support/matrix.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.codec import PLANES2, TILES
from kvstore.format.record import read_record
from kvstore.testing.engine import Answer, EngineSpec
from tests.connector.support.matrix import EVERY, MODELS, PAIRWISE, Combination
from tests.connector.support.references import References
from tests.connector.support.releases import IS_SUITES_OWN
from tests.connector.support.runs import (
    PROMPTS,
    RESTORED,
    ask_each,
    forget_own_cache,
    reference_spec,
    saving_spec,
    spec_of,
    start_together,
)
from tests.connector.support.stores import EmbeddedStore, SharedStore, TestedStore, shared_store, wait_for_engine

pytestmark = pytest.mark.engine


def parameters() -> list[object]:
    """All combinations; those beyond the pairwise cover only in the full run. The longest come first, so that no worker
    begins one when the others have ended."""
    found: list[object] = []
    for combination in sorted(EVERY, key=lambda one: (one.ngram, one.model in ("qwen3next", "deepseek")), reverse=True):
        marks = [pytest.mark.servers] if combination.store == "shared" else []
        if combination not in PAIRWISE:
            marks.append(pytest.mark.full)
        found.append(pytest.param(combination, id=str(combination), marks=marks))
    return found


@pytest.fixture
def store(combination: Combination, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestedStore]:
    with ExitStack() as stack:
        if combination.store == "embedded":
            yield EmbeddedStore(tmp_path)
        else:
            servers = (request.getfixturevalue(name) for name in ("shared_redis", "shared_rgw"))
            yield stack.enter_context(shared_store(tmp_path, *servers))


@pytest.mark.parametrize("combination", parameters())
def test_restored_runs_equal_local_hits(combination: Combination, store: TestedStore, work: Path) -> None:
    """An engine saves three prompts, a fresh one resumes them: tokens and top-20 logprobs equal a local hit's exactly.

    From a service whose memory was lost in between; from Redis, and once more from S3, where these stand behind it.
    """
    spec = spec_of(combination, work, store)
    references = References(work)
    local = references.find(combination)
    specs = {f"{combination}-saving": saving_spec(combination, work, store)}
    if local is None:
        specs[f"{combination}-reference"] = reference_spec(combination, work)
    with start_together(specs, work=work) as (saving, *reference):
        if local is None:
            local = references.learn(combination, reference[0])
            reference[0].kill()
        wait_for_engine(store.url)
        computed = ask_each(saving, PROMPTS)
        saving.stop()
    assert [answer.num_cached_tokens for answer in computed] == [0, 0, 0]
    store.forget()
    with start_together({f"{combination}-restoring": spec}, work=work) as (restoring,):
        wait_for_engine(store.url)
        restored = ask_each(restoring, PROMPTS)
        try:
            expect_equal(combination, restored, local, computed)
        except AssertionError:
            references.forget(combination)
            raise
        assert store.num_corrupt() == 0
        if isinstance(store, SharedStore):
            assert store.num_served_from("redis") > 0
            store.forget_hot()
            wait_for_engine(store.url)
            forget_own_cache(restoring)
            expect_equal(combination, ask_each(restoring, PROMPTS), local, computed)
            assert store.num_served_from("s3") > 0
            assert store.num_corrupt() == 0
        if combination.ngram:
            assert restoring.metrics()["vllm:spec_decode_num_drafts"] > 0
        if not combination.multiprocess:
            assert "connector_failed_loads" not in restoring.connector_counters()


_ONE_MODEL = [pytest.param(model, marks=[] if model == "llama" else [pytest.mark.full]) for model in MODELS]


@pytest.mark.parametrize("model", _ONE_MODEL)
def test_engines_restore_what_others_compress(model: str, work: Path, tmp_path: Path) -> None:
    """In bfloat16 one engine saves tiles, one planes. One that prefers the other resumes them as by a local hit."""
    combination = Combination(model, False, "embedded", "v1", async_scheduling=False, ngram=False)
    stores = {"tiles": EmbeddedStore(tmp_path / "tiles"), "planes": EmbeddedStore(tmp_path / "planes")}

    def compressing(spec: EngineSpec, compression: str) -> EngineSpec:
        return replace(spec, dtype="bfloat16", connector={**(spec.connector or {}), "compression": compression})

    specs = {
        f"{model}-saving-{chain}": compressing(saving_spec(combination, work, store), chain)
        for chain, store in stores.items()
    }
    specs[f"{model}-reference"] = replace(reference_spec(combination, work), dtype="bfloat16")
    with start_together(specs, work=work) as (*saving, reference):
        ask_each(reference, PROMPTS)
        local = ask_each(reference, PROMPTS)
        for engine, store in zip(saving, stores.values(), strict=True):
            wait_for_engine(store.url)
            ask_each(engine, PROMPTS)
            engine.stop()
    for chain, store in stores.items():
        store.forget()
        records = [read_record(file.read_bytes()) for file in store.directory.rglob("*.g*.s*")]
        chains = {record.header.codec_chain for record in records}
        assert (TILES in chains, PLANES2 in chains) == (chain == "tiles", chain == "planes")
    for chain, store in (("planes", stores["tiles"]), ("tiles", stores["planes"])):
        spec = compressing(spec_of(combination, work, store), chain)
        with start_together({f"{model}-restoring-{chain}": spec}, work=work) as (restoring,):
            wait_for_engine(store.url)
            restored = ask_each(restoring, PROMPTS)
            assert store.num_corrupt() == 0
            assert "connector_failed_loads" not in restoring.connector_counters()
        assert all(answer.num_cached_tokens for answer in restored)
        if model != "deepseek":  # its reference has no hit, but splits a prompt at the same token
            hits = [answer.num_cached_tokens for answer in local]
            assert [answer.num_cached_tokens for answer in restored] == hits
        assert [mine.difference(own) for mine, own in zip(restored, local, strict=True)] == [0.0] * len(PROMPTS)


def expect_equal(
    combination: Combination, restored: list[Answer], reference: list[Answer], computed: list[Answer]
) -> None:
    """The hits are as long as they can be, and nothing shows in the output.

    Of another release of vLLM than the suite's that is: at least as long as its own, which may have none where ours is
    one. A run that resumes at another token rounds differently, so only equal hits are compared.
    """
    hits = [answer.num_cached_tokens for answer in restored]
    pairs = list(zip(restored, reference, strict=True))
    if IS_SUITES_OWN:
        assert tuple(hits) == RESTORED[combination.model]
    elif combination.model != "deepseek":
        assert all(mine.num_cached_tokens >= own.num_cached_tokens for mine, own in pairs)
        pairs = [(mine, own) for mine, own in pairs if mine.num_cached_tokens == own.num_cached_tokens]
        assert any(own.num_cached_tokens for _, own in pairs), "no hit can be compared"
    differences = [mine.difference(own) for mine, own in pairs]
    if combination.model != "deepseek" or combination.runner == "v1":
        # if the saving engine, which had computed all, is as far off, then not what was restored is wrong
        away = [whole.difference(own) for whole, own in zip(computed, reference, strict=True)]
        assert differences == [0.0] * len(pairs), f"the saving engine differs from the reference by {away}"
        return
    # here even vLLM's own runs differ by where a prompt is split; where that changes no token, a hit must not either
    for mine, split, whole in zip(restored, reference, computed, strict=True):
        assert mine.tokens == split.tokens or split.tokens != whole.tokens
