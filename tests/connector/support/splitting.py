"""Schedulers for references: they cut a lone prompt where its last block begins, as a hit of all before it does.

vLLM does not reuse its own cache for multi-head latent attention on a CPU, and its kernels there round differently for
chunks of different lengths. So what a resumed request is compared with is a run without a connector in which every
prompt is computed in the same two steps. Only for one request at a time.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["AsyncSplittingScheduler", "SplittingScheduler"]


class _Splitting(Scheduler):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        budget, chunks = self.max_num_scheduled_tokens, self.scheduler_config.enable_chunked_prefill
        for request in self.waiting:
            self.scheduler_config.enable_chunked_prefill = True
            self.max_num_scheduled_tokens = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens, self.scheduler_config.enable_chunked_prefill = budget, chunks


class SplittingScheduler(_Splitting):
    """For engines without async scheduling."""


class AsyncSplittingScheduler(_Splitting, AsyncScheduler):
    """For engines with it."""
