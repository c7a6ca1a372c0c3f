"""One engine saves a prompt through one service, a fresh engine resumes it through another: `docker compose run demo`.

Needs vLLM for CPUs, the packages `kvstore`, `connector` and `demo`, and two running services that share their tiers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.runs import PROMPT_TOKENS_HELP, Prompt, Row, Run, prompt_of, report, row_of, run_connected, run_reference
from kvstore.client import BlockingStore, ClientOptions
from kvstore.runtime.deadline import Deadline
from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.program import Say, run_program

MODEL = "llama-demo"
PROMPT_SEED = 8192
_DRAIN_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="two_nodes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", required=True, help="service that the first engine uses, e.g. unix:/run/a.sock")
    parser.add_argument("--load", required=True, help="service that the second engine uses")
    parser.add_argument("--folder", type=Path, default=Path(".work"), help="for the model and what vLLM compiles")
    parser.add_argument("--prompt-tokens", type=int, help=PROMPT_TOKENS_HELP)
    arguments = parser.parse_args()
    return run_program(
        "demo",
        lambda say: run(arguments.save, arguments.load, arguments.prompt_tokens, arguments.folder, say),
        report,
    )


def run(save_url: str, load_url: str, prompt_tokens: int | None, folder: Path, say: Say) -> list[Row]:
    """The row of the engine that resumed, beside one that computed."""
    say(f"{MODEL}: writing the checkpoint")
    checkpoint = write_checkpoint(MODEL, folder / "checkpoints")
    # Asked for the first time, also where the stack has seen this demo before: then there is something to save.
    seed = PROMPT_SEED + time.time_ns() % 1_000_000_007
    reference = run_reference(prompt_of(MODEL, checkpoint, seed, prompt_tokens), folder, say)
    _connected("b", save_url, reference.prompt, folder, say)
    say("(b) waiting until all pages have reached Redis and S3")
    wait_saved(lambda: status(save_url))
    restored = _connected("c", load_url, reference.prompt, folder, say)
    return [row_of("c", reference, restored)]


def _connected(name: str, url: str, prompt: Prompt, folder: Path, say: Say) -> Run:
    return run_connected(
        name,
        prompt,
        connector={"url": url},
        environment={},
        counters=lambda: dict(status(url)["counters"]),
        work=folder,
        say=say,
    )


def status(url: str) -> Mapping[str, Any]:
    """What a service says of itself."""
    with BlockingStore(url, options=ClientOptions(name="two nodes", num_data_connections=1)) as store:
        return dict(store.status(deadline=Deadline.after(10.0)))


def wait_saved(ask: Callable[[], Mapping[str, Any]]) -> None:
    """Return when nothing waits for the slower tiers any more.

    Args:
        ask: A service's status.

    Raises:
        TimeoutError: Something still does after two minutes.
    """
    give_up_s = time.monotonic() + _DRAIN_S
    while any(queue["records"] for queue in ask()["write_back"].values()):
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"pages are still on their way to the slower tiers after {_DRAIN_S} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
