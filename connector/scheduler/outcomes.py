"""Reports to the store what became of each request's prompt, so that `kvstore explain` can say why it was a miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from connector.scheduler.bridge import Bridge, result_or_none
from connector.scheduler.ledger import Fetch, RequestState
from kvstore.api import Lookup, Outcome, PageStore, Staged
from kvstore.errors import Closed
from kvstore.model.keys import Boundary
from kvstore.model.layout import Layout
from kvstore.model.outcome import content_digest

__all__ = ["Outcomes", "cut", "silent"]


class Outcomes:
    """Reports on the store's thread. Nothing waits for it, and if it fails only the explanation is lost.

    Args:
        bridge: To the store.
        layout: The model's.
    """

    def __init__(self, bridge: Bridge, layout: Layout) -> None:
        self._bridge = bridge
        self._page_tokens = layout.page_tokens
        self._all_groups = (1 << len(layout.groups)) - 1

    def tell(
        self,
        state: RequestState,
        reason: str,
        *,
        resume_tokens: int = 0,
        detail: Mapping[str, object] | None = None,
        looked: bool = False,
    ) -> None:
        """Report an outcome, unless it is the same as the last one.

        Args:
            state: The request.
            reason: Why it was resumed no further, a word of docs/explain.md; empty: it was resumed as far as possible.
            resume_tokens: Up to where it was resumed.
            detail: The evidence for the reason.
            looked: The reason is what the lookup did not find; the store knows why that was not there.
        """
        if state.told == (reason, resume_tokens):
            return
        state.told = (reason, resume_tokens)
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
        if looked and (stop := self._stop(state, boundaries, outcome)) is not None:
            outcome = replace(outcome, stop=stop[0], groups=stop[1])
        elif reason == "gone":  # what the lookup found and the fetch did not
            pages = (at for at in boundaries if at.tokens % self._page_tokens == 0 or at.tokens >= state.cap_tokens)
            outcome = replace(outcome, stop=next((at for at in pages if at.tokens > outcome.resume_tokens), None))

        async def tell(store: PageStore) -> None:
            told = outcome
            if boundaries:
                first = boundaries[0]
                told = replace(outcome, first=first.prefix, content=content_digest(prompt[: first.tokens]))
            store.tell(told)

        with suppress(Closed):  # at the very end
            self._bridge.submit(tell)

    def hit(self, state: RequestState, fetch: Fetch, staged: Staged) -> None:
        """Report what is being loaded and, if that is less than possible, why."""
        reason, looked = "", False
        detail: dict[str, object] = {"bytes": staged.num_bytes, "fetch_s": fetch.took_s}
        detail |= {f"records_from_{tier}": count for tier, count in staged.sources.items()}
        if staged.resume_tokens < fetch.query.cap_tokens:
            reason, why = cut(staged)
            detail |= why
        elif fetch.shortened:
            reason = "cheaper_to_compute"
            detail |= fetch.shortened
        elif staged.resume_tokens < state.cap_tokens:
            reason, looked = "nothing_stored", True
            answer = result_or_none(state.lookup) if state.lookup is not None and state.lookup.done() else None
            detail |= silent(answer) if answer is not None else {}
        self.tell(state, reason, resume_tokens=staged.resume_tokens, detail=detail, looked=looked)

    def _stop(
        self, state: RequestState, boundaries: Sequence[Boundary], outcome: Outcome
    ) -> tuple[Boundary, int] | None:
        """The next boundary that was needed but incomplete (an end of a page, or the last), and its complete groups."""
        answer = result_or_none(state.lookup) if state.lookup is not None and state.lookup.done() else None
        if answer is None:
            return None
        beyond = [
            (boundary, groups)
            for boundary, groups in zip(boundaries, answer.groups_present, strict=False)
            if outcome.resume_tokens < boundary.tokens <= outcome.cap_tokens and groups != self._all_groups
        ]
        pages = [found for found in beyond if found[0].tokens % self._page_tokens == 0]
        return next(iter(pages or beyond[-1:]), None)


def silent(answer: Lookup) -> dict[str, object]:
    """The tiers that did not answer a lookup, and may hold more, as an outcome's detail."""
    return {"silent": ", ".join(answer.silent)} if answer.silent else {}


def cut(staged: Staged) -> tuple[str, dict[str, object]]:
    """Why a stage brought less than was there, as an outcome's reason and detail."""
    word, _, tier = staged.cut.partition(":")
    return word or "gone", {"tier": tier} if tier else {}
