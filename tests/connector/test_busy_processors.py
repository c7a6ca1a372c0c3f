"""Saves on processors that other processes keep busy: they end all the same, also when the engine stops."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvstore.client import BlockingStore, ClientOptions
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from tests.connector.support.stores import PATIENT, EmbeddedStore, wait_for_engine

pytestmark = pytest.mark.engine

Start = Callable[[EngineSpec], EngineProcess]

PROMPTS = [seeded_prompt(800 + seed, 1300) for seed in range(20)]
RESTORED = 1280
GRACE_S = 5.0
"""What was answered longer than this before the engine's end is saved."""


@contextmanager
def busy_processors(count: int) -> Iterator[None]:
    """Processes that compute all the time, for the length of the block; they end by themselves should we not."""
    with ExitStack() as stack:
        for _ in range(count):
            endless = "import time; end = time.time() + 600\nwhile time.time() < end: pass"
            process = subprocess.Popen([sys.executable, "-c", endless])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@pytest.mark.parametrize(
    "multiprocess", [pytest.param(False, id="one process", marks=pytest.mark.full), pytest.param(True, id="several")]
)
def test_what_was_answered_is_saved(multiprocess: bool, llama: Path, work: Path, tmp_path: Path, engine: Start) -> None:
    """Two processes compute on two processors while an engine answers 20 prompts and ends: a fresh engine restores in
    full whatever was answered more than five seconds before that end, and what is lost after it is named."""
    store = EmbeddedStore(tmp_path)
    spec = EngineSpec(
        checkpoint=llama,
        connector={**store.connector, **PATIENT},
        environment=store.environment,
        multiprocess=multiprocess,
    )
    saving = engine(spec)
    wait_for_engine(store.url)
    answered_s = []
    # a client keeps the private service, and what it is told, beyond the engine's end
    with BlockingStore(store.url, options=ClientOptions(num_data_connections=1)), busy_processors(2):
        for number, prompt in enumerate(PROMPTS):
            if number == len(PROMPTS) // 2:
                time.sleep(GRACE_S)  # for the first half; the second one is answered right before the end
            saving.generate([Request(prompt, max_tokens=2)])
            answered_s.append(time.monotonic())
        ends_s = time.monotonic()
        saving.stop()
        losses = store.service.status()["recent"]["losses"]
    store.forget()
    restoring = engine(spec)
    wait_for_engine(store.url)
    restored = [restoring.generate([Request(prompt, max_tokens=2)])[0].num_cached_tokens for prompt in PROMPTS]
    in_time = [ends_s - at_s > GRACE_S for at_s in answered_s]
    print(f"restored {restored.count(RESTORED)} of 20, {in_time.count(True)} of them in time; losses told: {losses}")
    assert in_time.count(True) >= len(PROMPTS) // 2
    assert [tokens for tokens, was in zip(restored, in_time, strict=True) if was] == [RESTORED] * in_time.count(True)
    if restored.count(RESTORED) < len(PROMPTS):
        assert losses.get("save_stopped", 0) > 0
        assert "the engine stopped before" in saving.log_text()
