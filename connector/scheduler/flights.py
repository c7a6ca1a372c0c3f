"""Which fetches are under way, and which of them another request should wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connector.scheduler.ledger import Fetch, RequestState
from kvstore.model.keys import Boundary, NamespaceId

__all__ = ["Flights", "common_tokens"]

_SHARE_MIN = 0.5
"""The share of a request's fetch that another one must cover for the request to wait for it: loading a short common
beginning twice takes less time than waiting for all of another prompt."""


class Flights:
    """Fetches from their start until their load has ended, or until they are given up."""

    def __init__(self) -> None:
        self._flying: dict[int, Fetch] = {}

    def __len__(self) -> int:
        return len(self._flying)

    def add(self, fetch: Fetch) -> None:
        """Note that a fetch has begun."""
        self._flying[id(fetch)] = fetch

    def end(self, fetch: Fetch, *, loaded: bool = False, failed: bool = False) -> None:
        """Note that a fetch is over. Idempotent.

        Args:
            fetch: The fetch.
            loaded: vLLM has its tokens in its own cache now.
            failed: The store did not deliver it.
        """
        self._flying.pop(id(fetch), None)
        if not fetch.ended:
            fetch.ended, fetch.loaded, fetch.failed = True, loaded, failed

    def holds_back(
        self,
        state: RequestState,
        namespace: NamespaceId,
        *,
        local_tokens: int,
        resume_tokens: int,
        now_s: float,
        patience_s: Callable[[], float],
    ) -> bool:
        """Whether to wait because another request fetches most of the same: once it is loaded, vLLM has it itself.

        Otherwise it would be loaded again, into blocks of this request's own.

        Args:
            state: The request that has to be answered.
            namespace: Where its pages are.
            local_tokens: What vLLM has of it itself.
            resume_tokens: What the store has of it.
            now_s: Monotonic time.
            patience_s: The longest wait for all leaders together; called once.
        """
        if state.follow_until_s is not None and now_s >= state.follow_until_s:
            return False
        leader = state.follows
        if leader is not None and not leader.ended:
            return True
        if leader is not None and (leader.loaded or leader.failed):
            # vLLM had it, but not for us or not any more; or the store lacks it: the next one would fare the same
            return False
        leader = self._find(state, namespace, local_tokens, resume_tokens)
        if leader is None:
            return False
        state.follows = leader
        if state.follow_until_s is None:
            state.follow_until_s = now_s + patience_s()
        return True

    def _find(self, state: RequestState, namespace: NamespaceId, local_tokens: int, resume_tokens: int) -> Fetch | None:
        """The fetch that covers most of the tokens from `local_tokens` to `resume_tokens` of a prompt, or `None`."""
        assert state.chain is not None
        best: Fetch | None = None
        best_tokens = local_tokens + _SHARE_MIN * (resume_tokens - local_tokens)
        for fetch in self._flying.values():
            if fetch.query.namespace != namespace:
                continue
            common = common_tokens(fetch.query.boundaries, state.chain.boundaries)
            tokens = min(common, fetch.reach_tokens, resume_tokens)
            if tokens > local_tokens and tokens >= best_tokens and (best is None or tokens > best_tokens):
                best, best_tokens = fetch, tokens
        return best


def common_tokens(left: Sequence[Boundary], right: Sequence[Boundary]) -> int:
    """Length of the common beginning of two prompts, in whole boundaries of the same grid."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # equal up to a point and different after it, since each hash covers all before it
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[middle - 1] == right[middle - 1] else (low, middle - 1)
    return left[low - 1].tokens if low else 0
