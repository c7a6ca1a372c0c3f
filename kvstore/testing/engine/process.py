"""The test's side of an engine's process: start it, send requests, and end it in any case."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from kvstore.testing.engine.forked import start_warm
from kvstore.testing.engine.spec import Answer, EngineSpec, Request, TrafficReport, TrafficRequest, engine_environment
from kvstore.testing.forking import ForkedProcess

_READY_S = 180.0
"""A start takes 8 to 25 s on a quiet machine."""
_ANSWER_S = 60.0
_END_S = 20.0


class EngineFailed(RuntimeError):
    """The engine did not start, ended by itself, refused a request or took too long; the message ends with its log."""


class EngineProcess:
    """A running engine. Not for several threads at once; `send` and `receive` split `generate` in two.

    Attributes:
        log: File with everything that the engine wrote, behind what earlier engines of this name did.
    """

    def __init__(self, spec: EngineSpec, log: Path, work: Path) -> None:
        self.spec = spec
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "kvstore.testing.engine.main", str(write_end), str(os.getpid())]
        self._child: subprocess.Popen[bytes] | ForkedProcess
        try:
            with log.open("ab") as output:
                # A session of its own: Ctrl-C reaches us, and we end it with all that it started.
                environment = engine_environment(spec, work)
                self._child = start_warm(_as_json(spec), environment, output.fileno(), write_end) or subprocess.Popen(
                    [*command, json.dumps(_as_json(spec))],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=[write_end],
                    start_new_session=True,
                )
        except BaseException as error:
            os.close(read_end)
            if isinstance(error, OSError):
                raise EngineFailed(f"the engine cannot be started: {error}\n{self._log_tail()}") from error
            raise
        finally:
            os.close(write_end)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_lines, args=(os.fdopen(read_end), self._lines), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """`None` while it runs; negative: the signal that ended it."""
        return self._child.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine takes requests.

        Raises:
            EngineFailed: It ended, or time is up.
        """
        self._next("ready", timeout_s)

    def generate(self, requests: Sequence[Request], *, timeout_s: float = 240.0) -> list[Answer]:
        """Answer requests; all of them run at once.

        Raises:
            EngineFailed: It ended, could not answer, or time is up.
        """
        self.send(requests)
        return self.receive(timeout_s=timeout_s)

    def send(self, requests: Sequence[Request]) -> None:
        """Submit requests and return; `receive` must be called before any other request."""
        self._ask("generate", requests=[asdict(request) for request in requests])

    def receive(self, *, timeout_s: float = 240.0) -> list[Answer]:
        """Wait for what was sent."""
        return [Answer.from_json(value) for value in self._next("value", timeout_s)["value"]]

    def traffic(
        self,
        requests: Sequence[TrafficRequest],
        *,
        in_flight: int,
        resets: Sequence[int] = (),
        stop_after_aborts: bool = False,
        timeout_s: float = 600.0,
    ) -> TrafficReport:
        """Keep `in_flight` requests in an in-process engine until all are answered or aborted, then let it idle.

        Args:
            requests: In the order of their arrival.
            in_flight: Requests that are submitted and not answered, at any time.
            resets: Steps before which the engine is asked to drop its own cache.
            stop_after_aborts: Return as soon as all aborts are done; requests are left in the engine.
            timeout_s: For all of it.
        """
        report = self._call(
            "traffic",
            timeout_s,
            requests=[asdict(request) for request in requests],
            in_flight=in_flight,
            resets=list(resets),
            stop_after_aborts=stop_after_aborts,
        )
        return TrafficReport.from_json(report)

    def census(self) -> dict[str, Any]:
        """What an in-process engine holds now: blocks, requests, threads, descriptors."""
        return dict(self._call("census"))

    def metrics(self) -> dict[str, float]:
        """The engine's counters and gauges by name, as it would show them to Prometheus."""
        return dict(self._call("metrics"))

    def connector_counters(self) -> dict[str, float]:
        """Counters of our connector's two sides together; empty unless the engine is in-process with our connector."""
        return dict(self._call("connector_counters"))

    def reset_prefix_cache(self) -> bool:
        """Forget what the engine itself has cached; the connector's store is not touched."""
        return bool(self._call("reset_prefix_cache"))

    def evaluate(self, expression: str) -> Any:
        """Evaluate a Python expression in the engine's process, where `llm` is defined."""
        return self._call("evaluate", expression=expression)

    def log_text(self) -> str:
        """What this engine wrote."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def stop(self) -> None:
        """Let the engine shut down as it does in production, then make sure that nothing of it is left. Idempotent."""
        with contextlib.suppress(OSError, ValueError):
            assert self._child.stdin is not None
            self._child.stdin.close()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the engine and everything that it started, and wait. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        with contextlib.suppress(OSError):  # what was not written yet
            assert self._child.stdin is not None
            self._child.stdin.close()

    def _call(self, name: str, timeout_s: float = _ANSWER_S, **arguments: Any) -> Any:
        self._ask(name, **arguments)
        return self._next("value", timeout_s)["value"]

    def _ask(self, name: str, **arguments: Any) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            self._child.stdin.flush()
        except (OSError, ValueError) as error:
            raise EngineFailed(f"the engine is gone (exit {self._child.poll()})\n{self._log_tail()}") from error

    def _next(self, expected: str, timeout_s: float) -> dict[str, Any]:
        give_up_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                if self._child.poll() is not None:
                    raise EngineFailed(f"the engine ended (exit {self._child.poll()})\n{self._log_tail()}") from None
                if time.monotonic() > give_up_s:
                    raise EngineFailed(
                        f"the engine did not say {expected} in {timeout_s} s\n{self._log_tail()}"
                    ) from None
                continue
            if line is None:
                raise EngineFailed(f"the engine ended (exit {self._child.wait()})\n{self._log_tail()}")
            message: dict[str, Any] = json.loads(line)
            if message["event"] != expected:
                raise EngineFailed(f"expected {expected}, the engine said {line[:6000]}\n{self._log_tail()}")
            return message

    def _log_tail(self) -> str:
        return f"{self.log}:\n{self.log_text()[-6000:]}"


def _read_lines(pipe: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)


def _as_json(spec: EngineSpec) -> dict[str, Any]:
    return {**asdict(spec), "checkpoint": str(spec.checkpoint)}


@contextlib.contextmanager
def start_engine(spec: EngineSpec, *, work: Path, name: str = "engine") -> Iterator[EngineProcess]:
    """Run an engine for the length of the block. Start it from the main thread: its life is tied to that thread.

    Args:
        spec: The engine.
        work: Folder for logs and for what vLLM compiles; keep it between runs.
        name: For the log's name.

    Raises:
        EngineFailed: It did not start.
    """
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}-{os.getpid()}-{time.monotonic_ns()}.log"
    engine = EngineProcess(spec, log, work)
    try:
        engine.wait_ready(_READY_S)
        yield engine
        engine.stop()
    finally:
        engine.kill()
