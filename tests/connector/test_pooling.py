"""Engines that embed prompts: what pools the last token is resumed, what pools all of them is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvstore.testing.engine import EngineProcess, EngineSpec, seeded_prompt
from kvstore.testing.waiting import eventually
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

PROMPT = seeded_prompt(951, 1300)
CACHED = {"LAST": 1280, "MEAN": 0}
"""Tokens that a repeated prompt resumes. vLLM ends with an error where a prompt of the second kind is resumed."""


SAVED = 8
"""Records: a page and a tail, in four slices each."""


def num_saved(service: DirectoryService) -> float:
    service.settle()
    return sum(count for name, count in service.status()["counters"].items() if name.startswith("saves"))


def with_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """A copy of the checkpoint. Embedding engines do not start without a tokenizer."""
    shutil.copytree(checkpoint, folder)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize("pooling", CACHED)
def test_a_prompt_is_embedded_again(
    engine: Callable[[EngineSpec], EngineProcess], llama: Path, tmp_path: Path, pooling: str
) -> None:
    """The embedding is the same, and the engine lives."""
    with DirectoryService(tmp_path) as service:
        spec = EngineSpec(
            checkpoint=with_tokenizer(llama, tmp_path / "model"),
            connector={"url": service.url, "load_always": True, "lookup_timeout_ms": 10_000},
            max_model_len=4096,
            arguments={
                "runner": "pooling",
                "convert": "embed",
                "pooler_config": {"seq_pooling_type": pooling},
                "skip_tokenizer_init": False,
                "enable_prefix_caching": None,
            },
        )
        running = engine(spec)

        def embed() -> tuple[int, list[float]]:
            asked = f"llm.encode([{{'prompt_token_ids': {list(PROMPT)}}}], pooling_task='embed', use_tqdm=False)[0]"
            cached, values = running.evaluate(
                f"(lambda one: [one.num_cached_tokens, one.outputs.data.tolist()])({asked})"
            )
            assert running.reset_prefix_cache()
            return cached, values

        cached, first = embed()
        assert cached == 0
        if CACHED[pooling]:
            eventually(lambda: num_saved(service) == SAVED)
        else:
            assert "this model's pooling" in running.log_text()
        cached, second = embed()
        assert cached == CACHED[pooling]
        assert second == pytest.approx(first, abs=1e-5)
