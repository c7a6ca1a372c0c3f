"""Reports to the store what became of each request's prompt, so that `kvstore explain` can say why it was a miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from connector.bridge import Bridge, post
from connector.scheduler.fetching import Fetch
from connector.scheduler.requests import RequestState
from kvstore.api import Lookup, Outcome, PageStore, Staged
from kvstore.model.coverage import longest_resumable
from kvstore.model.keys import Boundary
from kvstore.model.layout import Layout
from kvstore.model.outcome import content_digest


class OutcomeReporter:
    """Reports on the store's thread. Nothing waits for a report; if it fails, only the explanation is lost."""

    def __init__(self, bridge: Bridge, layout: Layout) -> None:
        self._bridge = bridge
        self._layout = layout

    def report(
        self,
        state: RequestState,
        reason: str,
        *,
        resume_tokens: int = 0,
        detail: Mapping[str, object] | None = None,
        by_lookup: bool = False,
    ) -> None:
        """Report an outcome, unless it is the same as the last one of this request.

        Args:
            reason: Why it was resumed no further, a word of docs/explain.md; empty: it was resumed as far as possible.
            resume_tokens: Up to where it was resumed.
            detail: The evidence for the reason.
            by_lookup: The lookup did not find what is missing; the store knows why that was not stored.
        """
        if state.last_outcome == (reason, resume_tokens):
            return
        state.last_outcome = (reason, resume_tokens)
        prompt, chain = state.prompt, state.chain
        outcome = Outcome(
            request=state.request_id,
            namespace=state.namespace,
            prompt_tokens=len(prompt),
            cap_tokens=state.cap_tokens,
            local_tokens=state.local_tokens,
            resume_tokens=max(resume_tokens, state.local_tokens),
            reason=reason,
            detail=detail or {},
        )
        boundaries: Sequence[Boundary] = chain.boundaries if chain is not None and state.is_hashed else ()
        answer = state.lookup_answer if by_lookup else None
        if reason == "gone":  # what the lookup found and the fetch did not
            page_tokens = self._layout.page_tokens
            pages = (at for at in boundaries if at.tokens % page_tokens == 0 or at.tokens >= state.cap_tokens)
            outcome = replace(outcome, stop=next((at for at in pages if at.tokens > outcome.resume_tokens), None))

        async def report(store: PageStore) -> None:
            full = outcome
            if boundaries:
                first = boundaries[0]
                full = replace(outcome, first=first.prefix, content=content_digest(prompt[: first.tokens]))
            if answer is not None:
                seen = list(zip(boundaries, answer.groups_present, strict=False))
                stop = stop_of(self._layout, seen, resume_tokens=full.resume_tokens, cap_tokens=full.cap_tokens)
                full = replace(full, stop=stop[0], groups=stop[1]) if stop is not None else full
            store.report(full)

        post(self._bridge, report)

    def report_hit(self, state: RequestState, fetch: Fetch, staged: Staged) -> None:
        """Report what is being loaded and, if that is less than possible, why."""
        reason, by_lookup = "", False
        detail: dict[str, object] = {"bytes": staged.num_bytes, "fetch_s": fetch.took_s}
        detail |= {f"records_from_{tier}": count for tier, count in staged.sources.items()}
        if staged.resume_tokens < fetch.query.cap_tokens:
            reason, why = reason_for_less(staged)
            detail |= why
        elif fetch.shortened:
            reason = "cheaper_to_compute"
            detail |= fetch.shortened
        elif staged.resume_tokens < state.cap_tokens:
            reason, by_lookup = "nothing_stored", True
            answer = state.lookup_answer
            detail |= silent_tiers(answer) if answer is not None else {}
        self.report(state, reason, resume_tokens=staged.resume_tokens, detail=detail, by_lookup=by_lookup)


def silent_tiers(answer: Lookup) -> dict[str, object]:
    """The tiers that did not answer a lookup, and may hold more, as an outcome's detail."""
    return {"silent": ", ".join(answer.silent)} if answer.silent else {}


def reason_for_less(staged: Staged) -> tuple[str, dict[str, object]]:
    """Why a stage delivered less than was stored, as an outcome's reason and detail."""
    word, _, tier = staged.cut.partition(":")
    return word or "gone", {"tier": tier} if tier else {}


def stop_of(
    layout: Layout, seen: Sequence[tuple[Boundary, int]], *, resume_tokens: int, cap_tokens: int
) -> tuple[Boundary, int] | None:
    """The boundary whose records were missing next, and the groups that were complete there. Pure.

    States, and the pages that a window needs, are stored at few boundaries only. So a boundary without them is not yet
    the reason for a miss. For a model with such groups this finds the furthest point that the other groups alone would
    allow; the answer is what is missing there. If they allow nothing more, the answer is their next page.

    Args:
        seen: The prompt's boundaries, ascending, and for each a bit per group that a lookup found complete.
        resume_tokens: The point from which the prompt was resumed: the furthest that all groups allow.
        cap_tokens: The furthest point of interest.
    """
    all_groups = (1 << len(layout.groups)) - 1
    growing = sum(1 << index for index, group in enumerate(layout.groups) if group.kind.needs_all)
    within = [(boundary, groups) for boundary, groups in seen if boundary.tokens <= cap_tokens]
    beyond = [one for one in within if one[0].tokens > resume_tokens and one[1] != all_groups]
    if growing != all_groups and beyond:
        reached_tokens = longest_resumable(
            layout,
            [boundary.tokens for boundary, _ in within],
            [groups | (all_groups & ~growing) for _, groups in within],
            local_tokens=resume_tokens,
            cap_tokens=cap_tokens,
            step_tokens=within[0][0].tokens,
        )
        needed = (one for one in beyond if _is_needed(layout, one, reached_tokens))
        if reached_tokens > resume_tokens and (stop := next(needed, None)) is not None:
            return stop
    pages = [one for one in beyond if one[0].tokens % layout.page_tokens == 0]
    return next(iter(pages or beyond[-1:]), None)


def _is_needed(layout: Layout, seen: tuple[Boundary, int], reached_tokens: int) -> bool:
    """Whether, to resume at a point, a group needs a record at this boundary that was not there."""
    tokens, groups = seen[0].tokens, seen[1]
    for index, group in enumerate(layout.groups):
        if groups >> index & 1 or group.kind.needs_all:
            continue
        start = group.kind.needed_from(reached_tokens)
        if tokens == reached_tokens and (start is None or start < reached_tokens):
            return True
        if start is not None and start < tokens < reached_tokens and tokens % layout.page_tokens == 0:
            return True
    return False
