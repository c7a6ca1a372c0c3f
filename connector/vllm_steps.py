"""vLLM's steps as plain values, and its block pool as our pins; read without importing vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from connector.scheduler.saves import Offer
from connector.scheduler.step_facts import StepFacts

__all__ = ["PoolPins", "read_step"]


def read_step(output: Any) -> StepFacts:
    """What is computed in a step, from vLLM's `SchedulerOutput` while the connector may read block tables of it."""
    computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    blocks = output.kv_connector_block_state
    final = {}
    for request_id, scheduled in output.num_scheduled_tokens.items():
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        final[request_id] = computed[request_id] + scheduled - drafts
    offers = {
        request_id: [Offer(*offer) for offer in offered]
        for request_id, offered in blocks.boundary_state_offloads.items()
    }
    preempted = tuple(output.preempted_req_ids or ())
    return StepFacts(final, _Tables(final, blocks.get_block_ids), offers, preempted, computed)


class _Tables(Mapping[str, Sequence[Sequence[int]]]):
    """Block tables of a step's requests, resolved on access: most steps need none."""

    def __init__(self, request_ids: Mapping[str, int], resolve: Callable[[str], Any]) -> None:
        self._request_ids = request_ids
        self._resolve = resolve

    def __getitem__(self, request_id: str) -> Sequence[Sequence[int]]:
        tables: Sequence[Sequence[int]] = self._resolve(request_id)
        return tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._request_ids)

    def __len__(self) -> int:
        return len(self._request_ids)


class PoolPins:
    """`BlockPins` on vLLM's block pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def is_empty(self) -> bool:
        """Whether no block is in use or cached: no request holds KV, or will be given any that is there now."""
        used_blocks = self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() - 1  # one is vLLM's null block
        return used_blocks == 0 and len(self._pool.cached_block_hash_to_block) == 0

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        # the last first, as vLLM does: a prefix is worth more than what follows it
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
