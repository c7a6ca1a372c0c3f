"""How long an engine with a core of its own waits for hits on a busy machine, and tests for what it saves."""

from __future__ import annotations

import time

from kvstore.testing.engine import EngineProcess

PATIENCE_S = 60.0
PATIENT = {"load_always": True, "lookup_timeout_ms": 20_000, "stall_timeout_ms": 20_000, "max_wait_ms": 60_000}
"""On a busy machine, too, the engine takes what is there."""


def forget_own_cache(engine: EngineProcess) -> None:
    """Reset vLLM's prefix cache, once the blocks that are being saved are free."""
    ends_s = time.monotonic() + PATIENCE_S
    while not engine.reset_prefix_cache():
        assert time.monotonic() < ends_s, "blocks stay in use"
        time.sleep(0.05)
