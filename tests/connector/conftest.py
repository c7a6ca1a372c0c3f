"""Real vLLM engines on a small seeded llama; each engine is a process of its own, as in production."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import Answer, EngineProcess, EngineSpec, seeded_prompt, start_engine
from kvstore.testing.engine.forked import warm_starts
from tests.connector.support.runs import ask_each
from tests.connector.support.service import DirectoryService

LENGTHS = (2500, 1300, 2560)
"""One that ends inside a block, one inside the first page's half, one at a block."""

RESTORED = (2432, 1280, 2432)
"""Where a hit of each may end at most: a block boundary that leaves a token to compute."""


@pytest.fixture(scope="session", autouse=True)
def warm_engines() -> Iterator[None]:
    """Some 150 engines start here; what they import is imported a few times."""
    with warm_starts():
        yield


@pytest.fixture(scope="session")
def work() -> Path:
    """Folder that engines share between runs: what vLLM compiles, and the checkpoints."""
    folder = Path(os.environ.get("KVSTORE_TEST_WORK", ".work")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def llama(work: Path) -> Path:
    return write_checkpoint("llama", work / "checkpoints")


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    return [seeded_prompt(seed, length) for seed, length in enumerate(LENGTHS, 101)]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[DirectoryService]:
    """A service over a directory."""
    with DirectoryService(tmp_path) as running:
        yield running


@pytest.fixture
def engine(work: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., EngineProcess]]:
    """Start engines that end with the test."""
    with ExitStack() as stack:

        def start(spec: EngineSpec) -> EngineProcess:
            return stack.enter_context(start_engine(spec, work=work, name=request.node.name.split("[")[0]))

        yield start


@pytest.fixture(scope="session")
def references(llama: Path, prompts: list[tuple[int, ...]], work: Path) -> Callable[[str, bool], list[Answer]]:
    """By runner and form: what an engine without connector answers when it resumes from its own cache."""
    known: dict[tuple[str, bool], list[Answer]] = {}

    def reference(runner: str, multiprocess: bool) -> list[Answer]:
        form = (runner, multiprocess)
        if form not in known:
            spec = EngineSpec(checkpoint=llama, runner=runner, multiprocess=multiprocess)  # type: ignore[arg-type]
            with start_engine(spec, work=work, name=f"reference-{runner}") as plain:
                ask_each(plain, prompts)
                known[form] = ask_each(plain, prompts)
            assert [answer.num_cached_tokens for answer in known[form]] == list(RESTORED)
        return known[form]

    return reference
