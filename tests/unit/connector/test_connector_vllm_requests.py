"""vLLM's own requests, read as content: what can be known of them is, what cannot is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from connector.prefix_hash import AdapterRequest, MediaItem, PrefixChain, PromptContent, UncacheableContent
from connector.vllm.requests import PoolPins, RequestReader, RestoredMedia, read_step, read_trace
from connector.weights import adapter_identities

HASH = "5" * 64
TRUSTING = RequestReader(trusts_media=True)


def request(tokens: list[int] | None = None, **changes: Any) -> Request:
    tokens = list(range(64)) if tokens is None and "prompt_embeds" not in changes else tokens
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **changes)


def image(identifier: str = HASH, *, mm_hash: str | None = None, offset: int = 3) -> Any:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 20), mm_hash)


def adapter(name: str = "a", **changes: Any) -> LoRARequest:
    return LoRARequest(name, 1, "/adapters/a", **changes)


def refusal(reader: RequestReader, asked: Request) -> str:
    with pytest.raises(UncacheableContent) as caught:
        reader.content(asked)
    return caught.value.reason


def hashes(asked: Request, reader: RequestReader = TRUSTING) -> list[bytes]:
    """Hashes as the scheduler side makes them, for an adapter-free request."""
    chain = PrefixChain(16, asked.cache_salt, reader.content(asked))
    chain.extend(tuple(asked.all_token_ids))
    return [bytes(boundary.prefix) for boundary in chain.boundaries]


def test_plain_requests_have_no_content() -> None:
    """Tokens and a salt are all: nothing is read that costs anything."""
    assert RequestReader().content(request()) is None
    assert RequestReader().content(request(cache_salt="s")) is None


def test_adapters() -> None:
    """Number and path of an adapter, never its name; one that is replaced in place has no known content."""
    content = RequestReader().content(request(lora_request=adapter()))
    assert content == PromptContent(adapter=AdapterRequest(1, "/adapters/a", ()))
    assert RequestReader().content(request(lora_request=adapter("another name"))) == content
    reader = RequestReader()
    assert refusal(reader, request(lora_request=adapter(load_inplace=True))) == "adapter_replaced"
    # its number has these weights from now on, whatever a later request says of its files
    assert refusal(reader, request(lora_request=adapter())) == "adapter_replaced"


def test_the_files_of_an_adapter_are_those_of_its_first_request(tmp_path: Path) -> None:
    """vLLM reads them for a request of which nothing is cached too, and keeps what it has read."""
    folder = tmp_path / "a"
    reader, asked = RequestReader(), request(lora_request=LoRARequest("a", 1, str(folder)))

    def identities() -> tuple[str, ...] | None:
        content = reader.content(asked)
        assert content is not None and content.adapter is not None
        return content.adapter.identities

    assert identities() == ()
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("old")
    first = identities()
    assert first == adapter_identities(str(folder)) and len(first) == 2
    (folder / "adapter_model.safetensors").write_text("newer")
    assert identities() == first != adapter_identities(str(folder))


def test_a_streaming_session_replaces_an_adapter_too() -> None:
    """It is refused for being one, but later requests with that number have its weights."""
    reader = RequestReader()
    session = request(lora_request=adapter(load_inplace=True), resumable=True)
    assert refusal(reader, session) == "streaming_session"
    assert refusal(reader, request(lora_request=adapter())) == "adapter_replaced"


def test_a_number_of_two_adapters() -> None:
    """vLLM may schedule the second request first, and compute both with its files."""
    reader = RequestReader()
    assert reader.content(request(lora_request=adapter())) is not None
    other = adapter()
    other.lora_path = "/adapters/b"
    assert refusal(reader, request(lora_request=other)) == "adapter_replaced"
    assert refusal(reader, request(lora_request=adapter())) == "adapter_replaced"


def test_media_are_refused_unless_trusted() -> None:
    """64 hex digits may be vLLM's hash or a user's choice: neither is cached by default."""
    for identifier in (HASH, "my picture"):
        assert refusal(RequestReader(), request(mm_features=[image(identifier)])) == "multimodal"
        content = TRUSTING.content(request(mm_features=[image(identifier)]))
        assert content == PromptContent(media=(MediaItem("image", identifier, 3, 20),))


@pytest.mark.parametrize("identifier", ["renderer0-mm-1-image-0", HASH])
def test_numbers_are_no_content(identifier: str) -> None:
    """Without a cache of its own vLLM numbers media from one at every start, and hashes a number with the settings of
    the request: never cached, even with trust."""
    reader = RequestReader.of(trusts_media=True, media_rules={"numbered": True}, adapter_rules={})
    assert refusal(reader, request(mm_features=[image(identifier)])) == "media_without_hash"


def test_items_that_share_tokens_are_refused() -> None:
    """A video and its sound: vLLM's hashes of blocks leave out the sound, so its own cache may hold another one's."""
    video, sound = (MultiModalFeatureSpec(None, name, HASH, PlaceholderRange(3, 20)) for name in ("video", "audio"))
    assert refusal(TRUSTING, request(mm_features=[video, sound])) == "media_overlap"
    following = MultiModalFeatureSpec(None, "audio", HASH, PlaceholderRange(23, 20))
    content = TRUSTING.content(request(mm_features=[following, video]))
    assert content is not None and [item.start_tokens for item in content.media] == [3, 23]
    init_none_hash(sha256)
    hashes_of = [
        request(
            mm_features=[video, MultiModalFeatureSpec(None, "audio", other, PlaceholderRange(3, 20))],
            block_hasher=get_request_block_hasher(16, sha256),
        ).block_hashes
        for other in (HASH, "6" * 64)
    ]
    assert hashes_of[0][0] == hashes_of[1][0], "vLLM names both items now: the refusal is not needed any more"


def test_media_under_adapters() -> None:
    """An adapter is identified by its content, so its name is removed; if it changes media they are not cached."""
    asked = request(mm_features=[image(f"a:{HASH}", mm_hash=HASH)], lora_request=adapter())
    content = TRUSTING.content(asked)
    assert content is not None
    assert content.media[0].identifier == HASH
    towers = RequestReader.of(trusts_media=True, media_rules={}, adapter_rules={"media_towers": "true"})
    assert refusal(towers, asked) == "media_adapter"
    assert towers.content(request(mm_features=[image()])) == TRUSTING.content(request(mm_features=[image()]))


def test_settings_that_change_media_count() -> None:
    """Two engines that make something else of one image do not share it; what comes before the image they do."""
    plain, other = (
        RequestReader.of(trusts_media=True, media_rules=rules, adapter_rules={})
        for rules in ({}, {"mm_processor_kwargs": {"size": 2}})
    )
    asked = request(mm_features=[image(offset=20)])
    one, two = hashes(asked, plain), hashes(asked, other)
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
    assert hashes(request(), plain) == hashes(request(), other)


def test_media_hash_as_they_stand() -> None:
    """Another image, or the same one elsewhere, is another prompt from there on; equal ones are equal."""
    base = hashes(request(mm_features=[image(offset=20)]))
    assert hashes(request(mm_features=[image(offset=20, mm_hash=HASH)])) == base
    for other in (image("6" * 64, offset=20), image(offset=21)):
        found = hashes(request(mm_features=[other]))
        assert found[0] == base[0]
        assert not set(found[1:]) & set(base[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_their_bytes(dtype: torch.dtype) -> None:
    """Equal rows are equal prompts, in any memory; one changed value changes all that follows."""
    rows = torch.arange(64 * 4, dtype=torch.float32).reshape(64, 4).to(dtype)
    base = hashes(request(prompt_embeds=rows))
    wide = torch.zeros(64, 8, dtype=dtype)
    wide[:, ::2] = rows
    assert hashes(request(prompt_embeds=wide[:, ::2])) == base
    changed = rows.clone()
    changed[20, 1] += 1
    found = hashes(request(prompt_embeds=changed))
    assert (found[0] == base[0], set(found[1:]) & set(base[1:])) == (True, set())
    assert not set(base) & set(hashes(request([0] * 64)))  # the ids that vLLM puts in their place
    assert hashes(request(prompt_embeds=rows[:48])) == base[:3]


def test_embeddings_among_tokens() -> None:
    """Where ids and embeddings are mixed, it counts which of the two each position has."""
    rows = torch.zeros(64, 4)
    tokens = list(range(100, 164))
    found = [
        hashes(request(tokens, prompt_embeds=rows, prompt_is_token_ids=[index != at for index in range(64)]))
        for at in (40, 41)
    ]
    assert found[0][:2] == found[1][:2]
    assert not set(found[0][2:]) & set(found[1][2:])


def test_embeddings_of_another_type() -> None:
    """The same numbers in another type are other bytes and another prompt."""
    rows = torch.zeros(64, 4)
    assert not set(hashes(request(prompt_embeds=rows))) & set(hashes(request(prompt_embeds=rows.half())))


def test_what_cannot_be_known() -> None:
    """Sessions that rewrite their prompt, and embeddings that are no matrix, are refused by name."""
    assert refusal(TRUSTING, request(resumable=True)) == "streaming_session"
    assert refusal(TRUSTING, request(prompt_embeds=torch.zeros(2, 3, 4))) == "prompt_embeds"


def test_the_trace_of_a_request_is_read_where_vllm_traces() -> None:
    """The header of W3C; nothing where there is none."""
    assert read_trace(request(trace_headers={"traceparent": "00-a-b-01", "tracestate": "x"})) == "00-a-b-01"
    assert read_trace(request(trace_headers={"tracestate": "x"})) == read_trace(request()) == ""


def test_a_step_s_tables_are_read_once_and_only_where_they_are_needed() -> None:
    """vLLM copies all block ids of a request for each answer, and a step may save hundreds of its pages."""
    asked: list[str] = []

    def get_block_ids(request_id: str) -> tuple[list[int], ...]:
        asked.append(request_id)
        return ([1, 2, 3],)

    step = read_step(
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=16)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["old"], num_computed_tokens=[64]),
            num_scheduled_tokens={"new": 32, "old": 4},
            scheduled_spec_decode_tokens={"old": [7, 8, 9]},
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=get_block_ids, boundary_state_offloads={}),
        )
    )
    assert (step.final_tokens, step.computed_tokens) == ({"new": 48, "old": 65}, {"new": 16, "old": 64})
    assert not asked
    assert [step.tables["new"] for _ in range(3)] == [([1, 2, 3],)] * 3
    assert asked == ["new"]


def test_vllm_drops_its_cache_although_blocks_were_held() -> None:
    """It does not while one is held, and what it computed with older weights would stay: ours are given back before.
    We learn when it was done, and only then."""
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    pins = PoolPins(pool)
    blocks = pool.get_new_blocks(2)
    held = [block.block_id for block in blocks]
    pins.pin(held)
    pool.free_blocks(blocks)
    assert not pool.reset_prefix_cache()
    calls = []
    pins.around_reset(lambda: calls.append("before"), lambda: calls.append("after"))
    assert not pool.reset_prefix_cache()
    assert calls == ["before"]
    pins.around_reset(lambda: pins.unpin(held), lambda: calls.append("done"))
    assert pool.reset_prefix_cache()
    assert pins.is_empty
    assert calls == ["before", "before", "after", "done"]


@pytest.mark.parametrize("ended", [False, True])
def test_a_restored_request_keeps_its_media(*, ended: bool) -> None:
    """vLLM leaves out those whose tokens are restored, and its first runner may have to compute them later."""
    media = [replace(image(offset=offset), data=MultiModalKwargsItem()) for offset in (3, 40)]
    asked = request(mm_features=media)
    asked.num_computed_tokens = 32
    told = [
        NewRequestData.from_request(one, ([],)) for one in (asked, Request("s", [1, 2], asked.sampling_params, None))
    ]
    assert [item.data is None for item in told[0].mm_features] == [True, False]
    restored = RestoredMedia()
    restored.note(asked)
    if ended:
        restored.forget(asked.request_id)
    restored.complete(SimpleNamespace(scheduled_new_reqs=told))
    assert [item.data is None for item in told[0].mm_features] == [ended, False]
    assert told[1].mm_features == []
    assert not vars(restored)["_media"]
