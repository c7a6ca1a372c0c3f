"""The order of a prompt's documents that restores most of it from what is stored, found by a bounded search; and how
often documents are asked for, which decides the order of those that are computed.

A boundary's hash depends on every token before it. So the store cannot be asked which documents it holds, only whether
a given order was stored up to a given page. The search asks that of the usual order (the document asked for most often
first) and of the caller's, and then, in rounds, of ways to continue the longest beginnings that were found. Documents
end anywhere: a page may hold the end of one document and the start of another, and is found only if both are the same
in the same order.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from kvstore.model.keys import LINK_TOKENS, Boundary, NamespaceId, PlainChain, PrefixHash
from kvstore.model.layout import Layout
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

BEAM = 4
"""Beginnings that one round continues, the longest first."""
TRIED = 16
"""Continuations that one round tries, shared among its beginnings; of each the most usual documents, since others are
rarely stored there."""
ROUNDS_MAX = 7
ASKED_AT_ONCE = 1024
"""Boundaries of an order that one question is about: the next ones matter only if all of these are stored."""
_HASHED_AT_ONCE = 512 * LINK_TOKENS
"""Tokens that are hashed before other tasks of this thread get a turn."""

Ask = Callable[[Sequence[Boundary]], Awaitable[Sequence[int]]]
"""Returns for each boundary a bit per group all of whose slices are stored."""


@dataclass(slots=True)
class _Beginning:
    """The start of a prompt: its head and some documents.

    Attributes:
        documents: In their order.
        chain: Hashes its tokens.
        rest: Its tokens that are not hashed yet.
        asked: The boundaries to ask about: those at ends of pages whose tokens are hashed, without those of its parent.
        num_tried: How many ways to continue it were tried.
        reach_tokens: Up to here each page is stored, of the groups that read all of a prompt.
        hole_tokens: The last end of a page up to there where a group that reads a window lacks its page; 0: none does.
        resume_tokens: The last end of a page up to there from which the prompt can be resumed.
        is_open: All of its ends of pages that were asked for are stored, so that it may be worth to continue it.
    """

    documents: tuple[int, ...]
    chain: PlainChain
    rest: array[int]
    asked: list[Boundary] = field(default_factory=list)
    reach_tokens: int = 0
    num_tried: int = 0
    hole_tokens: int = 0
    resume_tokens: int = 0
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Order:
    """An order of documents.

    Attributes:
        documents: Indexes into the documents that were given.
        resume_tokens: Where the prompt can be resumed, as far as the search knows: at an end of a page.
    """

    documents: tuple[int, ...]
    resume_tokens: int


class OrderSearch:
    """One search.

    Args:
        layout: The model's groups.
        ask: What is stored; called once for the usual and the given order together, then once for each round. Of a
            long prompt each order is asked about by itself, `ASKED_AT_ONCE` boundaries at a time, as long as they are
            stored.
        within_s: No round begins later than this after the search began. A round takes some half a millisecond.
        clock: Limits the rounds.
    """

    def __init__(self, layout: Layout, ask: Ask, *, within_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._within_s = within_s
        self._page_tokens = layout.page_tokens
        self._ask = ask
        self._clock = clock
        paged = [group for group in layout.groups if not group.is_state]
        whole = [group for group in paged if group.kind.needs_all]
        needed = whole or paged or list(layout.groups)
        self._needed = sum(1 << index for index, group in enumerate(layout.groups) if group in needed)
        self._windows = [group.kind for group in paged if group not in needed]
        self._windowed = sum(1 << index for index, group in enumerate(layout.groups) if group.kind in self._windows)
        self._every = (1 << len(layout.groups)) - 1
        self._known: dict[PrefixHash, int] = {}

    async def run(
        self,
        head: array[int],
        documents: Sequence[array[int]],
        *,
        usual: Sequence[int],
        given: Sequence[int],
        cache_salt: str | None,
    ) -> Order:
        """The best order that the search finds; never one that restores less than the usual or the given one.

        Args:
            head: Token ids before the documents.
            documents: Token ids of each, not empty.
            usual: Indexes of all documents, in the order in which they are put where nothing is stored.
            given: The same in the order of the caller.
            cache_salt: Of the prompt.
        """
        until_s = self._clock.monotonic_s() + self._within_s
        root = _Beginning((), PlainChain(cache_salt, self._page_tokens), head)
        await self._hash_all(root)
        # one question costs more than the boundaries of a prompt of usual length
        num_tokens = len(head) + sum(map(len, documents))
        is_asked_at_once = num_tokens // self._page_tokens <= ASKED_AT_ONCE // 2
        lead = [root]
        for index in given:
            lead.append(_with(lead[-1], index, documents[index]))
            if is_asked_at_once:
                await self._hash_all(lead[-1])
                continue
            self._hash_page(lead[-1])
            if lead[-1].asked:  # if its first page is not stored, nothing of it is
                break
        path = await self._follow(root, documents, usual, also=lead[1:])
        for parent, one in pairwise(lead):
            self._update(one, parent)
        more = lead[1:] if is_asked_at_once else []
        if not is_asked_at_once and lead[-1].is_open and lead[-1].asked:
            more = await self._follow(root, documents, given)
        known = {one.documents for one in path}
        path += [one for one in more if one.documents not in known]
        best = await self._continue([root, *path], documents, usual, until_s)
        chosen = set(best.documents)
        return Order((*best.documents, *(index for index in usual if index not in chosen)), best.resume_tokens)

    async def _follow(
        self,
        root: _Beginning,
        documents: Sequence[array[int]],
        order: Sequence[int],
        also: Sequence[_Beginning] = (),
    ) -> list[_Beginning]:
        """The beginnings of an order, one for each document, as far as they are stored and a few more.

        Args:
            also: The first question is about these beginnings, too.
        """
        path, num_updated = [root], 0
        for index in [*order, None]:
            if index is None or sum(len(one.asked) for one in path[num_updated:]) >= ASKED_AT_ONCE:
                await self._learn_while_stored(path[num_updated:], also)
                for number in range(num_updated, len(path)):
                    self._update(path[number], path[max(0, number - 1)])
                num_updated, also = len(path), ()
            if index is None or not path[-1].is_open:
                break
            path.append(_with(path[-1], index, documents[index]))
            await self._hash_all(path[-1])
        return path[1:]

    async def _continue(
        self, path: Sequence[_Beginning], documents: Sequence[array[int]], usual: Sequence[int], until_s: float
    ) -> _Beginning:
        """The best of some beginnings and of those that continue them. No round begins after `until_s`."""
        rank = {index: place for place, index in enumerate(usual)}
        seen = {one.documents for one in path}
        queue: list[tuple[int, int, int, int, _Beginning]] = []
        number = count()

        def push(one: _Beginning) -> None:
            if one.is_open:
                ranks = sum(rank[index] for index in one.documents)
                heapq.heappush(queue, (one.num_tried, -one.reach_tokens, ranks, next(number), one))

        for one in path:
            push(one)
        best = max(path, key=_worth)
        for _ in range(ROUNDS_MAX):
            is_whole = len(best.documents) == len(documents) and best.is_open
            if is_whole or not queue or self._clock.monotonic_s() > until_s:
                break
            parents = [heapq.heappop(queue)[-1] for _ in range(min(BEAM, len(queue)))]
            children: list[tuple[_Beginning, _Beginning]] = []
            for parent in parents:
                await self._hash_all(parent)
                left = [index for index in usual if index not in parent.documents][parent.num_tried :]
                indexes = left[: TRIED // len(parents)]
                parent.num_tried += len(indexes)
                for index in indexes:
                    if (*parent.documents, index) not in seen:
                        seen.add((*parent.documents, index))
                        child = _with(parent, index, documents[index])
                        self._hash_page(child)
                        children.append((parent, child))
                await asyncio.sleep(0)
            tried = [*parents, *(child for _, child in children)]
            await self._learn([boundary for one in tried for boundary in one.asked])
            for parent in parents:
                self._update(parent, parent)
                if parent.num_tried + len(parent.documents) < len(documents):
                    push(parent)
            for parent, child in children:
                self._update(child, parent)
                push(child)
            best = max((best, *tried), key=_worth)
        return best

    def _hash_page(self, one: _Beginning) -> None:
        """Hash up to its next end of a page, or all its tokens if it has none: most beginnings end there."""
        done = one.chain.tokens
        end = (done // self._page_tokens + 1) * self._page_tokens
        self._hash(one, -(-(end - done) // LINK_TOKENS) * LINK_TOKENS)

    async def _hash_all(self, one: _Beginning) -> None:
        while len(one.rest) >= LINK_TOKENS:
            self._hash(one, _HASHED_AT_ONCE)
            if len(one.rest) >= LINK_TOKENS:
                await asyncio.sleep(0)

    def _hash(self, one: _Beginning, num_tokens: int) -> None:
        num_tokens = min(num_tokens, len(one.rest) // LINK_TOKENS * LINK_TOKENS)
        one.asked += one.chain.extend(one.rest[:num_tokens])
        one.rest = one.rest[num_tokens:]

    async def _learn(self, boundaries: Sequence[Boundary]) -> None:
        """Ask what is stored at boundaries that are not known yet."""
        wanted = {boundary.prefix: boundary for boundary in boundaries}
        new = [boundary for prefix, boundary in wanted.items() if prefix not in self._known]
        if new:
            self._known |= zip((boundary.prefix for boundary in new), await self._ask(new), strict=True)

    async def _learn_while_stored(self, beginnings: Sequence[_Beginning], also: Sequence[_Beginning]) -> None:
        """Ask as `_learn` about beginnings of one order, up to the first question whose answer has a gap.

        Args:
            also: The first question is about these, too.
        """
        asked = [boundary for one in beginnings for boundary in one.asked]
        more = [boundary for one in also for boundary in one.asked]
        for start in range(0, len(asked) or 1, ASKED_AT_ONCE):
            piece = asked[start : start + ASKED_AT_ONCE]
            await self._learn([*piece, *more])
            if any(self._known[boundary.prefix] & self._needed != self._needed for boundary in piece):
                break
            more = []

    def _update(self, one: _Beginning, parent: _Beginning) -> None:
        """Note how far a beginning is stored, whose boundaries are known up to the first that is not stored; the root
        is its own parent.
        """
        one.reach_tokens, one.hole_tokens = parent.reach_tokens, parent.hole_tokens
        one.resume_tokens, one.is_open = parent.resume_tokens, parent.is_open
        for boundary in one.asked:
            if not one.is_open:
                break
            bits = self._known[boundary.prefix]
            if bits & self._needed != self._needed:
                one.is_open = False
                break
            one.reach_tokens = boundary.tokens
            if bits & self._windowed != self._windowed:
                one.hole_tokens = boundary.tokens
            elif bits == self._every and self._window_start(boundary.tokens) >= one.hole_tokens:
                one.resume_tokens = boundary.tokens

    def _window_start(self, tokens: int) -> int:
        """The first token that any window before a resume point needs."""
        return min((kind.needed_from(tokens) or 0 for kind in self._windows), default=tokens)


def _with(parent: _Beginning, index: int, tokens: array[int]) -> _Beginning:
    return _Beginning((*parent.documents, index), parent.chain.copy(), parent.rest + tokens)


def _worth(one: _Beginning) -> tuple[int, int]:
    return one.resume_tokens, -len(one.documents)


# how often documents are asked for

_TENANTS_MAX = 64


@dataclass(slots=True)
class _Counts:
    """How often one tenant asked for each document."""

    by_digest: Latest[bytes, float]
    """By the document's digest; the one that was asked for longest ago is forgotten first."""
    weight: float = 1.0
    """What a request counts now."""


class DocumentUses:
    """Counts how often each document was asked for, in a namespace under a salt. Kept in this process alone: a
    service that starts knows nothing, and orders what it finds stored as it was stored.

    A tenant's counts depend on that tenant's requests only.

    Args:
        documents_max: Of a tenant.
        ageing: A request counts by this factor more than the one before: half as much as one 3,466 requests later.
        large: All counts are divided when a request counts more than this.
    """

    def __init__(self, *, documents_max: int = 16_384, ageing: float = 1.0002, large: float = 1e100) -> None:
        self._documents_max, self._ageing, self._large = documents_max, ageing, large
        self._tenants = Latest[str, _Counts](_TENANTS_MAX)

    def note(
        self, tenant: str, namespace: NamespaceId, cache_salt: str | None, documents: Sequence[array[int]]
    ) -> tuple[list[int], list[float]]:
        """Count a request.

        Returns:
            The indexes of its documents, the one asked for most often first; and for each document the share of the
            requests before this one that asked for it.
        """
        counts = self._tenants[tenant] = self._tenants.get(tenant) or _Counts(Latest(self._documents_max))
        place = namespace + (b"" if cache_salt is None else b"\1" + cache_salt.encode())
        place = hashlib.sha256(place).digest()
        before = counts.by_digest.get(place, 0.0) / counts.weight
        digests = [hashlib.blake2b(one, digest_size=16, key=place).digest() for one in documents]
        shares = [counts.by_digest.get(digest, 0.0) / counts.weight / (before + 1.0) for digest in digests]
        for digest in dict.fromkeys((*digests, place)):  # a document that is sent twice was asked for once
            counts.by_digest[digest] = counts.by_digest.get(digest, 0.0) + counts.weight
        counts.weight *= self._ageing
        if counts.weight > self._large:
            for digest, count in list(counts.by_digest.items()):
                counts.by_digest[digest] = count / counts.weight
            counts.weight = 1.0
        usual = sorted(range(len(digests)), key=lambda index: (-shares[index], digests[index]))
        return usual, shares


def expected_uses(shares: Sequence[float], num_requests: int) -> list[float]:
    """For each number of documents from none on how many of `num_requests` requests would begin with these, as if
    documents were asked for independently of each other.
    """
    found = [float(num_requests)]
    for share in shares:
        found.append(found[-1] * share)
    return found
