"""What engines without connector answer from their own cache; kept between runs, since an engine costs 10-20 s."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import kvstore.testing.engine
from kvstore.testing.engine import Answer, EngineProcess
from tests.connector.support.matrix import Combination
from tests.connector.support.releases import IS_SUITES_OWN, vllm_version
from tests.connector.support.runs import PROMPTS, RESTORED, ask_each, reference_spec

__all__ = ["References"]


class References:
    """Answers to `PROMPTS` by combination, whatever its store. A kept answer is named by all that it depends on.

    Args:
        work: Folder that is kept between runs; its checkpoints are part of the name.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._folder = work / "references"

    def find(self, combination: Combination) -> list[Answer] | None:
        """The answers, if an earlier call of `learn` kept them."""
        try:
            kept = json.loads(self._file(combination).read_text())
        except FileNotFoundError:
            return None
        return [Answer.from_json(answer) for answer in kept]

    def learn(self, combination: Combination, engine: EngineProcess) -> list[Answer]:
        """Ask an engine without connector twice, and keep its second answers."""
        ask_each(engine, PROMPTS)
        answers = ask_each(engine, PROMPTS)
        has_cache = combination.model != "deepseek"  # its prompts are cut at the same token instead
        expected = RESTORED[combination.model] if has_cache else (0, 0, 0)
        assert not IS_SUITES_OWN or tuple(answer.num_cached_tokens for answer in answers) == expected
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(combination)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps([asdict(answer) for answer in answers]))
        new.replace(file)
        return answers

    def forget(self, combination: Combination) -> None:
        """Drop what is kept: an engine without connector, too, has rounded otherwise than all others, once on a busy
        machine. A next run then learns from another one."""
        self._file(combination).unlink(missing_ok=True)

    def _file(self, combination: Combination) -> Path:
        spec = reference_spec(combination, self._work)
        processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        depends_on = {
            "spec": {**asdict(spec), "checkpoint": (spec.checkpoint / "made.json").read_text()},
            "prompts": PROMPTS,
            "engine": [file.read_text() for file in sorted(Path(kvstore.testing.engine.__file__).parent.glob("*.py"))],
            "versions": {"vllm": vllm_version(), **{name: version(name) for name in ("torch", "triton")}},
            "processors": (processor[:1], len(os.sched_getaffinity(0))),
        }
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        return self._folder / f"{spec.checkpoint.name}-{digest}.json"
