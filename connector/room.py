"""How much host memory a rank takes for pages, and how much of it saves may use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from connector.facts import EngineFacts
from connector.identity import CacheShape, GroupShape
from connector.settings import ConnectorSettings
from kvstore.runtime.sizes import format_bytes

__all__ = ["SaveRoom", "largest_job_bytes", "page_bytes", "save_room"]

_MIB = 1 << 20
_LEAST_BYTES = 512 * _MIB
_MACHINE_SHARE = 8
_AUDIT_SHARE = 4
_GPU_DEFAULT_BYTES = 1024 * _MIB
"""A GPU's ring takes half of `pinned_bytes` from memory that vLLM did not plan for: by default no more than 512 MiB."""


@dataclass(frozen=True, slots=True)
class SaveRoom:
    """Host memory of each rank for pages.

    Attributes:
        pinned_bytes: All of it. Saves use half; the rest is for gaps between pages of different sizes.
        reason: Where that number comes from, in words.
        needed_bytes: The smallest `pinned_bytes` with which there is room for every page and state.
        audit_bytes: Beside it, for pages that audits compare. 0: this engine audits nothing.
    """

    pinned_bytes: int
    reason: str
    needed_bytes: int
    audit_bytes: int = 0

    @property
    def fits_all(self) -> bool:
        """Whether anything can be saved: a prompt of which one group is missing cannot be resumed."""
        return self.needed_bytes <= self.pinned_bytes

    @property
    def in_flight_bytes(self) -> int:
        """What pages and states of all saves in flight may take together."""
        return self.pinned_bytes // 2


def save_room(settings: ConnectorSettings, facts: EngineFacts, shape: CacheShape) -> SaveRoom:
    """The room of one engine's ranks: the operator's `pinned_bytes`, else what a step of this engine makes final.

    Args:
        settings: The operator's.
        facts: The engine, with the memory of the rank's machine.
        shape: The model's cache.
    """
    pinned, reason = settings.pinned_bytes, "as it is set"
    if pinned is None:
        pinned, reason = _default(facts, shape)
    audits = settings.audit_rate > 0 or facts.untested_release is not None
    return SaveRoom(pinned, reason, 2 * largest_job_bytes(shape), pinned // _AUDIT_SHARE if audits else 0)


def page_bytes(shape: CacheShape, group: GroupShape) -> int:
    """Bytes of one page (or state) of a group, all slices on a rank."""
    num_blocks = 1 if group.is_state else shape.layout.page_tokens // group.facts.block_tokens
    return group.facts.rank_block_bytes * num_blocks


def largest_job_bytes(shape: CacheShape) -> int:
    """Bytes of the largest page or state, all slices on a rank."""
    return max(page_bytes(shape, group) for group in shape.groups)


def _default(facts: EngineFacts, shape: CacheShape) -> tuple[int, str]:
    cells = [group.facts for group in shape.groups if not group.is_state]
    token_bytes = sum(group.rank_block_bytes // group.block_tokens for group in cells)
    states_bytes = sum(group.facts.rank_block_bytes for group in shape.groups if group.is_state)
    wanted = 2 * (facts.step_tokens * token_bytes + states_bytes)
    reason = f"twice {facts.step_tokens} tokens of a step x {format_bytes(token_bytes)}"
    if states_bytes:
        reason += f" and {format_bytes(states_bytes)} of states"
    bounds = [max((wanted, reason), (_LEAST_BYTES, "the least"), (2 * largest_job_bytes(shape), "twice a page"))]
    if facts.device != "cpu":
        gpu_bytes = max(_GPU_DEFAULT_BYTES, 4 * largest_job_bytes(shape))
        bounds.append((gpu_bytes, "as much again of the GPU's memory would be too much for more"))
    if facts.machine_bytes:
        share = facts.machine_bytes // (_MACHINE_SHARE * facts.machine_ranks)
        ranks = f" for each of {facts.machine_ranks} ranks" if facts.machine_ranks > 1 else ""
        bounds.append((share, f"an eighth of this machine's memory{ranks}"))
    return min(bounds)
