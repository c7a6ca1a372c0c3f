"""What a fresh engine restores is, bit for bit, what an engine without connector resumes from its own cache.

For every kind of model, form of engine, store, model runner and way of scheduling: see `support/matrix.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.testing.engine import Answer
from tests.connector.support.matrix import EVERY, PAIRWISE, Combination
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
    """All combinations; those beyond the pairwise cover only in the full run."""
    found: list[object] = []
    for combination in EVERY:
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
        expect_equal(combination, restored, local, computed)
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
        assert differences == [0.0] * len(pairs)
        return
    # here even vLLM's own runs differ by where a prompt is split; where that changes no token, a hit must not either
    for mine, split, whole in zip(restored, reference, computed, strict=True):
        assert mine.tokens == split.tokens or split.tokens != whole.tokens
