"""`python -m demo [--backends embedded|real]`: see README.md."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console

from demo.backends import Backend, embedded, real
from demo.report import Row, as_line, as_table, failures
from demo.runs import Prompt, Run, run_connected, run_reference
from kvstore.testing.checkpoints import VOCABULARY, write_checkpoint
from kvstore.testing.engine import Answer, EngineFailed, seeded_prompt
from kvstore.testing.servers import CannotInstall
from kvstore.testing.servers.process import ServerFailed

MODEL = "llama-demo"
PROMPT_SEED = 8192
INTERRUPTED = 130
LOG_COLUMNS = 150

Say = Callable[[str], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description="Resume a prompt from saved pages, on real engines.")
    parser.add_argument("--backends", choices=("embedded", "real"), default="embedded")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--work", type=Path, default=Path(__file__).resolve().parent.parent / ".work")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if not console.is_terminal:  # a log file: nothing to wrap for
        console.width = LOG_COLUMNS
    for number in (signal.SIGINT, signal.SIGTERM):  # so that whatever ends us, our blocks end what they started;
        signal.signal(number, _as_interrupt)  # a shell's background jobs would otherwise ignore SIGINT
    started_s = time.monotonic()
    try:
        with console.status("starting") as status:

            def say(text: str) -> None:
                status.update(text)
                console.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {text}", highlight=False)

            rows = run(arguments.backends, arguments.prompt_tokens, arguments.work, say)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has ended")
        return INTERRUPTED
    except (CannotInstall, EngineFailed, ServerFailed, TimeoutError) as error:
        console.print(f"demo: {error}", markup=False, highlight=False)
        return 1
    console.print(as_table(rows))
    found = failures(rows)
    for failure in found:
        console.print(f"[red]failed[/red]: {failure}")
    print(as_line(rows), flush=True)
    return 1 if found else 0


def run(backends: str, prompt_tokens: int, work: Path, say: Say) -> list[Row]:
    """All runs of the demo, in order."""
    say(f"writing the checkpoint {MODEL}")
    checkpoint = write_checkpoint(MODEL, work / "checkpoints")
    prompt = Prompt(checkpoint, seeded_prompt(PROMPT_SEED, prompt_tokens, vocabulary=VOCABULARY))
    reference = run_reference(prompt, work, say)
    if backends == "embedded":
        with embedded(say) as backend:
            return [_save_and_restore(backend, prompt, reference, work, say)]
    with real(say) as backend:
        rows = [_save_and_restore(backend, prompt, reference, work, say)]
        say("a fresh service: its memory is empty, Redis has the pages")
        backend.restart()
        rows.append(_row("r", prompt, reference, _run("r", backend, prompt, work, say)))
        say("emptying Redis, and a fresh service: only S3 is left")
        backend.flush_hot()
        backend.restart()
        return [*rows, _row("d", prompt, reference, _run("d", backend, prompt, work, say))]


def _save_and_restore(backend: Backend, prompt: Prompt, reference: tuple[Answer, Answer], work: Path, say: Say) -> Row:
    _run("b", backend, prompt, work, say)
    say("(b) waiting until all pages have reached every tier")
    backend.wait_saved()
    return _row("c", prompt, reference, _run("c", backend, prompt, work, say))


def _run(name: str, backend: Backend, prompt: Prompt, work: Path, say: Say) -> Run:
    return run_connected(
        name,
        prompt,
        connector=backend.connector,
        environment=backend.environment,
        counters=backend.counters,
        work=work,
        say=say,
    )


def _row(name: str, prompt: Prompt, reference: tuple[Answer, Answer], run: Run) -> Row:
    computed, resumed = reference
    return Row(
        model=MODEL,
        run=name,
        prompt_tokens=len(prompt.tokens),
        external_tokens=run.answer.num_cached_tokens,
        recompute_ttft_s=computed.ttft_s,
        restored_ttft_s=run.answer.ttft_s,
        raw_bytes=int(run.counters.get("connector_raw_bytes_loaded", 0)),
        stored_bytes=run.stored_bytes,
        outputs_equal=run.answer.tokens == resumed.tokens,
        logprob_difference=run.answer.difference(resumed),
        tiers=run.tiers,
    )


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
