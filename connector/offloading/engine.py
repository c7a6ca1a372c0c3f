"""What vLLM says of its model and of the chunks that it offloads, as far as their bytes depend on it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_stack
from typing import Any, TypeVar

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from connector.facts import ModelFacts
from connector.identity import describe_model
from connector.settings import ConnectorSettings
from connector.vllm.contract import release_of
from connector.vllm.engine_facts import read_model
from connector.vllm.model_facts import media_refusal, plain
from connector.weights import find_weights_id
from kvstore.client import describe_pages
from kvstore.errors import InvalidRequest
from kvstore.model.namespace import NamespaceDescription

TESTED_RELEASES = ((0, 32),)
"""vLLM calls its interface of tiers experimental: another release may order calls or bytes otherwise."""

_FORMAT = 1
_HASHES = ("sha256", "sha256_cbor")
"""vLLM's algorithms for keys, of which no two prompts have one key. The others are no cryptographic hashes."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Group:
    """One of vLLM's groups of layers that it offloads.

    Attributes:
        index: As in keys.
        chunk_tokens: Tokens of a chunk.
        chained: A chunk is of use only behind all chunks before it; else alone, or with the few before it.
    """

    index: int
    chunk_tokens: int
    chained: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that offloads.

    Attributes:
        config: vLLM's.
        model: What it computes.
        groups: The groups that it offloads.
        layout: What a chunk's bytes depend on beside the model, as plain values.
    """

    config: VllmConfig
    model: ModelFacts
    groups: tuple[Group, ...]
    layout: Mapping[str, Any]


def read_engine(spec: Any, slot_bytes: int, settings: ConnectorSettings) -> Engine:
    """The engine whose tier is being made. Call it from the tier's constructor.

    Args:
        spec: vLLM's `OffloadingSpec`.
        slot_bytes: Of a chunk in the primary tier.

    Raises:
        InvalidRequest: It cannot be cached, and why.
    """
    if release_of(vllm.__version__) not in TESTED_RELEASES and not settings.allow_untested_vllm:
        releases = ", ".join(f"{major}.{minor}" for major, minor in TESTED_RELEASES)
        raise InvalidRequest(
            "this vLLM was not tested with this tier",
            expected=releases,
            seen=vllm.__version__,
            next="allow_untested_vllm",
        )
    config, cache = _find_in_callers(VllmConfig, spec), _find_in_callers(KVCacheConfig, spec)
    if config is None or cache is None:
        raise InvalidRequest("vLLM does not show its configuration to the tier: not made by OffloadingConnector")
    _refuse(config, settings)
    offloaded, blocks = spec.config, spec.config.cache.blocks_per_chunk
    specs = [cache.kv_cache_groups[group.group_id].kv_cache_spec for group in offloaded.groups]
    groups = tuple(
        Group(group.group_id, group.tokens_per_block * blocks, _needs_all(one))
        for group, one in zip(offloaded.groups, specs, strict=True)
    )
    parallel = asdict(offloaded.parallel)
    layout = {
        "slot_bytes": slot_bytes,
        "worker_block_bytes": offloaded.worker_kv_bytes_per_block,
        "blocks_per_chunk": blocks,
        "tokens_per_hash": offloaded.cache.tokens_per_hash,
        "cache_layout": str(offloaded.kv_cache_layout),
        "canonical": offloaded.canonical_layout,
        "replicated": bool(spec.replicated_layout),
        **{name: parallel[name] for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")},
        "groups": [
            [group.group_id, repr(one), list(group.layer_names)]
            for group, one in zip(offloaded.groups, specs, strict=True)
        ],
        "hash": config.cache_config.prefix_caching_hash_algo,
        # what chooses the kernels that write a block
        "attention": plain(asdict(config.attention_config)),
        "second_runner": bool(config.use_v2_model_runner),
        "device": str(current_platform.get_device_name()),
        "machine": platform.machine(),
    }
    model = read_model(config, weights_may_change=settings.weights_may_change)
    return Engine(config, model, groups, layout)


def describe_groups(engine: Engine, settings: ConnectorSettings, cache_folder: Path) -> dict[int, NamespaceDescription]:
    """The namespace of each group. Reads all weights once, unless an operator or an earlier start named them.

    Raises:
        InvalidRequest: They cannot be digested: the operator has to set `weights_id`.
        OSError: A file cannot be read.
    """
    weights_id = settings.weights_id or find_weights_id(engine.model, cache_folder)
    if (refusal := media_refusal(engine.model.media_rules)) is not None:
        raise InvalidRequest(f"not cached: {refusal[1]}", field="model", seen=engine.model.model_path)
    common = {
        "format": _FORMAT,
        "engine": f"vllm {vllm.__version__} offloading",
        **describe_model(engine.model, weights_id),
        "media_rules": dict(engine.model.media_rules),
        "chunks": dict(engine.layout),
    }
    return {
        group.index: describe_pages(
            {**common, "group": group.index}, page_tokens=group.chunk_tokens, chained=group.chained
        )
        for group in engine.groups
    }


def _refuse(config: VllmConfig, settings: ConnectorSettings) -> None:
    """Refuse an engine whose keys do not name all that its bytes depend on."""
    if config.lora_config is not None:
        raise InvalidRequest("not cached: vLLM's keys name an adapter and its path, not its content")
    if (seen := config.cache_config.prefix_caching_hash_algo) not in _HASHES:
        raise InvalidRequest(
            "not cached: two prompts may have one key", field="prefix_caching_hash_algo", expected=_HASHES, seen=seen
        )
    if config.model_config.is_multimodal_model and not settings.trust_mm_uuids:
        raise InvalidRequest("not cached: users may choose the identifiers of media; see trust_mm_uuids")
    if config.model_config.is_multimodal_model and not config.cache_config.enable_prefix_caching:
        raise InvalidRequest("not cached: vLLM may number media instead of hashing them without prefix caching")


def _needs_all(spec: Any) -> bool:
    return isinstance(spec, FullAttentionSpec) and getattr(spec, "sliding_window", None) is None


def _find_in_callers(kind: type[Found], spec: Any) -> Found | None:
    """A variable of this type in the calls that make the tier.

    vLLM passes a tier a summary that lacks the weights' revision, types, quantization and overrides. The scheduler side
    of its connector, which makes the tier, has the whole configuration.
    """
    for frame, _ in walk_stack(sys._getframe(1)):
        values = list(frame.f_locals.values())
        if any(value is spec for value in values):
            for value in values:
                if isinstance(value, kind):
                    return value
    return None
