"""Real vLLM engines for tests, the demo and benchmarks: each a process of its own. See README.md."""

from kvstore.testing.engine.process import EngineFailed, EngineProcess, start_engine
from kvstore.testing.engine.spec import Answer, EngineSpec, Request, seeded_prompt

__all__ = ["Answer", "EngineFailed", "EngineProcess", "EngineSpec", "Request", "seeded_prompt", "start_engine"]
