"""The longest prefix that can be resumed from the records that are present. Pure.

A prefix is divided into *cells* of `page_tokens` tokens. A boundary at the end of a cell may have a page, a boundary
inside a cell a tail; either is a record that spans its cell from the start to the boundary. A recurrent group has a
state at a boundary instead. A resume point `n` need not be a boundary, but is not beyond the last one. It is usable
when it is usable for every group:

- for a recurrent group, when there is a state exactly at `n`;
- for a paged group, when every cell between the first token that its kind needs (`GroupKind.needed_from`) and `n` has a
  record that reaches `n` or the cell's end.

The record of a paged group may reach *past* `n`. Its boundary hash is one of the prompt's, so its tokens are those of
the prompt, and a reader uses the part before `n`.

Tokens below `local_tokens` are in the engine's own cache already, so no pages are needed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.layout import GroupLayout, Layout, cell_of

Numbers = Sequence[int] | npt.NDArray[Any]
"""Integers. An array of int64 is used as it is, without a copy."""

MAX_POINTS = 1 << 20
"""Most cells, and most resume points, of one prompt: bounds the work that a hostile query can cause."""
_FIRST_POINTS, _POINTS_AT_ONCE = 64, 8192
"""Resume points that are tried at a time: few at first, since most prompts are resumed near their end or not at all."""


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
    boundary_tokens: Numbers,
    groups_present: Numbers,
    *,
    local_tokens: int,
    cap_tokens: int,
    step_tokens: int,
) -> int:
    """The longest usable resume point, or `local_tokens` when nothing beyond it is usable.

    Args:
        layout: The model's groups.
        boundary_tokens: Boundaries of the prompt, strictly ascending, above zero, at most `MAX_PREFIX_TOKENS`.
        groups_present: For each boundary a bit per group index: set when *all* slices of its record are present.
        local_tokens: Tokens in the engine's own cache.
        cap_tokens: No resume point is beyond this.
        step_tokens: Resume points are multiples of this.

    Returns:
        A multiple of `step_tokens` in `(local_tokens, cap_tokens]`, or `local_tokens`.

    Raises:
        InvalidRequest: The arguments are not valid, or give more than `MAX_POINTS` cells or resume points.

    Runs in time linear in boundaries x groups, plus candidates x groups.
    """
    table = _Table(layout, boundary_tokens, groups_present)
    if step_tokens <= 0:
        raise InvalidRequest("step_tokens must be positive", step_tokens=step_tokens)
    groups = [
        _StateReader(table.ends(index))
        if group.is_state
        else _PageReader(group, table.ends(index), table, local_tokens=local_tokens)
        for index, group in enumerate(layout.groups)
    ]
    furthest = min(table.last, cap_tokens)
    if furthest // step_tokens > MAX_POINTS:
        raise InvalidRequest(f"a prompt has at most {MAX_POINTS} resume points", seen=furthest // step_tokens)
    candidate, at_once = furthest // step_tokens * step_tokens, _FIRST_POINTS
    while candidate > local_tokens:
        stop = max(local_tokens, candidate - step_tokens * at_once)
        tried = points = np.arange(candidate, stop, -step_tokens, dtype=np.int64)
        for group in groups:
            points = points[group.usable(points)]
        if len(points):
            return int(points[0])
        candidate, at_once = int(tried[-1]) - step_tokens, _POINTS_AT_ONCE
    return local_tokens


def records_to_resume(
    layout: Layout,
    boundary_tokens: Numbers,
    groups_present: Numbers,
    *,
    resume_tokens: int,
    local_tokens: int,
) -> tuple[NeededRecord, ...]:
    """The records to read for a resume point that `longest_resumable` found, ascending, fewest tokens per cell.

    Raises:
        InvalidRequest: `resume_tokens` is not usable with the records that are present.

    At or below `local_tokens` there is nothing to read.
    """
    ends = ends_to_resume(
        layout, boundary_tokens, groups_present, resume_tokens=resume_tokens, local_tokens=local_tokens
    )
    return tuple(sorted(NeededRecord(tokens, group) for group, chosen in enumerate(ends) for tokens in chosen.tolist()))


def ends_to_resume(
    layout: Layout,
    boundary_tokens: Numbers,
    groups_present: Numbers,
    *,
    resume_tokens: int,
    local_tokens: int,
) -> list[npt.NDArray[np.int64]]:
    """As `records_to_resume`: for each group [records], int64, the boundaries of the records to read, ascending."""
    table = _Table(layout, boundary_tokens, groups_present)
    nothing = np.zeros(0, dtype=np.int64)
    if resume_tokens <= local_tokens:
        return [nothing for _ in layout.groups]
    if resume_tokens > table.last:
        raise InvalidRequest("the resume point is beyond the last boundary", resume_tokens=resume_tokens)
    needed: list[npt.NDArray[np.int64]] = []
    for index, group in enumerate(layout.groups):
        ends = table.ends(index)
        start = group.kind.needed_from(resume_tokens)
        chosen: npt.NDArray[np.int64] | None = nothing
        if start is None:
            state = ends[ends == resume_tokens]
            chosen = state if len(state) else None
        elif (start := max(start, local_tokens)) < resume_tokens:
            chosen = _covers(ends, layout.page_tokens, start, resume_tokens)
        if chosen is None:
            raise InvalidRequest("the resume point is not usable", resume_tokens=resume_tokens, group=index)
        needed.append(chosen)
    return needed


def usable_lengths(num_pages: int, pools: Sequence[tuple[Sequence[bool], int | None]]) -> list[int]:
    """The numbers of pages, from the start of a chain under keys, at which it can be resumed: ascending, without 0.

    Args:
        num_pages: The chain's.
        pools: For each pool of pages: which of the chain's it has, and how many of the last ones are needed; `None`:
            all.
    """
    runs = []
    for present, _ in pools:
        run = [0]
        for is_there in present[:num_pages]:
            run.append(run[-1] + 1 if is_there else 0)
        runs.append(run + [0] * (num_pages + 1 - len(run)))
    needs = [num_pages if last is None else last for _, last in pools]
    return [
        length
        for length in range(1, num_pages + 1)
        if all(run[length] >= min(need, length) for run, need in zip(runs, needs, strict=True))
    ]


class _Table:
    """The boundaries and their presence, checked, as arrays: a prompt may have many thousands. `last` is the last
    boundary or zero, `num_cells` the number of cells from the prompt's start to there.
    """

    def __init__(self, layout: Layout, boundary_tokens: Numbers, groups_present: Numbers) -> None:
        self.page_tokens = layout.page_tokens
        if len(boundary_tokens) != len(groups_present):
            raise InvalidRequest(
                "each boundary needs its presence", seen=len(groups_present), expected=len(boundary_tokens)
            )
        self.last = last = int(boundary_tokens[-1]) if len(boundary_tokens) else 0
        if last > 0 and cell_of(last, self.page_tokens) >= MAX_POINTS:
            raise InvalidRequest(f"a prompt has at most {MAX_POINTS} cells", tokens=last)
        try:
            self._tokens = np.asarray(boundary_tokens, dtype=np.int64)
        except OverflowError as error:  # a boundary beyond the last one, so they do not ascend
            raise InvalidRequest("boundaries must ascend from above zero") from error
        if (last and (self._tokens[0] <= 0 or not (self._tokens[1:] > self._tokens[:-1]).all())) or last < 0:
            raise InvalidRequest("boundaries must ascend from above zero")
        self.num_cells = cell_of(last, self.page_tokens) + 1 if last else 0
        # bits that do not fit a machine word stay Python integers
        self._present = np.asarray(groups_present, dtype=np.int64 if len(layout.groups) < 63 else object)

    def ends(self, group: int) -> npt.NDArray[np.int64]:
        """The boundaries, ascending, at which a group's record ends."""
        ends: npt.NDArray[np.int64] = self._tokens[(self._present >> group & 1).astype(bool)]
        return ends


def _covers(
    ends: npt.NDArray[np.int64], page_tokens: int, start: int, resume_tokens: int
) -> npt.NDArray[np.int64] | None:
    """For each cell from `start`'s to the last the nearest of `ends` that reaches the cell's end or `resume_tokens`;
    `None`: a cell has none."""
    first, last = start // page_tokens, cell_of(resume_tokens, page_tokens)
    cells = (ends - 1) // page_tokens
    reaches = ends >= np.minimum(resume_tokens, (cells + 1) * page_tokens)
    reaches &= (cells >= first) & (cells <= last)
    cells, ends = cells[reaches], ends[reaches]
    is_first = np.diff(cells, prepend=first - 1) > 0  # of several boundaries in one cell
    return ends[is_first] if np.count_nonzero(is_first) > last - first else None


class _PageReader:
    """Usable where the cells from the kind's first needed token on are covered."""

    def __init__(self, group: GroupLayout, ends: npt.NDArray[np.int64], table: _Table, *, local_tokens: int) -> None:
        self._kind = group.kind
        self._page_tokens = table.page_tokens
        self._local_tokens = local_tokens
        cells = np.arange(1, table.num_cells + 1)
        # furthest boundary with a record in each cell, 0 for none: of several assignments the last one counts
        reach = np.zeros(table.num_cells, dtype=np.int64)
        reach[(ends - 1) // table.page_tokens] = ends
        self._reach = reach
        # first cell of the unbroken run of full pages that ends before each cell
        whole = reach == cells * table.page_tokens
        self._run_start = np.concatenate(([0], np.maximum.accumulate(np.where(whole, 0, cells))))

    def usable(self, points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """For each resume point whether this group serves it."""
        starts = np.full(len(points), self._local_tokens, dtype=np.int64)
        if not self._kind.needs_all:
            needed = (self._kind.needed_from(point) for point in points.tolist())
            starts = np.maximum(starts, np.fromiter(needed, np.int64, len(points)))
        last = (points - 1) // self._page_tokens
        is_covered = (self._reach[last] >= points) & (self._run_start[last] <= starts // self._page_tokens)
        return (starts >= points) | is_covered


class _StateReader:
    """Usable where a state ends."""

    def __init__(self, ends: npt.NDArray[np.int64]) -> None:
        self._ends = ends

    def usable(self, points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """For each resume point whether this group serves it."""
        return np.isin(points, self._ends)
