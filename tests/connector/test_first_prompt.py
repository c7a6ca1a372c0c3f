"""The first prompt after an engine's start, on busy processors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.client import BlockingStore
from kvstore.runtime.deadline import Deadline
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from kvstore.testing.waiting import eventually
from kvstore.wire.private_place import private_socket_path

pytestmark = pytest.mark.engine

PROMPT = seeded_prompt(601, 2500)
RESTORED = 2432
BUSY = 6
PATIENCE_S = 60.0


@contextmanager
def busy_processors() -> Iterator[None]:
    """Processes that compute for the length of the block."""
    with ExitStack() as stack:
        for _ in range(BUSY):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def end_service(directory: Path) -> None:
    """End the private service of a directory, as its idleness would, once what it was given is on disk."""
    path = private_socket_path(directory)
    with BlockingStore(f"unix:{path}") as store:

        def status() -> Any:
            return store.status(deadline=Deadline.after(10.0))

        eventually(lambda: not any(queue["records"] for queue in status()["write_back"].values()), PATIENCE_S)
        pid = status()["service"]["pid"]
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not path.exists(), PATIENCE_S, why="the private service does not end")


def reason(directory: Path) -> tuple[object, object]:
    """Why the latest request was resumed no further and, where it waited for something, for what."""
    with BlockingStore(f"unix:{private_socket_path(directory)}") as store:
        listed = store.explain("", deadline=Deadline.after(30.0))
        (latest, *_) = cast(Sequence[Mapping[str, Any]], listed["requests"])
        told = store.explain(latest["request"], deadline=Deadline.after(30.0))
        return told["reason"], cast(Mapping[str, Any], told["detail"]).get("because")


@pytest.mark.parametrize("num_engines", [2, pytest.param(5, marks=pytest.mark.full)])
def test_the_first_prompt_is_a_hit(
    num_engines: int, engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path
) -> None:
    """Each engine starts a private service for itself, which takes longer than a lookup may, and is asked at once."""
    spec = EngineSpec(
        checkpoint=llama,
        connector={"url": "embedded:", "load_always": True},
        multiprocess=True,
        environment={"XDG_CACHE_HOME": str(tmp_path)},
    )
    saving = engine(spec)
    (expected,) = saving.generate([Request(PROMPT)])
    saving.stop()
    end_service(tmp_path / "kvstore")
    with busy_processors():
        cached = []
        for _ in range(num_engines):
            fresh = engine(spec)
            (answer,) = fresh.generate([Request(PROMPT)])
            cached.append((answer.num_cached_tokens, *reason(tmp_path / "kvstore")))
            assert answer.tokens == expected.tokens
            fresh.stop()
            end_service(tmp_path / "kvstore")
        assert cached == [(RESTORED, "", None)] * num_engines
