"""The environment variables of an engine on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.testing.engine.spec import EngineSpec

__all__ = ["engine_environment"]

_TRITON_ON_CPU = Path(__file__).parent / "triton_on_cpu"


def engine_environment(spec: EngineSpec, work: Path) -> dict[str, str]:
    """The whole environment.

    Args:
        spec: The engine.
        work: Folder for what vLLM compiles: one folder for all engines, so that the first one's work is not repeated.
    """
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if spec.multiprocess else "0",
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.multiprocess:
        # vLLM sets one core aside, and one more where there is a connector: engines with and without one would then
        # compute with different numbers of threads, whose sums differ in the last bits
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    env.pop("TRITON_ON_CPU", None)  # the V1 runner does not start with it
    env.pop("TRITON_INTERPRET", None)
    env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if spec.runner == "v2":
        path = [str(_TRITON_ON_CPU), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), "TRITON_ON_CPU": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return {**env, **spec.environment}
