"""vLLM's requests, steps and block pool, as plain values; read without importing vLLM."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from connector.prefix_hash import AdapterRequest, EmbeddedPrompt, MediaItem, PromptContent, UncacheableContent
from connector.scheduler.hook_facts import StateOffer, StepFacts
from connector.vllm.model_facts import media_refusal
from connector.weights import adapter_identities

ANY_ADAPTER = 0
"""vLLM's numbers of adapters begin with 1."""


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads the content of requests of one engine.

    Attributes:
        trusts_media: Identifiers of media count as their content, even if a user chose them.
        media_rules: Digest of the engine's settings that change how media items are processed.
        media_refusal: Why no item of the engine is cached: the label of a counter, and the reason in words.
        adapters_on_media: Adapters change how media items are processed.
        adapters: What each adapter's number first meant.
        replaced_adapters: Numbers that were loaded with `load_inplace`, or that had two folders: it is not known whose
            files they mean since. `ANY_ADAPTER` stands for all numbers.
    """

    trusts_media: bool = False
    media_rules: str = ""
    media_refusal: tuple[str, str] | None = None
    adapters_on_media: bool = False
    adapters: dict[int, AdapterRequest] = field(default_factory=dict)
    replaced_adapters: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, *, trusts_media: bool, media_rules: Mapping[str, Any], adapter_rules: Mapping[str, str]
    ) -> RequestReader:
        """A reader for the settings of the operator and the engine."""
        digest = hashlib.sha256(json.dumps(media_rules, sort_keys=True).encode()).hexdigest() if media_rules else ""
        towers = "media_towers" in adapter_rules
        return cls(trusts_media, digest, media_refusal(media_rules), adapters_on_media=towers)

    def content(self, request: Any) -> PromptContent | None:
        """The parts of a request that are not tokens; `None`: there are none.

        Raises:
            UncacheableContent: It depends on something that is not known to be content.
        """
        if request.lora_request is not None:
            self.note_adapter(request.lora_request)  # first: the request may be refused for another reason
        if getattr(request, "resumable", False):
            raise UncacheableContent("streaming_session", "a streaming session changes its prompt")
        if request.lora_request is None and not request.mm_features and request.prompt_embeds is None:
            if request.prompt_token_ids is None:
                raise UncacheableContent("no_tokens", "the prompt has no tokens")
            return None
        return PromptContent(
            adapter=self._adapter(request.lora_request),
            media=self._media(request.mm_features or (), request.lora_request),
            embedded=_embedded(request.prompt_embeds, request.prompt_is_token_ids),
        )

    def _media(self, features: Sequence[Any], lora_request: Any) -> tuple[MediaItem, ...]:
        if not features:
            return ()
        if not self.trusts_media:
            raise UncacheableContent("multimodal", "identifiers of media are not trusted")
        if self.media_refusal is not None:
            raise UncacheableContent(*self.media_refusal)
        if lora_request is not None and self.adapters_on_media:
            raise UncacheableContent("media_adapter", "the adapter changes how media are processed")
        items = sorted(map(self._item, features), key=lambda item: item.start_tokens)
        if any(one.start_tokens + one.num_tokens > other.start_tokens for one, other in pairwise(items)):
            # e.g. a video and its sound: vLLM's hash of a block names one of them (0.32), so that its own cache may
            # hold blocks of another sound, and what is computed behind them is wrong
            raise UncacheableContent("media_overlap", "two items share tokens, and vLLM's own cache ignores one")
        return tuple(items)

    def _item(self, feature: Any) -> MediaItem:
        identifier = feature.mm_hash or feature.identifier
        position = feature.mm_position
        if self.media_rules:
            identifier = f"{self.media_rules}:{identifier}"
        return MediaItem(str(feature.modality), str(identifier), int(position.offset), int(position.length))

    def note_adapter(self, lora_request: Any) -> None:
        """Note whether an adapter's number still has the files of its path. Called before vLLM reads them.

        vLLM reads the files of the request that it schedules first, which need not be the first one that arrived. An
        operator may also let it load an adapter before any request.
        """
        number, path = int(lora_request.lora_int_id), str(lora_request.lora_path)
        first = self.adapters.get(number, AdapterRequest(number, path))
        if not first.identities:  # what was not there was not read
            self.adapters[number] = replace(first, identities=adapter_identities(first.path))
        if lora_request.load_inplace or self.adapters[number].path != path:
            self.replaced_adapters.add(number)

    def is_replaced(self, number: int) -> bool:
        """Whether it is not known whose files an adapter's number means."""
        return not self.replaced_adapters.isdisjoint((number, ANY_ADAPTER))

    def _adapter(self, lora_request: Any) -> AdapterRequest | None:
        if lora_request is None:
            return None
        number = int(lora_request.lora_int_id)
        if self.is_replaced(number):
            raise UncacheableContent("adapter_replaced", "its number has meant other files, nobody knows until when")
        return self.adapters[number]


class RestoredMedia:
    """The media of requests that are restored, for vLLM's first model runner.

    vLLM tells it a request once, and leaves out the media whose tokens were restored. If vLLM takes the request's
    blocks later and finds nothing of it any more, that runner has to compute these media, and ends the engine (0.32).
    So it gets all of them.
    """

    def __init__(self) -> None:
        self._media: dict[str, Any] = {}  # by request

    def note(self, request: Any) -> None:
        """Note that tokens of a request are being restored."""
        if request.mm_features:
            self._media[request.request_id] = request.mm_features

    def complete(self, output: Any) -> None:
        """Give all their media to the requests that a step's `SchedulerOutput` tells the ranks for the first time."""
        for told in output.scheduled_new_reqs if self._media else ():
            if (media := self._media.pop(told.req_id, None)) is not None:
                told.mm_features = media

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._media.pop(request_id, None)


def read_trace(request: Any) -> str:
    """The W3C `traceparent` of a request; empty if vLLM does not trace (`--otlp-traces-endpoint`)."""
    headers = getattr(request, "trace_headers", None)
    return str(headers.get("traceparent", "")) if headers else ""


def _embedded(rows: torch.Tensor | None, is_token: list[bool] | None) -> EmbeddedPrompt | None:
    if rows is None:
        return None
    if rows.device.type != "cpu" or rows.ndim != 2:
        raise UncacheableContent("prompt_embeds", "embeddings that are not a matrix in host memory")
    # [num_tokens, hidden] of any type -> [num_tokens, hidden * element bytes] bytes
    data = rows.detach().contiguous().view(torch.uint8)
    dtype = str(rows.dtype).removeprefix("torch.")
    return EmbeddedPrompt(dtype, data.shape[1], data.numpy().data.cast("B"), bytes(is_token or ()))


def read_step(output: Any) -> StepFacts:
    """The facts of a step, from vLLM's `SchedulerOutput` while block tables may be read from it."""
    computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    blocks = output.kv_connector_block_state
    final = {}
    for request_id, scheduled in output.num_scheduled_tokens.items():
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        final[request_id] = computed[request_id] + scheduled - drafts
    offers = {
        request_id: [StateOffer(*offer) for offer in offered]
        for request_id, offered in blocks.boundary_state_offloads.items()
    }
    preempted = tuple(output.preempted_req_ids or ())
    return StepFacts(final, _Tables(blocks.get_block_ids), offers, preempted, computed)


class _Tables(dict[str, Sequence[Sequence[int]]]):
    """Block tables of a step's requests, resolved at the first access, since vLLM copies them: most steps need none."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve

    def __missing__(self, request_id: str) -> Sequence[Sequence[int]]:
        tables = self[request_id] = self._resolve(request_id)
        return tables


class PoolPins:
    """`BlockPins` on vLLM's block pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def is_empty(self) -> bool:
        """Whether no block is in use or cached: no request holds KV, and none will get KV that exists now."""
        used_blocks = self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() - 1  # one is vLLM's null block
        return used_blocks == 0 and len(self._pool.cached_block_hash_to_block) == 0

    def around_reset(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call these before vLLM drops its cache, and after it has. It has no hook for that, and does not drop it while
        a block is held: what it computed with old weights would stay.
        """
        reset = self._pool.reset_prefix_cache

        @functools.wraps(reset)
        def reset_prefix_cache() -> bool:
            before()
            if not reset():
                return False
            after()
            return True

        self._pool.reset_prefix_cache = reset_prefix_cache

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        # the last first, as vLLM does: a prefix is worth more than what follows it
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
