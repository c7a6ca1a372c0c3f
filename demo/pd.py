"""`python -m demo.pd [--backends embedded|real]`: disaggregated prefill through the store. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.backends import Backend, embedded, real
from kvstore.testing.checkpoints import VOCABULARY, write_checkpoint
from kvstore.testing.engine import EngineSpec, Request, seeded_prompt, start_engine
from kvstore.testing.engine.forked import warm_starts
from kvstore.testing.engine.server import ApiServer, Completion, ask_server, start_api_servers
from kvstore.testing.program import Say, run_program
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerProcess, serves

__all__ = ["Row", "report", "run"]

MODEL = "llama"
LENGTHS = (2500, 1300, 5000)
MAX_TOKENS = 32
ANSWER_S = 240.0


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt through the proxy.

    Attributes:
        model: Kind of checkpoint.
        prompt_tokens: Length of the prompt.
        prefill_computed_tokens: Of these, computed by the prefill engine.
        external_tokens: Of these, not computed by the decode engine but restored from the store.
        outputs_equal: Whether every generated token is that of an engine without connector.
        total_s: Seconds for the whole answer, prefill included.
    """

    model: str
    prompt_tokens: int
    prefill_computed_tokens: int
    external_tokens: int
    outputs_equal: bool
    total_s: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_s": round(self.total_s, 3)}


def report(rows: Sequence[Row], console: Console | None) -> tuple[str, list[str]]:
    """Show a table; returns the `DEMO-PD` line and the failures. Slowness is none."""
    if console is not None:
        console.print(_table(rows))
    return "DEMO-PD " + json.dumps({"rows": [row.as_json() for row in rows]}), _failures(rows)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="prompts computed by a prefill engine, answered by a decode engine")
    for name in ("prompt", "computed there", "restored here", "whole answer"):
        table.add_column(name, justify="right")
    table.add_column("outputs equal")
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens:,} tokens",
            f"{row.prefill_computed_tokens:,} tokens",
            f"{row.external_tokens:,} tokens",
            f"{row.total_s:.2f} s",
            "yes" if row.outputs_equal else "NO",
        )
    return table


def _failures(rows: Sequence[Row]) -> list[str]:
    found = [] if rows else ["no prompt was answered"]
    for row in rows:
        if not row.outputs_equal:
            found.append(f"the prompt of {row.prompt_tokens} tokens got other tokens than without a connector")
        if row.external_tokens <= 0:
            found.append(f"of the prompt of {row.prompt_tokens} tokens the decode engine restored nothing")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.pd", description="Disaggregated prefill through the store.")
    parser.add_argument("--backends", choices=("embedded", "real"), default="embedded")
    parser.add_argument("--work", type=Path, default=Path(__file__).resolve().parent.parent / ".work")
    arguments = parser.parse_args()
    with warm_starts():  # an engine and two servers of three processes each: vLLM is imported once, not nine times
        return run_program("demo", lambda say: run(arguments.backends, arguments.work, say), report)


def run(backends: str, work: Path, say: Say) -> list[Row]:
    """A reference engine, then the two servers behind the proxy."""
    say(f"writing the checkpoint {MODEL}")
    checkpoint = write_checkpoint(MODEL, work / "checkpoints")
    requests = [
        Request(seeded_prompt(7000 + length, length, vocabulary=VOCABULARY), max_tokens=MAX_TOKENS, logprobs=None)
        for length in LENGTHS
    ]
    say("starting vLLM without a store, for the answers to expect")
    with start_engine(EngineSpec(checkpoint=checkpoint, multiprocess=True), work=work, name="pd-reference") as engine:
        expected = [engine.generate([request], timeout_s=ANSWER_S)[0].tokens for request in requests]
    with (embedded if backends == "embedded" else real)(say) as backend:
        roles = dict(zip(("kv_producer", "kv_consumer"), _halves_of_the_cores(), strict=True))
        specs = {role: _spec(checkpoint, backend, role, cores) for role, cores in roles.items()}
        say("starting a prefill server (kv_producer) and a decode server (kv_consumer)")
        with start_api_servers(specs, work=work, is_forked=True) as (prefill, decode), _proxy(prefill, decode) as url:
            say(f"asking the proxy at {url}")
            asked = zip(requests, expected, strict=True)
            rows = [_row(url, prefill, decode, request=request, expected=tokens, say=say) for request, tokens in asked]
            if _failures(rows):
                for name, server in (("prefill", prefill), ("decode", decode)):
                    say(f"what the {name} server counted: {_counted(server)}")
            return rows


def _halves_of_the_cores() -> tuple[str, str]:
    """As vLLM wants them: by itself it gives two engines on one machine the same cores, where each stops the other."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    first, second = cores[:half], cores[half:] or cores
    return ",".join(map(str, first)), ",".join(map(str, second))


def _spec(checkpoint: Path, backend: Backend, role: str, cores: str) -> EngineSpec:
    return EngineSpec(
        checkpoint=checkpoint,
        environment={**backend.environment, "VLLM_CPU_OMP_THREADS_BIND": cores},
        kv_transfer={
            "kv_connector": "KVStoreConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(backend.connector),
        },
    )


def _row(
    url: str, prefill: ApiServer, decode: ApiServer, *, request: Request, expected: tuple[int, ...], say: Say
) -> Row:
    computed_before, restored_before = _computed_tokens(prefill), _external_tokens(decode)
    answer: Completion = ask_server(url, request, timeout_s=ANSWER_S)
    restored = _external_tokens(decode) - restored_before
    say(f"{len(request.prompt):,} tokens: {restored:,} restored for decoding, answered in {answer.total_s:.2f} s")
    return Row(
        model=MODEL,
        prompt_tokens=len(request.prompt),
        prefill_computed_tokens=_computed_tokens(prefill) - computed_before,
        external_tokens=restored,
        outputs_equal=answer.tokens == expected,
        total_s=answer.total_s,
    )


def _external_tokens(server: ApiServer) -> int:
    return int(server.metrics()["vllm:kvstore_external_tokens_total"])


def _computed_tokens(server: ApiServer) -> int:
    metrics = server.metrics()
    return int(metrics["vllm:prompt_tokens_total"] - metrics.get("vllm:prompt_tokens_cached_total", 0))


def _counted(server: ApiServer) -> str:
    """Every counter of ours that is not zero: why something was not saved or not restored."""
    counted = {
        name: value
        for name, value in server.metrics().items()
        if "kvstore" in name and "_bucket" not in name and "_created" not in name and value
    }
    return ", ".join(f"{name.removeprefix('vllm:kvstore_')} {value:g}" for name, value in sorted(counted.items()))


@contextmanager
def _proxy(prefill: ApiServer, decode: ApiServer) -> Iterator[str]:
    """The proxy in a process of its own; gives its root."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-pd-")))
        command = [sys.executable, "-m", "demo.pd_proxy", "--prefill", prefill.url, "--decode", decode.url]
        proxy = ServerProcess([*command, "--port", str(port)], folder / "proxy.log", dict(os.environ))
        stack.callback(proxy.stop)
        proxy.start()
        proxy.wait_ready(lambda: serves(f"{url}/health"), 60.0)
        yield url


if __name__ == "__main__":
    sys.exit(main())
