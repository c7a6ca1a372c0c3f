"""Dynamo's own index of cache events, run from its published package: which blocks it credits to whom.

`python tools/other_packages.py dynamo` unpacks the package to `.work/dynamo`; KVSTORE_TEST_DYNAMO names another folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerProcess, serves
from kvstore.testing.waiting import eventually
from tests.architecture.sources import ROOT

MODEL = "org/model"
_PATIENCE_S = 60.0


def find_dynamo() -> Path | None:
    """The folder that has the package `dynamo`; `None`: it is not at hand."""
    places = [Path(os.environ.get("KVSTORE_TEST_DYNAMO", "/nowhere")), ROOT / ".work" / "dynamo"]
    return next((place for place in places if (place / "dynamo" / "indexer" / "__main__.py").exists()), None)


class DynamoIndexer:
    """`python -m dynamo.indexer` in a process of its own; a context manager.

    Args:
        folder: For its log.
        block_tokens: The engines' blocks.
    """

    def __init__(self, folder: Path, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        env = {**os.environ, "PYTHONPATH": str(find_dynamo()), "DYN_LOG": "info"}
        self._process = ServerProcess(command, folder / "indexer.log", env)

    def __enter__(self) -> Self:
        self._process.start()
        self._process.wait_ready(lambda: serves(f"{self._url}/health"), _PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def register(self, worker: int, endpoint: str, replay_endpoint: str = "", rank: int = 0) -> None:
        """Have it subscribe to a publisher, in the name of a worker."""
        body = {"instance_id": worker, "endpoint": endpoint, "model_name": MODEL, "dp_rank": rank}
        more = {"replay_endpoint": replay_endpoint} if replay_endpoint else {}
        self._call("/register", {**body, **more, "block_size": self._block_tokens})

    def unregister(self, worker: int) -> None:
        self._call("/unregister", {"instance_id": worker, "model_name": MODEL})

    def credit(self, worker: int, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Tokens of a prompt that a worker is credited for: on the GPU, there and in host memory, on disk too."""
        found = self._call("/query", {"model_name": MODEL, "token_ids": list(tokens)})["instances"].get(str(worker))
        return (found["gpu"], found["cpu"], found["disk"]) if found else (0, 0, 0)

    def await_credit(self, worker: int, tokens: Sequence[int], expected: tuple[int, int, int]) -> None:
        """Wait until a worker is credited for this."""

        def found() -> str:
            return f"{self.credit(worker, tokens)} instead of {expected}\n{self._process.log_tail()}"

        eventually(lambda: self.credit(worker, tokens) == expected, _PATIENCE_S, why=found)

    def await_subscription(self, worker: int, tokens: Sequence[int], publish: Callable[[], None]) -> None:
        """Publish again and again until a worker is credited for something: a subscription takes its time."""
        ends_s = time.monotonic() + _PATIENCE_S
        while self.credit(worker, tokens) == (0, 0, 0):
            assert time.monotonic() < ends_s, self._process.log_tail()
            publish()
            time.sleep(0.2)

    def _call(self, path: str, body: Mapping[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error
