"""Reports to the store the prompts of requests that have ended, with what their clients wish for the time after."""

from __future__ import annotations

from contextlib import suppress

from connector.bridge import Bridge
from connector.scheduler.requests import RequestState
from kvstore.api import PageStore
from kvstore.errors import Closed
from kvstore.model.keys import NamespaceId
from kvstore.model.prompt_hint import EndedPrompt, ends_of_pages


class EndedReporter:
    """Reports on the store's thread. Nothing waits for a report; if it fails, only the hint is lost.

    Args:
        boundary_tokens: Of a boundary, and of a resume point.
        page_tokens: Of a page: a multiple of `boundary_tokens`.
    """

    def __init__(self, bridge: Bridge, *, boundary_tokens: int, page_tokens: int) -> None:
        self._bridge = bridge
        self._boundary_tokens = boundary_tokens
        self._page_tokens = page_tokens

    def report(self, state: RequestState, namespace: NamespaceId, final_tokens: int) -> None:
        """Report a request. All are reported: a later hint may name any by its id.

        Args:
            final_tokens: Tokens whose cache content is final; 0: the request did not end well, and its prompt counts.
        """
        if state.chain is None or not state.is_hashed:
            return
        state.extend_chain(final_tokens, self._boundary_tokens)
        boundaries, tokens = state.chain.boundaries, final_tokens or len(state.prompt)
        prompt_tokens, wishes, request = len(state.prompt), state.flags.wishes, state.request_id
        num = min(len(boundaries), tokens // self._boundary_tokens)

        async def report(store: PageStore) -> None:
            if store.takes_hints:
                ends = ends_of_pages(boundaries[:num], self._page_tokens)
                store.end_prompt(EndedPrompt(request, namespace, ends, self._boundary_tokens, prompt_tokens, wishes))

        with suppress(Closed):  # at shutdown
            self._bridge.submit(report)
