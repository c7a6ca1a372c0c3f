"""Tells the store what became of each request's prompt, so that `kvstore explain` can say why it was a miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from connector.scheduler.bridge import Bridge, result_or_none
from connector.scheduler.ledger import RequestState
from kvstore.api import Outcome, PageStore
from kvstore.errors import Closed
from kvstore.model.keys import Boundary, NamespaceId
from kvstore.model.layout import Layout
from kvstore.model.outcome import content_digest

__all__ = ["Outcomes"]


class Outcomes:
    """Tells on the store's thread; nothing is waited for, and nothing is lost but the explanation if it fails.

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
        namespace: NamespaceId | None = None,
        cap_tokens: int = 0,
        resume_tokens: int = 0,
        detail: Mapping[str, object] | None = None,
        looked: bool = False,
    ) -> None:
        """Tell once what is the same as before.

        Args:
            state: The request.
            reason: Why it was resumed no further, a word of docs/explain.md; empty: it was, all the way.
            namespace: Where it was looked up.
            cap_tokens: The furthest point that it could have been resumed from.
            resume_tokens: Up to where it was resumed.
            detail: What the reason rests on.
            looked: The reason is what the lookup did not find: the store says why that was not there.
        """
        if state.told == (reason, resume_tokens):
            return
        state.told = (reason, resume_tokens)
        prompt, chain, local_tokens = state.prompt, state.chain, state.local_tokens
        outcome = Outcome(
            request=state.request_id,
            namespace=namespace,
            prompt_tokens=len(prompt),
            cap_tokens=cap_tokens,
            local_tokens=local_tokens,
            resume_tokens=max(resume_tokens, local_tokens),
            reason=reason,
            detail=detail or {},
        )
        boundaries: Sequence[Boundary] = chain.boundaries if chain is not None and state.is_hashed else ()
        if looked and (stop := self._stop(state, boundaries, outcome)) is not None:
            outcome = replace(outcome, stop=stop[0], groups=stop[1])

        async def tell(store: PageStore) -> None:
            told = outcome
            if boundaries:
                first = boundaries[0]
                told = replace(outcome, first=first.prefix, content=content_digest(prompt[: first.tokens]))
            store.tell(told)

        with suppress(Closed):  # at the very end
            self._bridge.submit(tell)

    def _stop(
        self, state: RequestState, boundaries: Sequence[Boundary], outcome: Outcome
    ) -> tuple[Boundary, int] | None:
        """The next boundary that was needed and not whole, and which groups were: an end of a page, or the last one."""
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
