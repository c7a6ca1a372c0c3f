"""What the demo tells: rows, a table for people, one line for programs, and whether it failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from demo.runs import Reference, Run

__all__ = ["Row", "as_line", "as_table", "failures", "row_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One restored run beside its reference.

    Attributes:
        model: Kind of checkpoint.
        run: Letter of the run.
        prompt_tokens: Length of the prompt.
        external_tokens: Of these, not computed but restored.
        recompute_ttft_s: Time to the first token of an engine that computed the prompt.
        restored_ttft_s: Time to the first token of this run.
        raw_bytes: Of the restored pages, as they are in the engine.
        stored_bytes: Of the same pages, as they are stored.
        outputs_equal: Whether every generated token is the reference's.
        logprob_difference: Largest difference of any of the 20 most likely tokens' log probabilities.
        tiers: Records read from each tier.
    """

    model: str
    run: str
    prompt_tokens: int
    external_tokens: int
    recompute_ttft_s: float
    restored_ttft_s: float
    raw_bytes: int
    stored_bytes: int
    outputs_equal: bool
    logprob_difference: float
    tiers: Mapping[str, int]

    @property
    def speedup(self) -> float:
        return self.recompute_ttft_s / self.restored_ttft_s

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "run": self.run,
            "prompt_tokens": self.prompt_tokens,
            "external_tokens": self.external_tokens,
            "recompute_ttft_s": round(self.recompute_ttft_s, 4),
            "restored_ttft_s": round(self.restored_ttft_s, 4),
            "speedup": round(self.speedup, 2),
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "outputs_equal": self.outputs_equal,
            "tiers": dict(self.tiers),
        }


def row_of(name: str, reference: Reference, run: Run) -> Row:
    """A run beside its reference."""
    prompt, computed, resumed = reference
    return Row(
        model=prompt.model,
        run=name,
        prompt_tokens=len(prompt.tokens),
        external_tokens=run.answer.num_cached_tokens,
        recompute_ttft_s=computed.ttft_s,
        restored_ttft_s=run.answer.ttft_s,
        raw_bytes=int(run.counters.get("connector_loaded_bytes", 0)),
        stored_bytes=run.stored_bytes,
        outputs_equal=run.answer.tokens == resumed.tokens,
        logprob_difference=run.answer.difference(resumed),
        tiers=run.tiers,
    )


def as_line(rows: Sequence[Row]) -> str:
    """The demo's last line."""
    return "DEMO " + json.dumps({"rows": [row.as_json() for row in rows]})


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(title="a prompt computed, and resumed by fresh engines")
    for name in (
        "run",
        "model",
        "prompt",
        "restored",
        "first token, computed",
        "and restored",
        "speed-up",
        "raw",
        "stored",
    ):
        table.add_column(name, justify="left" if name in ("run", "model") else "right")
    table.add_column("outputs equal")
    table.add_column("records read from")
    for row in rows:
        table.add_row(
            f"({row.run})",
            row.model,
            f"{row.prompt_tokens:,} tokens",
            f"{row.external_tokens:,} tokens",
            f"{row.recompute_ttft_s:.2f} s",
            f"{row.restored_ttft_s:.3f} s",
            f"{row.speedup:.1f}x",
            f"{row.raw_bytes / (1 << 20):.0f} MiB",
            f"{row.stored_bytes / (1 << 20):.0f} MiB",
            f"yes, to {row.logprob_difference:.1g}" if row.outputs_equal else "NO",
            ", ".join(f"{name} {count}" for name, count in row.tiers.items()) or "-",
        )
    return table


def failures(rows: Sequence[Row]) -> list[str]:
    """What makes the demo fail; slowness does not."""
    found = [] if rows else ["no run restored anything"]
    for row in rows:
        if not row.outputs_equal:
            found.append(f"run ({row.run}) of {row.model} generated other tokens than the reference")
        if row.external_tokens <= 0:
            found.append(f"run ({row.run}) of {row.model} restored nothing")
        if row.run == "d" and set(row.tiers) != {"s3"}:
            found.append(f"run ({row.run}) of {row.model} was to read from S3 alone, and read from {dict(row.tiers)}")
    return found
