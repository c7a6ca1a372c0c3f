"""`vllm serve` in a process of its own, asked over HTTP as its users ask it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.testing.engine.forked import SERVE, start_warm_server
from kvstore.testing.engine.spec import EngineSpec, Request, engine_environment
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerFailed, ServerProcess, serves
from kvstore.testing.warm_services import start_warm

_READY_S = 300.0
"""A start takes 30 s on a quiet machine."""
_END_S = 30.0
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server answered.

    Attributes:
        tokens: Generated token ids.
        num_cached_tokens: Prompt tokens that were not computed, from wherever they came.
        kv_transfer_params: What the engine's connector gave to the one who asked, or `None`.
        total_s: Seconds for the whole answer.
    """

    tokens: tuple[int, ...]
    num_cached_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    total_s: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any], total_s: float) -> Completion:
        """Raises KeyError for an answer that is none."""
        details = value["usage"].get("prompt_tokens_details") or {}
        return cls(
            tokens=tuple(value["choices"][0]["token_ids"]),
            num_cached_tokens=details.get("cached_tokens") or 0,
            kv_transfer_params=value.get("kv_transfer_params"),
            total_s=total_s,
        )


class ApiServer:
    """A server; `start_api_server` runs one for a block.

    Attributes:
        url: Its root.
        log: File with everything that it wrote.
    """

    def __init__(self, spec: EngineSpec, log: Path, work: Path, *, is_forked: bool) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [*SERVE, *_arguments(spec), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enable-prompt-tokens-details"]
        # a front end is a process beside its engine, so the engine is always one of its own
        environment = engine_environment(replace(spec, multiprocess=True), work)
        fork = start_warm_server if is_forked else start_warm
        self._process = ServerProcess(command, log, environment, fork)
        self._group = 0

    def start(self) -> None:
        """Start it, which does not mean that it is ready."""
        self._process.start()
        self._group = self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it takes requests.

        Raises:
            ServerFailed: It ended, or time is up.
        """
        self._process.wait_ready(lambda: serves(f"{self.url}/health"), timeout_s)

    def complete(
        self,
        request: Request,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        traceparent: str = "",
        timeout_s: float = 300.0,
    ) -> Completion:
        """Answer one prompt greedily, as part of a W3C trace if one is named.

        Raises:
            ServerFailed: It refused, ended, or time is up.
        """
        return ask_server(
            self.url,
            request,
            kv_transfer_params=kv_transfer_params,
            headers={"traceparent": traceparent} if traceparent else {},
            timeout_s=timeout_s,
        )

    def metrics(self) -> dict[str, float]:
        """What `/metrics` shows, by `name` or `name{label="value"}` without vLLM's own labels; equal keys add up."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_END_S) as answer:
            text = answer.read().decode()
        values: dict[str, float] = {}
        for line in text.splitlines():
            match = _SAMPLE.fullmatch(line)
            if match is None:
                continue
            labels = [
                f'{name}="{value}"'
                for name, value in _LABEL.findall(match["labels"] or "")
                if name not in ("engine", "model_name")
            ]
            key = match["name"] + (f"{{{','.join(labels)}}}" if labels else "")
            values[key] = values.get(key, 0.0) + float(match["value"])
        return values

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Let it shut down as in production, then make sure that nothing of it is left. Idempotent."""
        try:
            self._process.stop(_END_S)
        finally:
            if self._group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._group, signal.SIGKILL)
                self._group = 0


def ask_server(
    url: str,
    request: Request,
    *,
    kv_transfer_params: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> Completion:
    """Ask `/v1/completions` of a server, or of a proxy in front of some.

    Raises:
        ServerFailed: It refused, is not there, or time is up.
    """
    body = {
        "model": "model",
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": request.cache_salt,
        "kv_transfer_params": kv_transfer_params,
    }
    data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    call = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json", **(headers or {})}
    )
    started_s = time.monotonic()
    try:
        with urllib.request.urlopen(call, timeout=timeout_s) as answer:
            value = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{url} answered {error.code}: {error.read()[:2000]!r}") from error
    except OSError as error:
        raise ServerFailed(f"{url} does not answer: {error}") from error
    return Completion.from_json(value, time.monotonic() - started_s)


def _arguments(spec: EngineSpec) -> list[str]:
    """Engine arguments as those of the command line."""
    arguments = spec.engine_arguments()
    flags = [arguments.pop("model"), "--served-model-name", "model"]
    arguments.pop("disable_log_stats")  # a server counts by itself
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


@contextlib.contextmanager
def start_api_servers(
    specs: Mapping[str, EngineSpec], *, work: Path, is_forked: bool = False
) -> Iterator[list[ApiServer]]:
    """Run servers for the length of the block, started together: most of a start is one thread's work.

    Start them from the main thread: their lives are tied to that thread.

    Args:
        specs: Their engines, by a name for the log.
        work: Folder for logs and for what vLLM compiles; keep it between runs.
        is_forked: Within `warm_starts` they need not import vLLM. Without it each of a server's processes is a new
            Python, as its users' are.

    Raises:
        ServerFailed: One did not start.
    """
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = []
        for name, spec in specs.items():
            log = logs / f"{name}-{os.getpid()}-{time.monotonic_ns()}.log"
            server = ApiServer(spec, log, work, is_forked=is_forked)
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_ready(_READY_S)
        yield servers


@contextlib.contextmanager
def start_api_server(spec: EngineSpec, *, work: Path, name: str = "api") -> Iterator[ApiServer]:
    """Run one server for the length of the block; see `start_api_servers`."""
    with start_api_servers({name: spec}, work=work) as (server,):
        yield server
