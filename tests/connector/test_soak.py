"""300 requests, 32 in flight, in an engine with too few blocks: right outputs, right pages, and nothing left behind.

Every resume point is audited: this engine computes each page once before it restores it, and reads each load back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.checkpoints import write_checkpoint
from kvstore.testing.engine import start_engine
from kvstore.testing.engine.spec import TrafficReport
from tests.connector.support.service import DirectoryService
from tests.connector.support.soak import SOAKS, Difference, Soak, compare, errors_in, make_traffic
from tests.connector.support.soak_references import undisturbed

pytestmark = pytest.mark.engine

REQUESTS, IN_FLIGHT, WARM_UP = 300, 32, 60
RESETS = range(150, 5000, 300)
POOLS = {"codec": 8, "kvstore-client": 2 * 33, "arrivals": 1, "arena-warmer": 2}
"""Threads that come when there is work for them, by the start of their names, and how many there may be. Each of the
two clients has its loop's thread, and a pool that hashes prompts: at most 32, as Python's executors have."""

MODELS = ["llama", *(pytest.param(model, marks=pytest.mark.full) for model in ("gemma3", "qwen3next"))]
"""A soak takes minutes: one model in `make test`, all in `make test-full`."""

ROUNDING = {"llama": 1e-3, "gemma3": 1e-3, "qwen3next": 0.02}
"""By model what a page may differ from its recomputation, as a share of a cell's norm. The hybrid computes in bfloat16,
which rounds by up to 2**-9, and its kernels round in another order on another processor."""


@pytest.mark.parametrize("model", MODELS)
def test_soak(model: str, work: Path, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Shared and diverging prefixes, chunked prefill, preemptions, aborts, resets: outputs are an undisturbed engine's.

    In float32 token by token. The hybrid computes in bfloat16, where every split of a prompt rounds differently: its
    outputs may differ from an undisturbed engine's as much as those of an engine under the same pressure that has no
    connector, and not more.
    """
    soak, checkpoint = SOAKS[model], write_checkpoint(model, work / "checkpoints")
    requests = make_traffic(soak, REQUESTS)
    reference, noise = undisturbed(soak, checkpoint, requests, in_flight=IN_FLIGHT, work=work)
    with DirectoryService(tmp_path) as service:
        spec = soak.pressed(checkpoint, {"url": service.url, "audit_rate": 1.0})
        with start_engine(spec, work=work, name=f"soak-{model}") as engine:
            first = engine.traffic(requests[:WARM_UP], in_flight=IN_FLIGHT, timeout_s=900)
            warm = engine.census()
            rest = engine.traffic(requests[WARM_UP:], in_flight=IN_FLIGHT, resets=RESETS, timeout_s=900)
            census, counters, log = engine.census(), engine.connector_counters(), engine.log_text()
            leases_end = service.leases_end()
    answers = (*first.answers, *rest.answers)
    difference = compare(reference, answers)
    tell(row(model, (first, rest), counters, difference, noise))
    for index, answer in enumerate(answers):
        assert answer is not None or requests[index].abort_state is not None
    expect_outputs(soak, difference, noise)
    assert first.counts["preemptions"] + rest.counts["preemptions"] >= 50
    expect_audited(model, counters)
    assert errors_in(log) == []
    expect_no_leaks(warm, census)
    assert leases_end


def expect_outputs(soak: Soak, seen: Difference, noise: Difference | None) -> None:
    """Equal tokens; or, in bfloat16, as near as the same engine is to itself without connector."""
    if soak.is_exact:
        assert seen.flips == 0
        assert seen.largest < 1e-3
        return
    assert noise is not None
    # each of two candidates may have moved by as much as any number did
    assert seen.widest_gap <= 2 * noise.largest
    assert seen.typical <= 2 * noise.typical
    assert seen.flips <= 2 * noise.flips + 5


def expect_audited(model: str, counters: dict[str, float]) -> None:
    """Pages were restored, compared and read back, and all of them were right."""
    assert counters["connector_hits"] > 0
    assert counters["connector_audited_pages"] > 0
    assert counters["connector_audit_read_back_pages"] > 0
    assert counters["connector_audit_max_difference"] <= ROUNDING[model]
    for name in ("connector_audit_mismatches", "connector_corrupt_records", "connector_guarded_errors"):
        assert not counters.get(name), name


def expect_no_leaks(warm: dict[str, Any], census: dict[str, Any]) -> None:
    """All blocks are free, nothing is remembered, threads and descriptors are what they were after the warm-up."""
    assert census["free_blocks"] == census["blocks"]
    assert not census["requests"] and not census["remembered_requests"]
    assert not census["saves_in_flight"]
    assert Counter(census["descriptors"]) == Counter(warm["descriptors"])
    new = Counter(census["threads"]) - Counter(warm["threads"])
    assert {name.rsplit("_", 1)[0] for name in new} <= POOLS.keys()
    for pool, most in POOLS.items():
        assert sum(name.startswith(pool) for name in census["threads"]) <= most


def row(
    model: str,
    reports: tuple[TrafficReport, ...],
    counters: dict[str, float],
    difference: Difference,
    noise: Difference | None,
) -> str:
    """The figures of one soak."""
    counts = Counter[str]()
    for report in reports:
        counts.update(report.counts)
    aborted = Counter(state for report in reports for state in report.aborted.values())

    def counter(name: str) -> int:
        return int(counters.get(f"connector_{name}", 0))

    resets = f"{counts['resets_done']} of {counts['resets_done'] + counts['resets_refused']} resets"
    lines = [
        f"soak {model}: {REQUESTS} requests, {difference.answers} answers compared, {difference.flips} differ; "
        f"{counts['preemptions']} preemptions, {sum(aborted.values())} aborts {dict(aborted)}, "
        f"{resets}, {counts['steps']} steps",
        f"  {counter('hits')} hits, {counter('external_tokens')} tokens restored; "
        f"audit: {counter('audited_pages')} pages compared, {counter('audit_read_back_pages')} read back, "
        f"{counter('audit_skipped')} skipped, "
        f"{counter('audit_mismatches')} mismatches, largest difference "
        f"{counters.get('connector_audit_max_difference', 0):.2g}",
        f"  log probabilities differ by at most {difference.largest:.2g}, 99% of them by {difference.typical:.2g}; "
        f"widest gap {difference.widest_gap:.2g}, closest call {difference.closest_call:.2g}",
    ]
    if noise is not None:
        lines.append(
            f"  under the same pressure without connector: {noise.flips} differ, at most {noise.largest:.2g}, "
            f"99% by {noise.typical:.2g}, widest gap {noise.widest_gap:.2g}"
        )
    return "\n".join(lines)
