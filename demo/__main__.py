"""`python -m demo [--backends embedded|real]`: see README.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from demo.backends import Backend, embedded, real
from demo.runs import (
    PROMPT_TOKENS_HELP,
    Prompt,
    Reference,
    Row,
    Run,
    prompt_of,
    report,
    row_of,
    run_connected,
    run_reference,
)
from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.program import Say, run_program

MODELS = ("llama-demo", "qwen3next-demo")
"""A model with attention alone, and a hybrid: recurrent states beside attention."""

PROMPT_SEED = 8192

References = dict[str, Reference]
"""By model."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description="Resume a prompt from saved pages, on real engines.")
    parser.add_argument("--backends", choices=("embedded", "real"), default="embedded")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--prompt-tokens", type=int, help=PROMPT_TOKENS_HELP)
    parser.add_argument("--work", type=Path, default=Path(__file__).resolve().parent.parent / ".work")
    arguments = parser.parse_args()
    return run_program(
        "demo",
        lambda say: run(arguments.backends, arguments.models, arguments.prompt_tokens, arguments.work, say),
        report,
    )


def run(backends: str, models: Sequence[str], prompt_tokens: int | None, work: Path, say: Say) -> list[Row]:
    """All runs of the demo, in order: each of the backend's states for every model."""
    references: References = {}
    for model in models:
        say(f"{model}: writing the checkpoint")
        checkpoint = write_checkpoint(model, work / "checkpoints")
        references[model] = run_reference(prompt_of(model, checkpoint, PROMPT_SEED, prompt_tokens), work, say)
    if backends == "embedded":
        with embedded(say) as backend:
            return _save_and_restore(backend, references, work, say)
    with real(say) as backend:
        rows = _save_and_restore(backend, references, work, say)
        say("a fresh service: its memory is empty, Redis has the pages")
        backend.restart()
        rows += _restore("r", backend, references, work, say)
        say("emptying Redis, and a fresh service: only S3 is left")
        backend.redis.flush()
        backend.restart()
        return rows + _restore("d", backend, references, work, say)


def _save_and_restore(backend: Backend, references: References, work: Path, say: Say) -> list[Row]:
    for reference in references.values():
        _run("b", backend, reference.prompt, work, say)
    say("(b) waiting until all pages have reached every tier")
    backend.service.settle()
    return _restore("c", backend, references, work, say)


def _restore(name: str, backend: Backend, references: References, work: Path, say: Say) -> list[Row]:
    return [
        row_of(name, reference, _run(name, backend, reference.prompt, work, say)) for reference in references.values()
    ]


def _run(name: str, backend: Backend, prompt: Prompt, work: Path, say: Say) -> Run:
    return run_connected(
        name,
        prompt,
        connector=backend.connector,
        environment=backend.environment,
        counters=backend.service.counters,
        work=work,
        say=say,
    )


if __name__ == "__main__":
    sys.exit(main())
