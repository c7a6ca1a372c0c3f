"""`kvstore simulate`: hit rates of budgets and policies, by replaying a trace of prompts with the store's own code."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from kvstore.cli.options import parse_size
from kvstore.cli.printing import print_table, progress_bar, table_of
from kvstore.errors import InvalidRequest
from kvstore.eviction.candidates import AUTO, CANDIDATES
from kvstore.eviction.replay import CLAIRVOYANT, ReplayPlan, ReplayResult, check_policy, replay
from kvstore.eviction.trace import NONE, RANDOM, TRACE, TracedPrompt, read_trace

_ALONE_MAX = 40_000
"""Prompts to replay, over all plans, beyond which starting more processes pays off."""
_CURVE_WIDTH, _BAR_WIDTH = 110, 50
_BUDGETS = "1000,3000,10000,30000,50000"
_POLICIES = ",".join([*(candidate.name for candidate in CANDIDATES), AUTO, CLAIRVOYANT])


def simulate(  # noqa: PLR0917 - typer makes flags of them
    trace: Annotated[Path, typer.Argument(help="Prompts in Mooncake's format, .jsonl or .jsonl.gz.")],
    budget_blocks: Annotated[
        str, typer.Option(help="Budgets to try: in blocks, or as a share of the trace's distinct blocks, like 10%.")
    ] = _BUDGETS,
    policy: Annotated[
        str, typer.Option(help="Policies to try: a policy, policy+admission, or auto; clairvoyant is an upper bound.")
    ] = _POLICIES,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block in the trace.")] = 512,
    block_bytes: Annotated[str, typer.Option(help="Stored bytes of a block; 64MiB is an 8B model in bf16.")] = "64MiB",
    block_records: Annotated[int, typer.Option(min=1, help="Records of a block: requests to put or get it.")] = 16,
    hints: Annotated[
        str,
        typer.Option(
            help="Hints to try: none; trace, what clients that know the trace's conversations would say; random. "
            "Adds auto without hints, and compares."
        ),
    ] = NONE,
    ttl_s: Annotated[float | None, typer.Option(min=0.001, help="Evict what was unused for this many seconds.")] = None,
    curve: Annotated[Path | None, typer.Option(help="Write the hit rates as an SVG chart.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Replay a trace: token hit rate, bytes written and S3 requests for each policy and budget."""
    shares = _budgets(budget_blocks)
    policies, kinds = _policies(policy), _hints(hints)
    num_bytes = parse_size(block_bytes, "--block-bytes", least_bytes=1, unit="MiB")
    if curve is not None and curve.suffix != ".svg":
        raise InvalidRequest("--curve: expected a file that ends in .svg", seen=repr(str(curve)))
    prompts = read_trace(trace, block_tokens=block_tokens)
    num_distinct = len({block for one in prompts for block in one.blocks})
    budgets = [max(1, int(one * num_distinct)) if isinstance(one, float) else one for one in shares]
    tried = [
        (name, kind) for name in policies for kind in kinds if kind == NONE or name != CLAIRVOYANT
    ]  # the bound knows more than any hint
    if kinds != [NONE]:
        tried.insert(0, (AUTO, NONE))
    plans = [
        ReplayPlan(
            policy=name,
            budget_blocks=budget,
            block_tokens=block_tokens,
            block_bytes=num_bytes,
            block_records=block_records,
            ttl_s=ttl_s,
            hints=kind,
        )
        for budget in dict.fromkeys(sorted(budgets))
        for name, kind in dict.fromkeys(tried)
    ]
    rows = _run(prompts, plans)
    if kinds != [NONE]:
        _compare(rows)
    if json_:
        typer.echo(json.dumps({"rows": rows}, indent=1))
    else:
        _print(trace.name, len(prompts), rows)
    if curve is not None:  # last: a file that cannot be written loses no result
        _write_curve(curve, trace.name, rows)
        if not json_:
            typer.echo(f"curve: {curve}")


def _policies(text: str) -> list[str]:
    try:
        return [check_policy(name.strip()) for name in text.split(",")]
    except InvalidRequest as error:
        raise InvalidRequest(f"--policy: {error.message}") from error


def _hints(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind not in (NONE, TRACE, RANDOM):
            raise InvalidRequest(f"--hints: expected {NONE}, {TRACE} or {RANDOM}, or several", seen=repr(kind))
    return list(dict.fromkeys(kinds))


def _budgets(text: str) -> list[int | float]:
    """Budgets in blocks, and those that are a share of the trace's blocks as fractions."""
    budgets: list[int | float] = []
    for part in map(str.strip, text.split(",")):
        share = part.removesuffix("%")
        if part != share and re.fullmatch(r"\d+(\.\d+)?", share) and 0 < float(share) <= 100:
            budgets.append(float(share) / 100)
        elif part.isdecimal() and int(part) >= 1:
            budgets.append(int(part))
        else:
            raise InvalidRequest(
                "--budget-blocks: expected whole numbers above zero, or shares like 10%, with commas between, "
                "like 1000,3000",
                seen=repr(text),
            )
    return budgets


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its token hits over those of `auto` without hints in the same budget."""
    plain = {row["budget_blocks"]: row for row in rows if (row["policy"], row["hints"]) == (AUTO, NONE)}
    for row in rows:
        row["times_auto"] = round(row["hit_tokens"] / max(1, plain[row["budget_blocks"]]["hit_tokens"]), 4)


def _run(prompts: Sequence[TracedPrompt], plans: Sequence[ReplayPlan]) -> list[dict[str, Any]]:
    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    num_prompts = len(prompts) * len(plans)
    with progress_bar(*columns) as progress:
        bar = progress.add_task("replaying", total=num_prompts)
        if num_prompts > _ALONE_MAX:
            return _run_in_processes(prompts, plans, lambda: progress.advance(bar, len(prompts)))
        rows = []
        for plan in plans:
            progress.update(bar, description=f"{_named(plan.policy, plan.hints)} in {plan.budget_blocks:,} blocks")
            rows.append(_row(plan, replay(prompts, plan, lambda done: progress.advance(bar, done))))
        return rows


def _run_in_processes(
    prompts: Sequence[TracedPrompt], plans: Sequence[ReplayPlan], on_done: Callable[[], None]
) -> list[dict[str, Any]]:
    """Run the plans, which are independent, in one process per processor."""
    num_processes = min(len(plans), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            jobs = {
                plan: pool.submit(replay, prompts, plan)
                for plan in sorted(plans, key=lambda plan: plan.policy != AUTO)  # the long ones first
            }
            for job in as_completed(jobs.values()):
                job.result()
                on_done()
        except BaseException:  # Ctrl-C: without this the pool would first run all other plans, for minutes
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        return [_row(plan, jobs[plan].result()) for plan in plans]


def _row(plan: ReplayPlan, result: ReplayResult) -> dict[str, Any]:
    puts, gets, deletes = (
        blocks * plan.block_records for blocks in (result.blocks_written, result.blocks_read, result.blocks_evicted)
    )
    return {
        "policy": plan.policy,
        "hints": plan.hints,
        "budget_blocks": plan.budget_blocks,
        "budget_bytes": plan.budget_blocks * plan.block_bytes,
        "token_hit_rate": round(result.token_hit_rate, 6),
        "hit_tokens": result.hit_tokens,
        "input_tokens": result.input_tokens,
        "bytes_written": result.blocks_written * plan.block_bytes,
        "bytes_read": result.blocks_read * plan.block_bytes,
        "s3_requests": puts + gets + deletes,
        "s3_puts": puts,
        "s3_gets": gets,
        "s3_deletes": deletes,
        "num_hints": result.num_hints,
        "hints_followed": result.hints_followed,
        "followed": [{"from_prompt": prompt, "policy": name} for prompt, name in result.followed],
    }


def _print(name: str, num_prompts: int, rows: Sequence[Mapping[str, Any]]) -> None:
    numbers = ["budget, blocks", "token hit rate", "written, GiB", "S3 requests, millions"]
    if is_compared := "times_auto" in rows[0]:
        numbers.append("hits / auto")
    title = f"{name}: {num_prompts:,} prompts, {rows[0]['input_tokens']:,} tokens"
    table = table_of(title, numbers[0], "policy", *numbers[1:], right=tuple(numbers))
    last = rows[0]["budget_blocks"]
    for row in rows:
        if row["budget_blocks"] != last:
            table.add_section()
            last = row["budget_blocks"]
        table.add_row(
            f"{row['budget_blocks']:,}",
            _named(row["policy"], row["hints"]),
            f"{row['token_hit_rate']:.4f}",
            f"{row['bytes_written'] / (1 << 30):,.0f}",
            f"{row['s3_requests'] / 1e6:,.2f}",
            *([f"{row['times_auto']:.3f}"] if is_compared else []),
        )
    print_table(table)


def _named(policy: object, hints: object) -> str:
    return str(policy) if hints == NONE else f"{policy}, {hints} hints"


def _write_curve(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a bar for each policy and budget; the bars of a policy are its curve."""
    table = table_of("", "policy", "budget, blocks", "token hit rate", "", right=("budget, blocks",))
    highest = max(row["token_hit_rate"] for row in rows) or 1.0
    for policy in dict.fromkeys(_named(row["policy"], row["hints"]) for row in rows):
        for row in (row for row in rows if _named(row["policy"], row["hints"]) == policy):
            rate = row["token_hit_rate"]
            bar = Bar(highest, 0, rate, width=_BAR_WIDTH, color="blue")
            table.add_row(policy, f"{row['budget_blocks']:,}", bar, f"{rate:.1%}")
        table.add_section()
    console = Console(record=True, file=io.StringIO(), width=_CURVE_WIDTH)
    console.print(table)
    picture = console.export_svg(title=f"Token hit rate by budget: {name}")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # a viewer would fetch them from another site
    try:
        path.write_text(picture)
    except OSError as error:
        raise InvalidRequest(f"--curve: cannot write {path}: {error.strerror}") from error
