"""The host memory budget: how much host memory each rank takes for pages, and how much of it saves may use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from connector.facts import EngineFacts
from connector.identity import CacheShape, GroupShape
from connector.settings import ConnectorSettings
from kvstore.runtime.sizes import format_bytes

_MIB = 1 << 20
_LEAST_BYTES = 512 * _MIB
_MACHINE_SHARE = 8
_AUDIT_SHARE = 4
_GPU_DEFAULT_BYTES = 1024 * _MIB
"""On a GPU a ring buffer takes half of `pinned_bytes` from memory that vLLM did not plan for: by default at most 512
MiB."""


@dataclass(frozen=True, slots=True)
class HostMemoryBudget:
    """Host memory of each rank for pages.

    Attributes:
        pinned_bytes: All of it. Saves use half; the rest is for gaps between pages of different sizes.
        reason: Where that number comes from, in words.
        needed_bytes: The smallest `pinned_bytes` with which every page and state can be saved.
        token_bytes: Of a token on a rank, all groups with pages together.
        audit_bytes: Beside `pinned_bytes`, for pages that audits compare. 0: this engine audits nothing.
    """

    pinned_bytes: int
    reason: str
    needed_bytes: int
    token_bytes: int
    audit_bytes: int = 0

    @property
    def text(self) -> str:
        """For the engine's log, always with the bytes of a token: from them users size `memory_bytes`."""
        pinned, token = format_bytes(self.pinned_bytes), format_bytes(self.token_bytes)
        return f"pinned_bytes is {pinned} for each rank: {self.reason}; a token takes {token} there"

    @property
    def fits_all(self) -> bool:
        """Whether anything can be saved: a prompt of which one group is missing cannot be resumed."""
        return self.needed_bytes <= self.pinned_bytes

    @property
    def in_flight_bytes(self) -> int:
        """The limit of all saves in flight together."""
        return self.pinned_bytes // 2


def host_memory_budget(settings: ConnectorSettings, facts: EngineFacts, shape: CacheShape) -> HostMemoryBudget:
    """The operator's `pinned_bytes`, or a default that holds the pages that a step of this engine makes final."""
    largest_bytes = max(page_bytes(shape, group) for group in shape.groups)
    pinned, reason = settings.pinned_bytes, "as it is set"
    if pinned is None:
        pinned, reason = _default(facts, shape, largest_bytes)
    audits = settings.audit_rate > 0 or facts.untested_release is not None
    audit_bytes = pinned // _AUDIT_SHARE if audits else 0
    return HostMemoryBudget(pinned, reason, 2 * largest_bytes, _token_bytes(shape), audit_bytes)


def default_pinned_bytes(
    *,
    step_tokens: int,
    token_bytes: int,
    states_bytes: int = 0,
    largest_bytes: int = 0,
    on_gpu: bool,
    machine_bytes: int = 0,
    machine_ranks: int = 1,
) -> tuple[int, str]:
    """The default of `pinned_bytes`, and where it comes from, in words: twice what a step makes final, within limits.

    Args:
        step_tokens: The most tokens that the engine computes in one step.
        token_bytes: Of KV on a rank, all groups together.
        states_bytes: Of one state of every recurrent group, on a rank.
        largest_bytes: Of the largest page or state. 0: small beside the least default.
        on_gpu: A GPU's memory is limited as well.
        machine_bytes: Memory of the machine. 0: unknown, no limit.
        machine_ranks: How many ranks share the machine's memory.
    """
    wanted = 2 * (step_tokens * token_bytes + states_bytes)
    reason = f"twice {step_tokens} tokens of a step x {format_bytes(token_bytes)}"
    if states_bytes:
        reason += f" and {format_bytes(states_bytes)} of states"
    bounds = [max((wanted, reason), (_LEAST_BYTES, "the least"), (2 * largest_bytes, "twice a page"))]
    if on_gpu:
        gpu_bytes = max(_GPU_DEFAULT_BYTES, 4 * largest_bytes)
        bounds.append((gpu_bytes, "the default limit on a GPU, whose memory is used as well"))
    if machine_bytes:
        share = machine_bytes // (_MACHINE_SHARE * machine_ranks)
        ranks = f" for each of {machine_ranks} ranks" if machine_ranks > 1 else ""
        bounds.append((share, f"an eighth of this machine's memory{ranks}"))
    return min(bounds)


def page_bytes(shape: CacheShape, group: GroupShape) -> int:
    """Bytes of one page (or state) of a group, all slices on a rank."""
    num_blocks = 1 if group.is_state else shape.layout.page_tokens // group.facts.block_tokens
    return group.facts.rank_block_bytes * num_blocks


def _token_bytes(shape: CacheShape) -> int:
    """Bytes of one token on a rank, in all groups that have pages. States are of no single token."""
    cells = [group.facts for group in shape.groups if not group.is_state]
    return sum(group.rank_block_bytes // group.block_tokens for group in cells)


def _default(facts: EngineFacts, shape: CacheShape, largest_bytes: int) -> tuple[int, str]:
    states_bytes = sum(group.facts.rank_block_bytes for group in shape.groups if group.is_state)
    return default_pinned_bytes(
        step_tokens=facts.step_tokens,
        token_bytes=_token_bytes(shape),
        states_bytes=states_bytes,
        largest_bytes=largest_bytes,
        on_gpu=facts.device != "cpu",
        machine_bytes=facts.machine_bytes,
        machine_ranks=facts.machine_ranks,
    )
