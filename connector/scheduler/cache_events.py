"""KV cache events for pages in the store: which became readable, on which medium, and which are gone.

Routers that listen to vLLM's cache events know blocks by vLLM's own hashes, so a page is published as a run of blocks.
Used only if events are published, since hashes and tokens of every page are kept until its save is answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from connector.identity import CacheShape
from connector.jobs import SaveJob
from connector.scheduler.requests import RequestState
from kvstore.api import Staged
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.model.media import MEDIA, Medium
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock

_MEMORY = "memory"
"""The tier that acknowledges a save, and that every hit is read through. Write-back to the others is not published."""

REMEMBERED_PAGES = 16_384
_NAMED_S = 60.0
"""A page of a hit is named to the service again after this: a service that was restarted does not know it."""


@dataclass(frozen=True, slots=True)
class RequestHashes:
    """How vLLM's own events name a request's blocks.

    Attributes:
        block_hashes: One for each `hash_tokens` tokens; vLLM appends to this sequence.
        are_of_tokens: The hashes depend on nothing but tokens and the adapter. With a salt, media or embeddings they
            do: then events have no tokens, since a router would take them for another prompt's.
    """

    block_hashes: Sequence[bytes]
    hash_tokens: int
    lora_name: str | None = None
    lora_id: int | None = None
    are_of_tokens: bool = True


@dataclass(frozen=True, slots=True)
class PageEvent:
    """Consecutive blocks of one canonical group became readable from a medium, or no longer are.

    Attributes:
        hashes: vLLM's hash of each block.
        parent: Hash of the block before them; `None` at the prompt's start.
        tokens: Tokens of all these blocks; empty where the hashes depend on more than tokens.
    """

    group: int
    hashes: tuple[bytes, ...]
    medium: Medium
    removed: bool = False
    parent: bytes | None = None
    tokens: tuple[int, ...] = ()
    block_tokens: int = 0
    lora_name: str | None = None
    lora_id: int | None = None


@dataclass(frozen=True, slots=True)
class NamedPage:
    """A page that the service may know by its blocks: it is stored."""

    namespace: NamespaceId
    boundary: Boundary
    event: PageEvent


@dataclass(slots=True)
class _Request:
    """An open request. Its lookup's answer is compared once with the published pages."""

    hashes: RequestHashes
    opened_s: float
    is_compared: bool = False


@dataclass(slots=True)
class _Published:
    """A published page: its media in the order of their events, and when it was last published and named."""

    hashes: tuple[bytes, ...]
    media: list[Medium] = field(default_factory=list)
    published_s: float = 0.0
    named_s: float | None = None


class CacheEvents:
    """Turns answers of ranks and of the store into events. Belongs to the engine's thread.

    A page is published once per medium. A later prompt's lookup shows what the store has dropped.

    Args:
        media: The medium of each tier.
        names_pages: Whether pages are to be named to the service.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        media: Mapping[str, Medium] = MEDIA,
        names_pages: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.shape = shape
        self._media = media
        self._names_pages = names_pages
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._saving: dict[int, NamedPage] = {}  # by job id
        self._published: OrderedDict[tuple[PrefixHash, int], _Published] = OrderedDict()
        self._ready: list[PageEvent] = []
        self._to_name: list[NamedPage] = []

    def take(self) -> list[PageEvent]:
        """The events since the last call, in order."""
        taken, self._ready = self._ready, []
        return taken

    def take_named(self) -> list[NamedPage]:
        """The pages to name to the service since the last call."""
        taken, self._to_name = self._to_name, []
        return taken

    @property
    def has_pending(self) -> bool:
        """Whether an idle engine must keep stepping, to publish pages that are being saved."""
        return bool(self._saving or self._ready or self._to_name)

    def on_cleared(self) -> None:
        """Note that the engine dropped its own cache. vLLM publishes that, and routers drop all that they know of the
        engine: pages of the store count again with their next hit.
        """
        self._ready.clear()
        self._published.clear()

    def on_new_request(self, request_id: str, hashes: RequestHashes) -> None:
        self._requests[request_id] = _Request(hashes, self._clock.monotonic_s())

    def on_request_closed(self, request_id: str) -> None:
        """Note that a request is over and the last of its saves is planned."""
        self._requests.pop(request_id, None)

    def on_save_planned(self, job: SaveJob, state: RequestState) -> None:
        event = self._event(state, job.group, job.start_tokens, job.stop_tokens, self._media[_MEMORY])
        if event is not None:
            self._saving[job.job_id] = NamedPage(job.namespace, Boundary(job.stop_tokens, job.prefix), event)

    def on_save_ended(self, job_id: int, *, stored: bool) -> None:
        """Publish the page if every rank's share of it is stored; later calls for the same job do nothing."""
        page = self._saving.pop(job_id, None)
        if page is not None and stored:
            self._publish(page)

    def on_staged(self, state: RequestState, staged: Staged) -> None:
        """Publish the pages of a hit: they are in memory now, and if all were read from one tier, also there."""
        media = [self._media[_MEMORY]]
        if len(staged.sources) == 1:  # of several tiers it is not known which has which page
            media += [self._media[tier] for tier in staged.sources if tier in self._media and tier != _MEMORY]
        pages = {(key.prefix, key.group): span for key, span in zip(staged.keys, staged.spans, strict=True)}
        for (prefix, group), (start, stop) in pages.items():
            event = self._event(state, group, start, stop, media[0])
            if event is not None:
                page = NamedPage(staged.keys[0].namespace, Boundary(stop, prefix), event)
                for medium in media:
                    self._publish(replace(page, event=replace(event, medium=medium)))

    def on_lookup(self, state: RequestState) -> None:
        """Publish the removal of pages that were published before a prompt came and that its lookup did not find.

        Called before a save of the request is planned; only the first call after the lookup's answer has an effect.
        """
        request = self._requests.get(state.request_id)
        if request is None or request.is_compared or not state.lookup_is_noted:
            return
        request.is_compared = True
        answer = state.lookup_answer
        if answer is None or state.chain is None:
            return
        # the chain may have grown since: its first boundaries are the ones of the query
        for boundary, groups in zip(state.chain.boundaries, answer.groups_present, strict=False):
            for group in range(len(self.shape.groups)):
                page = self._published.get((boundary.prefix, group))
                if page is None or groups >> group & 1 or page.published_s >= request.opened_s:
                    continue
                del self._published[boundary.prefix, group]
                self._take_back(group, page)

    def _publish(self, named: NamedPage) -> None:
        event, prefix = named.event, named.boundary.prefix
        page = self._published.setdefault((prefix, event.group), _Published(event.hashes))
        self._published.move_to_end((prefix, event.group))
        page.published_s = now_s = self._clock.monotonic_s()
        if self._names_pages and (page.named_s is None or now_s - page.named_s > _NAMED_S):
            page.named_s = now_s
            self._to_name.append(named)
        if event.medium not in page.media:
            page.media.append(event.medium)
            self._ready.append(event)
        if len(self._published) > REMEMBERED_PAGES:  # no later removal could reach subscribers
            (_, group), oldest = self._published.popitem(last=False)
            self._take_back(group, oldest)

    def _take_back(self, group: int, page: _Published) -> None:
        self._ready += [PageEvent(group, page.hashes, medium, removed=True) for medium in page.media]

    def _event(
        self, state: RequestState, group: int, start_tokens: int, stop_tokens: int, medium: Medium
    ) -> PageEvent | None:
        """The event for a span, or for the block of a state; `None`: vLLM's hashes do not cover whole blocks of it."""
        request, block_tokens = self._requests.get(state.request_id), self.shape.groups[group].facts.block_tokens
        if request is None or block_tokens % request.hashes.hash_tokens:
            return None
        known = request.hashes
        if start_tokens == stop_tokens:  # a state: vLLM keeps it in the block that ends there
            start_tokens = stop_tokens - block_tokens
        if stop_tokens > min(len(known.block_hashes) * known.hash_tokens, len(state.tokens)):
            return None
        ends = range(start_tokens + block_tokens, stop_tokens + 1, block_tokens)
        return PageEvent(
            group=group,
            medium=medium,
            hashes=tuple(known.block_hashes[end // known.hash_tokens - 1] for end in ends),
            parent=known.block_hashes[start_tokens // known.hash_tokens - 1] if start_tokens else None,
            tokens=tuple(state.tokens[start_tokens:stop_tokens]) if known.are_of_tokens else (),
            block_tokens=block_tokens,
            lora_name=known.lora_name,
            lora_id=known.lora_id,
        )
