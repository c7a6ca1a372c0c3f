"""Stage 6: real vLLM engines. What a fresh one restores is compared bit for bit with what the engine that saved it
resumes from its own cache, for every kind of model; and then with an engine without connector.

Needs vLLM, transformers, and what the service is made with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from benchmarks.gpu.engines import ANSWER_S, arguments_of, environment, need_vllm, reported, start_engines
from benchmarks.gpu.kit import Kit

if TYPE_CHECKING:
    from benchmarks.node import Node
    from kvstore.testing.engine import Answer, EngineProcess, EngineSpec

__all__ = ["run"]

_LENGTHS = (2500, 1300, 2560)
"""Tokens of the prompts: one ends inside a block, one inside the first page, one at a block's end."""

_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
_TAKE_EVERY_HIT = {
    "load_always": True,
    "lookup_timeout_ms": 30_000,
    "stall_timeout_ms": 30_000,
    "max_wait_ms": 60_000,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run an engine; see `EngineSpec`."""

    model: str
    runner: Literal["v1", "v2"] = "v1"
    multiprocess: bool = False
    graphs: bool = False
    compression: str = "auto"

    def __str__(self) -> str:
        words = [self.model, self.runner, *([] if self.compression == "auto" else [self.compression])]
        return " ".join([*words, *(["processes"] if self.multiprocess else []), *(["graphs"] if self.graphs else [])])


_CASES = (
    Case("llama"),
    Case("llama", graphs=True),
    Case("llama", compression="none"),
    Case("llama", compression="tiles"),
    Case("qwen3next", compression="tiles"),
    Case("llama", runner="v2", multiprocess=True),
    Case("gemma3"),
    Case("gptoss"),
    Case("qwen3next"),
    Case("qwen3next", runner="v2"),
    Case("deepseek"),
)


def run(kit: Kit) -> None:
    """For each case an engine that saves, one that restores, and one without connector; the cases at once.

    Raises:
        AssertionError: A case failed; the others are reported.
    """
    need_vllm()
    from benchmarks.node import Node, temporary_folder

    with temporary_folder() as folder, Node(folder, "service", memory_bytes=4 << 30) as node:
        failed = _compare(kit, kit.sized(_CASES, (Case("llama"),)), node)
    if failed:
        raise AssertionError(f"failed: {', '.join(failed)}")


def _compare(kit: Kit, cases: Sequence[Case], node: Node) -> list[str]:
    """Returns the names of cases that failed."""
    from benchmarks.node import WORK
    from kvstore.testing.checkpoints import write_checkpoint
    from kvstore.testing.engine import EngineSpec, seeded_prompt

    prompts = [seeded_prompt(seed, length) for seed, length in enumerate(_LENGTHS, 101)]
    plain = {
        str(case): EngineSpec(
            checkpoint=write_checkpoint(case.model, WORK / "checkpoints"),
            device="cuda" if kit.is_gpu else "cpu",
            runner=case.runner,
            multiprocess=case.multiprocess,
            arguments={**arguments_of(kit, case.model), **(_GRAPHS if case.graphs else {})},
            environment=environment(),
        )
        for case in cases
    }
    ours = {  # an id of each case's own, so that none restores what another has saved
        str(case): replace(
            plain[str(case)],
            connector={
                "url": node.url,
                "weights_id": str(case),
                "compression": case.compression,
                **_TAKE_EVERY_HIT,
            },
        )
        for case in cases
    }
    failures: dict[str, str] = {}
    counters: dict[str, Mapping[str, float]] = {}

    def answers_of(what: str, specs: Mapping[str, EngineSpec], times: int) -> dict[str, list[Answer]]:
        """The last of some answers to all prompts, of each engine that answers."""
        found: dict[str, list[Answer]] = {}
        named = {f"{what} {name}": spec for name, spec in specs.items()}
        with start_engines(kit, named, failures) as ready:
            for name in specs:
                if (engine := ready.get(f"{what} {name}")) is not None:
                    with reported(kit, name, failures):
                        found[name] = [_ask(engine, prompts) for _ in range(times)][-1]
                        if specs[name].connector:
                            counters[name] = engine.connector_counters()
            node.wait_idle()
        return found

    # one kind of engine after the other: vLLM times kernels at the first start and keeps its choice on disk, and two
    # engines that choose at the same time may choose differently, and round differently from then on
    saved = answers_of("saving", ours, 2)
    restored = answers_of("restoring", ours, 1)
    for name in saved.keys() & restored.keys():
        expected, mine = saved[name], restored[name]
        hits = [answer.num_cached_tokens for answer in mine]
        is_equal = not any(_differences(mine, expected)) and hits == [one.num_cached_tokens for one in expected]
        kit.tell(
            name,
            equal=is_equal,
            restored_tokens=hits,
            in_place_bytes=counters.get(name, {}).get("connector_loaded_in_place_bytes", 0),
            differences=list(map(str, _differences(mine, expected))),
        )
        if not is_equal:
            failures[name] = "differs"
    local = answers_of("plain", plain, 2)  # last: it may differ for the reason above, without a fault of ours
    for name in local.keys() & restored.keys():
        kit.tell(
            f"{name}: beside an engine without connector",
            differences=list(map(str, _differences(restored[name], local[name]))),
        )
    return sorted(failures)


def _ask(engine: EngineProcess, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    from kvstore.testing.engine import Request

    return [engine.generate([Request(prompt)], timeout_s=ANSWER_S)[0] for prompt in prompts]


def _differences(some: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    return [one.difference(other) for one, other in zip(some, others, strict=True)]
