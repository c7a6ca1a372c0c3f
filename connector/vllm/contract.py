"""What we use of vLLM, as a table, and whether the installed release has it.

vLLM guarantees none of these names to code outside of it. This module finds missing names before another module of ours
imports them. Two names are not in the table, since a front end would need seconds to import them: `engine_facts.py`
imports them late, on a rank. Nor are those in it that only blending or the tier of vLLM's offloading uses: each checks
the release itself. A release that has all names may still call its hooks in another order, so a release is used only
once it was tested.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Release = tuple[int, int]
"""Major and minor number: `(0, 32)`."""

TESTED_RELEASES: tuple[Release, ...] = ((0, 30), (0, 31), (0, 32), (0, 33))
"""By `make test-vllm`; docs/vllm.md says how each was tested."""

_FINAL = re.compile(r"v?[0-9]+(\.[0-9]+)+(\.post[0-9]+)?(\+[A-Za-z0-9.]+)?")
"""A version that is no development build. The text after a plus sign names the build: `0.32.0+cpu`."""

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def release_of(version: object) -> Release | None:
    """The release of a version; `None` for a build that does not name one (`dev`)."""
    numbers = re.match(r"v?(\d+)\.(\d+)(?!\d)", version) if isinstance(version, str) else None
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def is_tested(version: object) -> bool:
    """Whether a version is a tested release, or a fix of one.

    A development build or a release candidate (`0.33.1.dev12`, `0.33.0rc1`) is not: it may have what only the next
    release has.
    """
    is_final = isinstance(version, str) and _FINAL.fullmatch(version) is not None
    return is_final and release_of(version) in TESTED_RELEASES


def advice_on_releases() -> str:
    """What an operator can do about a vLLM that cannot be used."""
    tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED_RELEASES)
    return f"use vLLM {tested}, or a kvstore that was tested with yours; see docs/vllm.md"


@dataclass(frozen=True, slots=True)
class Use:
    """One name of vLLM that we use.

    Attributes:
        name: A class or a function of the module; empty: the module itself.
        takes: A function's parameters that we pass, by position or name.
        fields: Attributes of a class, or of its objects, that we read.
        hooks: Methods that vLLM calls on us, or we call on our base, with exactly these parameters.
    """

    module: str
    name: str = ""
    takes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    hooks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_HOOKS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "_get_connector_metadata": (),
    # of the scheduler's process
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "build_connector_meta": ("scheduler_output",),
    "get_finished_count": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "has_pending_push_work": (),
    "on_new_request": ("request",),
    "request_finished": ("request", "block_ids"),
    "requires_kv_delivery": (),
    "reset_cache": (),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "take_events": (),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    # of a rank
    "bind_connector_metadata": ("connector_metadata",),
    "build_connector_worker_meta": (),
    "get_handshake_metadata": (),
    "get_transfer_results": ("finished_req_ids",),
    "register_kv_caches": ("kv_caches",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "wait_for_save": (),
    # of both, and of the front end
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "get_kv_connector_stats": (),
    "shutdown": (),
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SPECS = "vllm.v1.kv_cache_interface"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

USES: tuple[Use, ...] = (
    Use("vllm", fields=("__version__",)),
    Use("vllm.envs", fields=_names("environment_variables is_set")),
    # our base class, and what it passes
    Use(BASE, "KVConnectorBase_V1", hooks=_HOOKS),
    Use(BASE, "SupportsHMA", hooks={"request_finished_all_groups": ("request", "block_ids")}),
    Use(BASE, "KVConnectorRole", fields=_names("SCHEDULER WORKER")),
    Use(BASE, "KVConnectorMetadata"),
    Use(BASE, "KVConnectorHandshakeMetadata"),
    Use(BASE, "KVConnectorWorkerMetadata", hooks={"aggregate": ("other",)}),
    Use(BASE, "KVConnectorTransferResults", fields=_names("finished_recving failed_recving")),
    Use(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        fields=_names("finished_recving failed_recving kv_connector_worker_meta"),
    ),
    # requests, steps and blocks
    Use(
        "vllm.v1.request",
        "Request",
        fields=_names(
            "request_id prompt_token_ids all_token_ids num_tokens num_computed_tokens block_hashes cache_salt "
            "lora_request mm_features prompt_embeds prompt_is_token_ids kv_transfer_params "
            "skip_reading_prefix_cache status resumable trace_headers"
        ),
    ),
    Use(
        "vllm.v1.request", "RequestStatus", fields=_names("FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_REPETITION")
    ),
    Use(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        fields=_names(
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens scheduled_spec_decode_tokens "
            "preempted_req_ids kv_connector_block_state"
        ),
    ),
    Use("vllm.v1.core.sched.output", "NewRequestData", fields=_names("req_id num_computed_tokens mm_features")),
    Use("vllm.v1.core.sched.output", "CachedRequestData", fields=_names("req_ids num_computed_tokens")),
    Use("vllm.v1.core.sched.output", "KVConnectorBlockState", fields=_names("boundary_state_offloads get_block_ids")),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", fields=("get_block_ids",)),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool",
        fields=_names("blocks num_gpu_blocks cached_block_hash_to_block"),
        hooks={
            "get_num_free_blocks": (),
            "touch": ("blocks",),
            "free_blocks": ("ordered_blocks",),
            "reset_prefix_cache": (),
        },
    ),
    # the model's cache
    Use(_SPECS, "KVCacheConfig", fields=_names("num_blocks kv_cache_groups prefix_cacheable_group_ids")),
    Use(_SPECS, "KVCacheGroupSpec", fields=_names("layer_names kv_cache_spec is_eagle_group")),
    Use(
        _SPECS,
        "FullAttentionSpec",
        fields=_names(
            "block_size num_kv_heads num_heads head_size head_size_v dtype kv_quant_mode tokens_per_state "
            "state_content_bytes state_content_size_bytes"
        ),
    ),
    Use(_SPECS, "SlidingWindowSpec", fields=_names("sliding_window extra_retained_tokens")),
    Use(_SPECS, "ChunkedLocalAttentionSpec", fields=("attention_chunk_size",)),
    Use(_SPECS, "MLAAttentionSpec", fields=("model_version",)),
    Use(_SPECS, "MambaSpec", fields=_names("block_size shapes dtypes tp_replicated mamba_cache_mode")),
    Use(_SPECS, "UniformTypeKVCacheSpecs", fields=("kv_cache_specs",)),
    Use(_SPECS, "KVQuantMode", fields=_names("NONE FP8_PER_TENSOR")),
    Use(_SPECS, "group_kernel_blocks", takes=_names("cache num_blocks")),
    Use("vllm.v1.core.kv_cache_utils", "resolve_kv_cache_block_sizes", takes=_names("kv_cache_config vllm_config")),
    # what an engine is
    Use("vllm.distributed.parallel_state", "get_pp_group"),
    Use("vllm.platforms", fields=("current_platform",)),
    Use("vllm.platforms.interface", "Platform", fields=_names("device_type is_cpu is_cuda get_cpu_architecture")),
    Use(
        "vllm.config",
        "VllmConfig",
        fields=_names(
            "model_config parallel_config cache_config load_config lora_config speculative_config "
            "compilation_config kv_transfer_config ec_transfer_config kv_events_config scheduler_config device_config"
        ),
    ),
    Use(
        "vllm.config",
        "ModelConfig",
        fields=_names(
            "model served_model_name revision architectures dtype quantization quantization_config hf_config "
            "hf_text_config max_model_len model_class_overrides multimodal_config is_diffusion is_mm_prefix_lm "
            "get_total_num_kv_heads pooler_config is_prefix_caching_supported"
        ),
    ),
    Use("vllm.config", "MultiModalConfig", fields=_names("video_pruning_rate mm_encoder_attn_dtype")),
    Use("vllm.config", "ECTransferConfig", fields=("is_ec_consumer",)),
    Use(
        "vllm.config",
        "ParallelConfig",
        fields=_names(
            "rank tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
            "prefill_context_parallel_size local_world_size data_parallel_size data_parallel_size_local "
            "data_parallel_index worker_cls"
        ),
    ),
    Use("vllm.config", "SchedulerConfig", fields=("max_num_batched_tokens",)),
    Use(
        "vllm.config",
        "CacheConfig",
        fields=_names("block_size cache_dtype enable_prefix_caching prefix_cache_retention_interval"),
    ),
    Use("vllm.config", "LoadConfig", fields=_names("load_format download_dir")),
    Use("vllm.config", "LoRAConfig", fields=_names("target_modules lora_dtype enable_tower_connector_lora")),
    Use("vllm.lora.request", "LoRARequest", fields=_names("lora_int_id lora_path load_inplace name adapter_id")),
    Use("vllm.v1.engine.core", "EngineCore", fields=("add_lora", "collective_rpc")),
    Use("vllm.config", "KVTransferConfig", fields=_names("kv_role kv_connector_extra_config kv_load_failure_policy")),
    # statistics and events
    Use(_METRICS, "KVConnectorStats", hooks={"aggregate": ("other",), "reduce": (), "reset": (), "is_empty": ()}),
    Use(_METRICS, "KVConnectorPromMetrics"),
    Use("vllm.config", "KVEventsConfig", fields=("enable_kv_cache_events",)),
    Use("vllm.distributed.kv_events", "BlockStored", fields=_names("block_hashes medium locality group_idx")),
    Use("vllm.distributed.kv_events", "BlockRemoved", fields=_names("block_hashes medium locality group_idx")),
    Use("vllm.distributed.kv_events", "KVCacheEvent"),
    Use("vllm.v1.core.kv_cache_utils", "BlockHash"),
    Use("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash"),
    Use(_SPECS, "get_kv_cache_spec_kind"),
    Use(_SPECS, "get_kv_cache_spec_sliding_window"),
)


def missing(uses: tuple[Use, ...] = USES) -> list[str]:
    """The entries of the table that the installed vLLM does not have, in words."""
    return [lack for use in uses for lack in _missing_of(use)]


def _missing_of(use: Use) -> Iterator[str]:
    try:
        module = importlib.import_module(use.module)
    except ImportError:
        yield use.module
        return
    except Exception as error:  # noqa: BLE001 - vLLM's code: after any error of an import its module is missing
        yield f"{use.module} (its import raised {type(error).__name__}: {error})"
        return
    path = f"{use.module}.{use.name}" if use.name else use.module
    owner = getattr(module, use.name, None) if use.name else module
    if owner is None:
        yield path
        return
    if use.takes and (unknown := [name for name in use.takes if name not in (_parameters(owner) or ())]):
        yield f"{path} with {', '.join(unknown)}"
    for name in use.fields:
        if not _has_field(owner, name):
            yield f"{path}.{name}"
    for name, expected in use.hooks.items():
        if not hasattr(owner, name):
            yield f"{path}.{name}"
        elif (seen := _parameters(getattr(owner, name))) != expected:
            takes = "has no signature" if seen is None else f"takes ({', '.join(seen)})"
            yield f"{path}.{name}({', '.join(expected)}), it {takes}"
    if use.hooks:
        for name in sorted(getattr(owner, "__abstractmethods__", frozenset()) - use.hooks.keys()):
            yield f"{path} without {name}, which every connector must answer"


def _parameters(function: Any) -> tuple[str, ...] | None:
    """Names of its parameters; `None`: it is no function, or has no signature."""
    function = function.fget if isinstance(function, property) else function
    try:
        return tuple(name for name in inspect.signature(function).parameters if name != "self")
    except (TypeError, ValueError):
        return None


def _has_field(owner: Any, name: str) -> bool:
    """Whether a module, a class or its objects have an attribute, as far as the class shows it."""
    if hasattr(owner, name):
        return True
    for cls in getattr(owner, "__mro__", ()):
        own = vars(cls)
        if any(name in own.get(kind, ()) for kind in ("__annotations__", "__dataclass_fields__", "__struct_fields__")):
            return True
        code = getattr(own.get("__init__"), "__code__", None)  # what a plain class sets in its constructor
        if code is not None and name in code.co_names:
            return True
    return False
