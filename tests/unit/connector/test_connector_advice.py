"""Advice for an operator: each costly setting once, with its field and what to set; none without such a setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connector.facts import EngineFacts, StateFacts
from connector.settings import ConnectorSettings
from connector.vllm.advice import advise_at_start, advise_on_block_size
from kvstore.model.kinds import Recurrent
from tests.unit.connector.support import make_facts

STATE = StateFacts(shapes=((4, 4),), dtypes=("float32",), part_bytes=(64,), replicated=True)


def facts(*, hybrid: bool = False, **changes: Any) -> EngineFacts:
    plain = make_facts(**changes)
    if not hybrid:
        return plain
    state = replace(plain.groups[0], kind=Recurrent(), content=STATE, stages=(("layer.2",),), feeds=(0,))
    return replace(plain, groups=(*plain.groups, state))


@pytest.mark.parametrize(
    ("engine", "settings", "fields"),
    [
        (facts(), {}, []),
        (facts(retention_tokens=0), {}, []),
        (facts(hybrid=True, retention_tokens=640), {}, []),
        (facts(hybrid=True, retention_tokens=None), {}, []),
        (facts(load_failure_policy="fail"), {}, ["kv_load_failure_policy"]),
        (facts(hybrid=True, retention_tokens=0), {}, ["prefix_cache_retention_interval"]),
        (facts(), {"weights_may_change": True, "weights_id_file": "/id"}, []),
        (facts(), {"weights_may_change": True}, ["weights_id_file"]),
        (facts(), {"weights_id_file": "/id"}, ["weights_may_change"]),
        (
            facts(hybrid=True, retention_tokens=0, load_failure_policy="fail"),
            {"weights_may_change": True},
            ["kv_load_failure_policy", "prefix_cache_retention_interval", "weights_id_file"],
        ),
    ],
)
def test_advice_at_start(engine: EngineFacts, settings: dict[str, Any], fields: list[str]) -> None:
    """One piece of advice per setting, which names the setting and a way out."""
    advice = advise_at_start(engine, ConnectorSettings(**settings))
    assert [field for field, text in zip(fields, advice, strict=True) if field not in text] == []
    assert all("set " in text or "name a file" in text for text in advice)


def test_advice_on_media() -> None:
    """Why requests with media are not cached although they may be."""
    pruned = facts(media_rules={"video_pruning_rate": "0.5"})
    assert advise_at_start(pruned, ConnectorSettings()) == ()  # what is not trusted is told with the first request
    (refusal,) = advise_at_start(pruned, ConnectorSettings(trust_mm_uuids=True))
    assert "video_pruning_rate" in refusal


def test_advice_on_code_beside_the_worker() -> None:
    """It may change the weights: the engine is cached until it is called."""
    (advice,) = advise_at_start(facts(worker_extension="trainer.Extension"), ConnectorSettings())
    assert "trainer.Extension" in advice and "set weights_may_change" in advice
    settings = ConnectorSettings(weights_may_change=True, weights_id_file="/id")
    assert advise_at_start(facts(worker_extension="trainer.Extension"), settings) == ()


@pytest.mark.parametrize(
    ("engine", "told", "expected"),
    [
        (facts(), 16, False),
        (facts(), 128, False),  # vLLM cuts chunks at this size for recurrent groups only
        (facts(hybrid=True), 16, False),
        (facts(hybrid=True), 128, True),
    ],
)
def test_forgotten_block_sizes(engine: EngineFacts, told: int, *, expected: bool) -> None:
    """A hybrid engine whose scheduler uses another block size than its cache: the advice names the size to set."""
    advice = advise_on_block_size(engine, told)
    assert (advice is not None) is expected
    assert advice is None or "--block-size 16" in advice
