"""What may come in: which records fit a namespace, and how long a hit this node can hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.api import PrefixQuery
from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.format.header_v1 import HeaderV1
from kvstore.format.record import MAX_RECORD_BYTES
from kvstore.model.coverage import ends_to_resume, longest_resumable
from kvstore.model.keys import RecordKey
from kvstore.model.layout import Layout

__all__ = ["affordable_resume", "check_header", "check_key", "check_sizes"]


def check_key(key: RecordKey, layout: Layout) -> None:
    """Refuse a key whose group or slice the layout does not have.

    Raises:
        CorruptRecord: Group or slice out of range.
    """
    if key.group >= len(layout.groups):
        raise CorruptRecord("the namespace has no such group", key=key, expected=f"below {len(layout.groups)}")
    if key.slice >= layout.groups[key.group].num_slices:
        limit = layout.groups[key.group].num_slices
        raise CorruptRecord("the group has no such slice", key=key, expected=f"below {limit}")


def check_header(header: HeaderV1, layout: Layout, tokens: int | None = None) -> None:
    """Refuse a record whose header could not have been written for this layout.

    Args:
        header: An intact header.
        layout: The layout of the namespace that the header names.
        tokens: The boundary that the record's prefix belongs to, where the caller knows it.

    Raises:
        CorruptRecord: Group or slice out of range, or not the kind or span that this group has at this boundary.
    """
    check_key(header.key, layout)
    stop = header.span.stop if tokens is None else tokens
    if stop <= 0:
        raise CorruptRecord("a record ends behind at least one token", key=header.key, stop=stop)
    kind, span = layout.groups[header.key.group].record_at(stop, layout.page_tokens)
    if (header.kind, header.span) != (kind, span):
        raise CorruptRecord(
            "kind or span of a record does not fit its group",
            key=header.key,
            expected=f"{kind.name} {span.start}-{span.stop}",
            seen=f"{header.kind.name} {header.span.start}-{header.span.stop}",
        )
    if header.payload_bytes > MAX_RECORD_BYTES or header.decoded_bytes > MAX_RECORD_BYTES:
        raise CorruptRecord(f"a record has at most {MAX_RECORD_BYTES} bytes", key=header.key)


def affordable_resume(
    layout: Layout,
    query: PrefixQuery,
    groups_present: Sequence[int],
    *,
    group_bytes: Sequence[int],
    budget_bytes: int,
) -> int:
    """The longest usable resume point whose records fit a budget; `local_tokens` when none does.

    Args:
        group_bytes: For each group the bytes of one of its records, all slices together.
        budget_bytes: Bytes that may be held for it.

    Where a longer prefix needs fewer bytes (windows and states only) the search may overlook a point that fits; it
    never returns one that does not.
    """
    tokens = [boundary.tokens for boundary in query.boundaries]

    def longest(cap_tokens: int) -> int:
        return longest_resumable(
            layout,
            tokens,
            groups_present,
            local_tokens=query.local_tokens,
            cap_tokens=cap_tokens,
            step_tokens=query.step_tokens,
        )

    def fits(resume_tokens: int) -> bool:
        if resume_tokens <= query.local_tokens:
            return True
        needed = ends_to_resume(
            layout, tokens, groups_present, resume_tokens=resume_tokens, local_tokens=query.local_tokens
        )
        return sum(len(ends) * group_bytes[group] for group, ends in enumerate(needed)) <= budget_bytes

    best = longest(query.cap_tokens)
    if fits(best):
        return best
    low, high = query.local_tokens // query.step_tokens, best // query.step_tokens  # `low` fits, `high` does not
    found = query.local_tokens
    while high - low > 1:
        middle = (low + high) // 2
        resume_tokens = longest(middle * query.step_tokens)
        if fits(resume_tokens):
            low, found = middle, max(found, resume_tokens)
        else:
            high = middle
    return found


def check_sizes(stage_bytes: int, memory_bytes: int) -> None:
    """Refuse a staging budget that could fill the whole memory tier, so that no save would fit any more.

    Raises:
        InvalidRequest: It is over three quarters of the memory tier.
    """
    if stage_bytes * 4 > memory_bytes * 3:
        raise InvalidRequest(
            "the staging budget must be at most three quarters of the memory tier",
            stage_bytes=stage_bytes,
            memory_bytes=memory_bytes,
        )
