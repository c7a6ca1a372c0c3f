"""Which prefix can be resumed from the records that are there. Pure, and the heart of the store.

The words: a prefix is cut into *cells* of `page_tokens`. A boundary that ends a cell may have a page, a boundary inside
a cell a tail, and either is a record that spans its cell from the start to the boundary. A recurrent group has a state
at a boundary instead. A resume point `n` need not be a boundary, but is not beyond the last one. It is usable when
every group agrees:

- a paged group, when every cell between the first token its kind still reads (`GroupKind.needed_from`) and `n` has a
  record that reaches `n` or the cell's end. The record may reach *past* `n`: its tokens are known to be equal, since
  its boundary hash is one of the prompt's own, and a reader uses the part below `n`;
- a recurrent group, when there is a state exactly at `n`.

Tokens below `local_tokens` are in the engine's own cache already, so pages are not needed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvstore.errors import InvalidRequest
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.spans import cell_of

__all__ = ["MAX_POINTS", "NeededRecord", "longest_resumable", "records_to_resume"]

MAX_POINTS = 1 << 20
"""Most cells, and most resume points, that one prompt may have: bounds a hostile question to about a second."""


@dataclass(frozen=True, slots=True, order=True)
class NeededRecord:
    """All slices of one group's record at one boundary.

    Attributes:
        tokens: The boundary at which the record ends.
        group: Index of the group in the layout.
    """

    tokens: int
    group: int


def longest_resumable(
    layout: Layout,
    boundary_tokens: Sequence[int],
    groups_present: Sequence[int],
    *,
    local_tokens: int,
    cap_tokens: int,
    step_tokens: int,
) -> int:
    """The longest usable resume point, or `local_tokens` when nothing beyond it is usable.

    Args:
        layout: The model's groups.
        boundary_tokens: Boundaries of the prompt, strictly ascending, above zero, at most `MAX_PREFIX_TOKENS`.
        groups_present: For each boundary a bit per group index: set when *all* slices of its record are there.
        local_tokens: Tokens that the engine holds itself.
        cap_tokens: No resume point is beyond this.
        step_tokens: Resume points are multiples of this.

    Returns:
        A multiple of `step_tokens` in `(local_tokens, cap_tokens]`, or `local_tokens`.

    Raises:
        InvalidRequest: The arguments are not what they must be, or mean more than `MAX_POINTS` cells or points.

    Runs in time linear in boundaries x groups, plus one step for each candidate.
    """
    _check(boundary_tokens, groups_present, layout.page_tokens)
    if step_tokens <= 0:
        raise InvalidRequest("step_tokens must be positive", step_tokens=step_tokens)
    readers = [
        _StateReader(boundary_tokens, groups_present, index)
        if group.is_state
        else _PageReader(
            group, layout.page_tokens, boundary_tokens, groups_present, index=index, local_tokens=local_tokens
        )
        for index, group in enumerate(layout.groups)
    ]
    furthest = min((boundary_tokens[-1] if boundary_tokens else 0), cap_tokens)
    if furthest // step_tokens > MAX_POINTS:
        raise InvalidRequest(f"a prompt has at most {MAX_POINTS} resume points", seen=furthest // step_tokens)
    candidate = furthest // step_tokens * step_tokens
    while candidate > local_tokens:
        if all(reader.usable(candidate) for reader in readers):
            return candidate
        candidate -= step_tokens
    return local_tokens


def records_to_resume(
    layout: Layout,
    boundary_tokens: Sequence[int],
    groups_present: Sequence[int],
    *,
    resume_tokens: int,
    local_tokens: int,
) -> tuple[NeededRecord, ...]:
    """The records to read for a resume point that `longest_resumable` found, ascending, fewest tokens per cell.

    Raises:
        InvalidRequest: `resume_tokens` is not usable with what is present.

    At or below `local_tokens` there is nothing to read.
    """
    _check(boundary_tokens, groups_present, layout.page_tokens)
    if resume_tokens <= local_tokens:
        return ()
    if resume_tokens > (boundary_tokens[-1] if boundary_tokens else 0):
        raise InvalidRequest("the resume point is beyond the last boundary", resume_tokens=resume_tokens)
    needed: list[NeededRecord] = []
    for index, group in enumerate(layout.groups):
        ends = _ends(boundary_tokens, groups_present, index)
        start = group.kind.needed_from(resume_tokens)
        if start is None:
            chosen = [resume_tokens if resume_tokens in ends else None]
        elif (start := max(start, local_tokens)) < resume_tokens:
            covers = _covers(ends, layout.page_tokens, resume_tokens)
            last = cell_of(resume_tokens, layout.page_tokens)
            chosen = [covers.get(cell) for cell in range(start // layout.page_tokens, last + 1)]
        else:
            chosen = []
        for tokens in chosen:
            if tokens is None:
                raise InvalidRequest("the resume point is not usable", resume_tokens=resume_tokens, group=index)
            needed.append(NeededRecord(tokens, index))
    return tuple(sorted(needed))


def _ends(boundary_tokens: Sequence[int], groups_present: Sequence[int], group: int) -> list[int]:
    """The boundaries, ascending, at which a group's record ends."""
    return [tokens for tokens, bits in zip(boundary_tokens, groups_present, strict=True) if bits >> group & 1]


def _covers(ends: Sequence[int], page_tokens: int, resume_tokens: int) -> dict[int, int]:
    """For each cell the nearest of `ends` that reaches the cell's end or `resume_tokens`."""
    covers: dict[int, int] = {}
    for tokens in ends:
        cell = cell_of(tokens, page_tokens)
        if tokens >= min(resume_tokens, (cell + 1) * page_tokens):
            covers.setdefault(cell, tokens)
    return covers


class _StateReader:
    """Usable where there is a state."""

    def __init__(self, boundary_tokens: Sequence[int], groups_present: Sequence[int], group: int) -> None:
        self._states = set(_ends(boundary_tokens, groups_present, group))

    def usable(self, resume_tokens: int) -> bool:
        return resume_tokens in self._states


class _PageReader:
    """Usable where the cells from the kind's first needed token on are covered."""

    def __init__(
        self,
        group: GroupLayout,
        page_tokens: int,
        boundary_tokens: Sequence[int],
        groups_present: Sequence[int],
        *,
        index: int,
        local_tokens: int,
    ) -> None:
        self._kind = group.kind
        self._page_tokens = page_tokens
        self._local_tokens = local_tokens
        num_cells = cell_of(boundary_tokens[-1], page_tokens) + 1 if boundary_tokens else 0
        self._reach = [0] * num_cells  # furthest boundary with a record in each cell, 0 for none
        for tokens in _ends(boundary_tokens, groups_present, index):
            self._reach[cell_of(tokens, page_tokens)] = tokens
        # first cell of the unbroken run of full pages that ends before each cell
        self._run_start = [0] * (num_cells + 1)
        for cell in range(num_cells):
            whole = self._reach[cell] == (cell + 1) * page_tokens
            self._run_start[cell + 1] = self._run_start[cell] if whole else cell + 1

    def usable(self, resume_tokens: int) -> bool:
        needed_from = self._kind.needed_from(resume_tokens)
        assert needed_from is not None
        start = max(needed_from, self._local_tokens)
        if start >= resume_tokens:
            return True
        last = cell_of(resume_tokens, self._page_tokens)
        return self._reach[last] >= resume_tokens and self._run_start[last] <= start // self._page_tokens


def _check(boundary_tokens: Sequence[int], groups_present: Sequence[int], page_tokens: int) -> None:
    if len(boundary_tokens) != len(groups_present):
        raise InvalidRequest(
            "each boundary needs its presence", seen=len(groups_present), expected=len(boundary_tokens)
        )
    if any(later <= earlier for earlier, later in pairwise((0, *boundary_tokens))):
        raise InvalidRequest("boundaries must ascend from above zero")
    if boundary_tokens and cell_of(boundary_tokens[-1], page_tokens) >= MAX_POINTS:
        raise InvalidRequest(f"a prompt has at most {MAX_POINTS} cells", tokens=boundary_tokens[-1])
