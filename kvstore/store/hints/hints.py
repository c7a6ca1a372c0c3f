"""`Hints`: takes an ended prompt with its client's wishes, within a rate, and has each wish done."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

from kvstore.api import PrefixQuery
from kvstore.catalog.base import Catalog
from kvstore.catalog.entry import HITS_AT
from kvstore.errors import KVStoreError
from kvstore.eviction.hints import RELEASED, Hint
from kvstore.model.keys import Boundary, NamespaceId, RecordKey
from kvstore.model.layout import Layout
from kvstore.model.prompt_hint import EndedPrompt, Wishes, ends_of_pages
from kvstore.runtime.background import Work
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.sizes import counted
from kvstore.runtime.turns import PIECE, TenantTasks, with_pauses
from kvstore.store.context import StoreContext, StorePart
from kvstore.store.hints.ended_prompts import HINT_NAME, EndedPrompts, KeptPrompt
from kvstore.store.hints.prefetch import Find, Prefetcher
from kvstore.store.presence import Presence, slices_of
from kvstore.store.retention.policy_choice import PolicyChoice
from kvstore.tiers.base import Tier

HINTS_PER_S, HINTS_BURST = 100.0, 1000.0
"""Prompts with wishes that a tenant may have taken: in the long run, and at once. Beyond, wishes are dropped."""
_TENANTS_MAX = 1024
_DEMOTE_S = 30.0
_RUNS_MAX, _ASKED_MAX = 2, 64
"""Releases and demotions at a time; tenants take turns. And of a tenant, waiting or running: each has its prompt."""
_NAME_BYTES = 8
"""Of the name of a prompt that no request named."""
_AT_ONCE = 256
"""Boundaries, or records of one group, before the event loop gets a turn."""


@dataclass(slots=True)
class _Rate:
    """How many more prompts with wishes a tenant may have taken, at a time."""

    left: float
    at_s: float


class WishOutcome(Enum):
    """What became of the wishes for a prompt.

    Attributes:
        TAKEN: They are done, or `KeptPrompt.hints` says why they have no effect.
        OVER_RATE: The tenant gives too many, and these are dropped.
        PREFETCH_REFUSED: Too many prefetches wait; the other wishes are done.
    """

    TAKEN = auto()
    OVER_RATE = auto()
    PREFETCH_REFUSED = auto()


class Hints(StorePart):
    """Keeps the prompts that have ended, and has done what their clients wish for them: in the background, since no
    wish may fail or delay a request. Belongs to the store's event loop.

    Args:
        layout_of: The layout of an open namespace; `None`: it is not open.
        choice: What retention follows; `None`: nothing is evicted by this store.
        catalog: Knows how often a boundary was used; `None`: there is none.

    Attributes:
        prompts: Those that later hints can name.
    """

    def __init__(
        self,
        context: StoreContext,
        layout_of: Callable[[NamespaceId], Layout | None],
        find: Find,
        prefetcher: Prefetcher,
        *,
        choice: PolicyChoice | None,
        catalog: Catalog | None,
    ) -> None:
        super().__init__(context)
        self._context = context
        self._layout_of = layout_of
        self._find = find
        self._prefetcher = prefetcher
        self._choice = choice
        self._catalog = catalog
        self._rates = Latest[str, _Rate](_TENANTS_MAX)
        self._tasks = TenantTasks(context.background, _RUNS_MAX, of_tenant=_ASKED_MAX)
        self.prompts = EndedPrompts(self._clock)

    def keep(self, prompt: EndedPrompt) -> KeptPrompt:
        """Keep a prompt; one that no request named gets a name that no engine gives. It does not tell a tenant how many
        hints others give.
        """
        prompt = self.trimmed(prompt)
        if not prompt.request:
            prompt = replace(prompt, request=f"{HINT_NAME}{secrets.token_hex(_NAME_BYTES)}")
        return self.prompts.add(prompt)

    def trimmed(self, prompt: EndedPrompt) -> EndedPrompt:
        """A prompt with the boundaries that can be stored: a router's has one at each possible resume point."""
        layout = self._layout_of(prompt.namespace)
        if layout is None:
            return prompt
        return replace(prompt, boundaries=ends_of_pages(prompt.boundaries, layout.page_tokens))

    def end(self, prompt: EndedPrompt) -> None:
        """Keep a prompt that its engine has ended, and have its wishes done."""
        self.wish(self.keep(prompt), prompt.wishes)

    def wish(self, kept: KeptPrompt, wishes: Wishes) -> WishOutcome:
        """Have wishes for a kept prompt done; `kept.hints` says what was done about each."""
        prompt = replace(kept.prompt, wishes=wishes)
        if not wishes.said.keys() - {"session"}:
            return WishOutcome.TAKEN
        layout = self._layout_of(prompt.namespace)
        if not self._is_within_rate(prompt.tenant):
            self._drop(kept, wishes, "over_rate", "over the rate of hints")
            return WishOutcome.OVER_RATE
        if layout is None:
            self._drop(
                kept, wishes, "not_open", "the namespace is not open: unused for long, or its weights are retired"
            )
            return WishOutcome.TAKEN
        if not prompt.boundaries:
            self._drop(kept, wishes, "nothing_stored", "the prompt has no page")
            return WishOutcome.TAKEN
        kept.hints.pop("dropped", None)
        if (hint := Hint.of(wishes)) is not None:
            kept.hints["eviction"] = self._order(prompt, hint, layout)
        if wishes.release:
            self._run_soon(kept, "release", partial(self._release_own, prompt, layout))
        if wishes.demote:
            self._run_soon(kept, "demote", partial(self._demote, kept, prompt, layout))
        self._count(wishes, "taken")
        if wishes.prefetch and not self._prefetch(kept, layout):
            return WishOutcome.PREFETCH_REFUSED
        return WishOutcome.TAKEN

    def _drop(self, kept: KeptPrompt, wishes: Wishes, outcome: str, text: str) -> None:
        self._count(wishes, outcome)
        kept.hints["dropped"] = text

    def explain(self, tenant: str, request: str) -> Mapping[str, object]:
        """What hints were given for a request's prompt, and what became of each."""
        kept = self.prompts.get(tenant, request)
        if kept is None:
            return {}
        said: dict[str, object] = {**kept.prompt.wishes.said, **kept.hints}
        if "eviction" in kept.hints and self._choice is not None:
            followed = "followed" if self._choice.follows(tenant) else "not followed now: no gain is seen"
            said["eviction"] = f"{kept.hints['eviction']}; the tenant's hints are {followed}"
        return said

    # the wishes

    def _prefetch(self, kept: KeptPrompt, layout: Layout) -> bool:
        prompt = kept.prompt
        kept.hints["prefetch"] = "waiting"
        is_taken = self._prefetcher.request(
            query_of(prompt), layout, prompt.tenant, lambda text: kept.hints.update(prefetch=text)
        )
        if not is_taken:
            kept.hints["prefetch"] = "refused: too many prefetches wait"
        return is_taken

    def _order(self, prompt: EndedPrompt, hint: Hint, layout: Layout) -> str:
        if self._choice is None or self._choice.marks is None:
            return "no effect: this store evicts nothing by retention"
        if not layout.chained:
            return "no effect: pages of this namespace are of use alone, so no prompt orders their eviction"
        self._choice.hint(prompt, hint, layout.page_tokens)
        what = "released" if hint.priority == RELEASED else f"priority {hint.priority} for {hint.for_s:.0f} s"
        return f"{what} up to token {prompt.boundaries[-1].tokens}"

    def _run_soon(self, kept: KeptPrompt, name: str, work: Work[None]) -> None:
        """Have a wish done when it is the tenant's turn. Never waits; with too many that wait it is not done."""
        kept.hints.pop(name, None)
        if not self._tasks.start(kept.prompt.tenant, work, name):
            kept.hints[name] = "refused: too many releases and demotions wait"

    async def _release_own(self, prompt: EndedPrompt, layout: Layout) -> None:
        """Have memory evict the prompt's own part first. Records stay until then."""
        async for boundary in with_pauses(await self._own_part(prompt), _AT_ONCE):
            for key in layout.keys_of(prompt.namespace, boundary.prefix):
                self._memory.evict_first(key)

    async def _demote(self, kept: KeptPrompt, prompt: EndedPrompt, layout: Layout) -> None:
        """Drop the prompt's own part from memory where a slower tier has it, and from the hot tier where the cold one
        does. Each tier is asked for each record: what a lookup assumes of a tier is no reason to remove another copy.
        """
        deadline = Deadline.after(_DEMOTE_S, self._clock)
        hot, cold = self._context.hot, self._context.cold
        own_part = replace(prompt, boundaries=tuple(await self._own_part(prompt)))
        num_dropped = num_deleted = 0
        try:
            presence = await self._find(query_of(own_part), layout, deadline)
            keys = await _records(presence)
            for start in range(0, len(keys), PIECE):
                piece = keys[start : start + PIECE]
                in_hot = await _held(hot, piece, deadline)
                in_cold = await _held(cold, piece, deadline)
                num_dropped += sum(self._memory.drop_idle(key) for key in piece if key in in_hot or key in in_cold)
                if hot is not None and (both := [key for key in piece if key in in_hot and key in in_cold]):
                    await hot.delete_all(both, deadline=deadline)
                    num_deleted += len(both)
        except KVStoreError as error:
            kept.hints["demote"] = f"failed: {error.sentence()}"
            return
        self._meters.add("demoted_records", num_dropped, tier=self._memory.name)
        if hot is not None:
            self._meters.add("demoted_records", num_deleted, tier=hot.name)
        kept.hints["demote"] = f"{counted(num_dropped, 'record')} left memory, {num_deleted} the hot tier"

    async def _own_part(self, prompt: EndedPrompt) -> list[Boundary]:
        """The boundaries from the end that this prompt's conversation alone used, by the counts of the catalog: each
        turn of a conversation uses what the turns before it stored once more. All, where nothing is known.
        """
        if self._catalog is None:
            return list(prompt.boundaries)
        prefixes = [boundary.prefix for boundary in prompt.boundaries]
        try:
            hits: list[Any] = []
            for start in range(0, len(prefixes), PIECE):
                deadline = Deadline.after(_DEMOTE_S, self._clock)
                table = await self._catalog.lookup(prompt.namespace, prefixes[start : start + PIECE], deadline=deadline)
                hits += table.numbers(HITS_AT).tolist()
        except KVStoreError:
            return list(prompt.boundaries)
        first = len(prefixes)
        while first and (first == len(prefixes) or hits[first - 1] <= hits[first] + 1):
            first -= 1
        return list(prompt.boundaries[first:])

    # bounds

    def _is_within_rate(self, tenant: str) -> bool:
        now_s = self._clock.monotonic_s()
        rate = self._rates[tenant] = self._rates.get(tenant) or _Rate(HINTS_BURST, now_s)
        rate.left = min(HINTS_BURST, rate.left + (now_s - rate.at_s) * HINTS_PER_S)
        rate.at_s = now_s
        if rate.left < 1:
            return False
        rate.left -= 1
        return True

    def _count(self, wishes: Wishes, outcome: str) -> None:
        for name in wishes.said.keys() - {"session"}:
            self._meters.add("hints", hint=name, outcome=outcome)


def query_of(prompt: EndedPrompt) -> PrefixQuery:
    """All of a prompt, as a lookup would ask for it."""
    cap_tokens = prompt.boundaries[-1].tokens if prompt.boundaries else 0
    return PrefixQuery(prompt.namespace, prompt.boundaries, 0, cap_tokens, prompt.step_tokens)


async def _records(presence: Presence) -> list[RecordKey]:
    """The records of a prompt that memory has, or the hot tier by a lookup."""
    found: dict[RecordKey, None] = {}
    for level in (presence.memory, presence.hot):
        async for probe, bits in with_pauses(level.items(), _AT_ONCE):
            found.update(dict.fromkeys(presence.key(probe, slice_) for slice_ in slices_of(bits)))
    return list(found)


async def _held(tier: Tier | None, keys: Sequence[RecordKey], deadline: Deadline) -> set[RecordKey]:
    """Those of the records that a tier says it has."""
    if tier is None:
        return set()
    sizes = await tier.head(keys, deadline=deadline)
    return {key for key, size in zip(keys, sizes, strict=True) if size is not None}
