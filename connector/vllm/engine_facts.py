"""Reads an engine's configuration and the model's cache into `connector.facts`."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from connector.facts import CellFacts, EngineFacts, GroupFacts, ModelFacts, StateFacts
from connector.identity import CacheShape
from connector.scheduler.lookups import takes_whole_prompts
from connector.settings import ConnectorSettings
from connector.vllm.contract import Release, is_tested, release_of
from connector.vllm.model_facts import kv_head_counts, plain, read_rules
from connector.vllm.model_files import UNKNOWN, code_digest, digest_package, plugin_digests
from kvstore.errors import InvalidRequest
from kvstore.model.instance import EngineInstance
from kvstore.model.kinds import ChunkedLocal, FullAttention, GroupKind, Latent, Recurrent, SlidingWindow
from kvstore.runtime.machine import usable_bytes

_QUANT_MODES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
_TOKEN_BACKENDS = (
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
    # both store with Triton's kernel alone, in a cache of one spec, in a layout that both readers use
    *("TRITON_FLASH_ATTN", "TRITON_FLASHINFER"),
    *("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"),
)
"""On a GPU these store a token's key and then its value, or its latent vector, by the tensor's strides (0.32)."""


_ENVIRONMENT = (
    *("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_CPU_INT4_W4A8"),
    *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_DEEPEPLL_NVFP4_DISPATCH"),
    "VLLM_B12X_MOE_FP4_FORCE_A16",
)
"""They choose experts at random, or quantise weights, activations or what experts are sent. Not those that choose a
kernel: what kernels round differently is no other content, as between kinds of GPUs."""
_EXPERTS = "enable_return_routed_experts"
"""A setting of the model before 0.32."""
_NO_CASCADES: Release = (0, 32)
"""vLLM has no cascade attention since; its setting is still there."""


class _Unsupported(Exception):
    """Why this engine cannot be cached, in words for the operator."""


def read_model_name(vllm_config: Any) -> str:
    """The model's name as users and routers know it; the first one of several."""
    model = vllm_config.model_config
    served = model.served_model_name or model.model
    return str(served if isinstance(served, str) else served[0])


def read_name(vllm_config: Any) -> str:
    """The name of this process in the status of its service."""
    name = read_model_name(vllm_config).rstrip("/").rpartition("/")[2]
    return f"vllm {name}, pid {os.getpid()}"


def read_instance(vllm_config: Any, settings: ConnectorSettings, shape: CacheShape) -> EngineInstance | None:
    """This engine as routers know it; `None`: it does not load."""
    if not settings.loads:
        return None
    return EngineInstance(
        name=settings.instance_id or socket.gethostname(),
        models=(read_model_name(vllm_config),),
        step_tokens=shape.boundary_tokens,
        whole_prompts=takes_whole_prompts(settings, shape),
        address=settings.instance_address or "",
        dp_rank=int(vllm_config.parallel_config.data_parallel_index),
        names_blocks=settings.name_blocks != "off",
    )


def read_facts(vllm_config: Any, kv_cache_config: Any, *, weights_may_change: bool = False) -> EngineFacts:
    """Read one engine's facts. A model that is not supported is no error: `unsupported` says why."""
    parallel = vllm_config.parallel_config
    scheduler_block, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups: tuple[GroupFacts, ...] = ()
    unsupported = None
    try:
        mine = _read_layers(vllm_config, kv_cache_config, weights_may_change=weights_may_change)
        groups = _group(_exchange_stages(parallel, mine), _stage_of(parallel))
    except _Unsupported as reason:
        unsupported = str(reason)
    return EngineFacts(
        scheduler_block_tokens=scheduler_block,
        num_blocks=kv_cache_config.num_blocks,
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        groups=groups,
        unsupported=unsupported,
        load_failure_policy=str(vllm_config.kv_transfer_config.kv_load_failure_policy),
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        retention_tokens=vllm_config.cache_config.prefix_cache_retention_interval,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        machine_bytes=usable_bytes(),
        machine_ranks=parallel.local_world_size * max(1, parallel.data_parallel_size_local),
        worker_extension=str(getattr(parallel, "worker_extension_cls", "") or ""),
        steps_together=parallel.data_parallel_size > 1,  # vLLM sets 1 for a model without experts
        **_model_fields(vllm_config),
    )


def read_model(vllm_config: Any, *, weights_may_change: bool = False) -> ModelFacts:
    """What an engine computes, in any of its processes.

    Raises:
        InvalidRequest: Its cache depends on more than can be known.
    """
    try:
        _refuse_unsupported_engines(vllm_config, weights_may_change=weights_may_change)
    except _Unsupported as reason:
        raise InvalidRequest(str(reason)) from None
    return ModelFacts(**_model_fields(vllm_config))


def _model_fields(vllm_config: Any) -> dict[str, Any]:
    model, rules = vllm_config.model_config, read_rules(vllm_config)
    further = {
        "environment": _environment(),
        "plugins": plugin_digests(vllm.envs.VLLM_PLUGINS),
        "worker": _own_worker(vllm_config.parallel_config.worker_cls),
    }
    rules["model_rules"] = rules["model_rules"] | {name: rule for name, rule in further.items() if rule}
    return {
        "architecture": str((model.architectures or ["unknown"])[0]),
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or "none"),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "device": str(current_platform.device_type),
        "untested_release": untested_version(),
        **rules,
    }


def _own_worker(worker_cls: Any) -> dict[str, str]:
    """A worker that is not vLLM's own, and may change the model: its name, and a digest of its package's files."""
    name = worker_cls if isinstance(worker_cls, str) else f"{worker_cls.__module__}.{worker_cls.__qualname__}"
    if name == "auto" or name.startswith("vllm."):
        return {}
    return {"class": name, "code": digest_package(name.partition(".")[0])}


def _environment() -> dict[str, Any]:
    """vLLM's variables that are set and change what a model computes."""
    known = vllm.envs.environment_variables
    return {name: plain(known[name]()) for name in _ENVIRONMENT if name in known and vllm.envs.is_set(name)}


def cache_layers(kv_caches: Mapping[str, torch.Tensor], names: tuple[str, ...], num_blocks: int) -> list[torch.Tensor]:
    """The layers' cache tensors, dimension 0 = the manager's blocks, in the order of `names`.

    Selected by name, since layers that share another layer's cache are in the mapping too.
    """
    return [group_kernel_blocks(kv_caches[name], num_blocks) for name in names]


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per hash of vLLM: a block, or a common divisor of all groups' blocks."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def untested_version() -> str | None:
    """The installed vLLM's version, if its release was not tested with this connector."""
    return None if is_tested(vllm.__version__) else str(vllm.__version__)


def _refuse_unsupported_engines(vllm_config: Any, *, weights_may_change: bool) -> None:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if getattr(vllm_config, "weight_transfer_config", None) is not None and not weights_may_change:
        raise _Unsupported("with weight_transfer_config the weights will change: set weights_may_change")
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        raise _Unsupported("context parallelism (DCP, PCP) is not supported: its layout of tokens is not proven")
    if model.is_diffusion:
        # a request may end with a canvas that no forward has written to its blocks (`diffusion_read_only`)
        raise _Unsupported("diffusion models are not supported: their cache does not hold all answered tokens")
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        # vLLM's pooler raises at a prompt that is not computed whole, which ends the engine (0.32)
        raise _Unsupported(
            "this model's pooling (MEAN, CLS, STEP) needs each token of a prompt: nothing can be resumed"
        )
    has_cascades = (release_of(vllm.__version__) or _NO_CASCADES) < _NO_CASCADES
    if has_cascades and not getattr(model, "disable_cascade_attn", True):
        # vLLM counts a block's references, of which a save holds one, to see whether all requests share it
        raise _Unsupported("cascade attention would take blocks of a save for shared ones: leave disable_cascade_attn")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise _Unsupported("with calculate_kv_scales each engine has scales of its own; use the checkpoint's scales")
    if _own_worker(vllm_config.parallel_config.worker_cls).get("code") == UNKNOWN:
        raise _Unsupported("the files of the worker's class (worker_cls) are not found: its package must be importable")
    if code_digest(vllm_config) == UNKNOWN:
        raise _Unsupported("the Python files of the model (trust_remote_code) are not found: name its folder as model")
    if _returns_experts(vllm_config):
        # vLLM fails when it answers a request whose blocks it did not compute (0.32)
        raise _Unsupported("with enable_return_routed_experts vLLM cannot answer prompts that were restored")
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise _Unsupported(f"{current_platform.device_name} is not supported; supported are CPUs and Nvidia's GPUs")


def _returns_experts(vllm_config: Any) -> bool:
    own = getattr(vllm_config, "aux_output_config", None)
    return bool(own.enabled if own is not None else getattr(vllm_config.model_config, _EXPERTS, False))


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    vllm_group: int


_Layers = dict[tuple[Any, ...], list[_Layer]]
"""The layers of one stage by kind and spec, regardless of vLLM's groups."""


def _read_layers(vllm_config: Any, kv_cache_config: Any, *, weights_may_change: bool) -> _Layers | str:
    """The layers on this rank, or why it cannot be cached: what is not found on one machine may be found on another."""
    layers: _Layers = {}
    try:
        _refuse_unsupported_engines(vllm_config, weights_may_change=weights_may_change)
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            if index not in kv_cache_config.prefix_cacheable_group_ids:
                raise _Unsupported("the model has caches that vLLM does not cache by prefix (rings, replayed windows)")
            for name, spec in _layer_specs(group):
                content = _read_content(vllm_config, spec)
                packing = _packing(vllm_config, name, spec)
                key = (_kind_of(spec), content, spec.block_size, group.is_eagle_group, packing)
                layers.setdefault(key, []).append(_Layer(name, index))
    except _Unsupported as reason:
        return str(reason)
    except (ImportError, AttributeError, TypeError) as error:  # as for the connector, but other stages wait for a word
        return f"vLLM's configuration has changed: {type(error).__name__}: {error}"
    return layers


def _stage_of(parallel: Any) -> int:
    return int(parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size)


def _exchange_stages(parallel: Any, mine: _Layers | str) -> list[_Layers]:
    """The layers of every pipeline stage. A rank knows its own layers only, so the ranks exchange them.

    Every rank of a pipeline must call this, even if it cannot be cached: the others wait for it.
    """
    stages = [mine]
    if parallel.pipeline_parallel_size > 1:
        stages = [""] * parallel.pipeline_parallel_size
        torch.distributed.all_gather_object(stages, mine, group=get_pp_group().cpu_group)
    held: list[_Layers] = []
    for number, stage in enumerate(stages):
        if isinstance(stage, str):
            raise _Unsupported(stage)
        if held and stage.keys() != held[0].keys():
            raise _Unsupported(f"pipeline stages 0 and {number} do not hold layers of the same kinds")
        held.append(stage)
    return held


def _group(stages: Sequence[_Layers], number: int) -> tuple[GroupFacts, ...]:
    """The canonical groups, the same on all stages, as stage `number` holds them."""
    groups = []
    for key in stages[0]:
        kind, content, block_tokens, drafts, packing = key
        members = [sorted(stage[key], key=lambda layer: _model_order(layer.name)) for stage in stages]
        feed_groups = tuple(sorted({layer.vllm_group for layers in members for layer in layers}))
        groups.append(
            GroupFacts(
                kind=kind,
                stages=tuple(tuple(layer.name for layer in layers) for layers in members),
                feeds=tuple(feed_groups.index(layer.vllm_group) for layer in members[number]),
                feed_groups=feed_groups,
                block_tokens=block_tokens,
                content=content,
                packing=dict(packing),
                drafts=drafts,
                stage=number,
            )
        )
    return tuple(sorted(groups, key=lambda group: (group.drafts, _model_order(group.stages[0][0]))))


def _layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    spec = group.kv_cache_spec
    for name in group.layer_names:
        yield name, spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _model_order(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in re.findall(r"\d+", name)), name


def _kind_of(spec: Any) -> GroupKind:
    # exact types: a subclass may change what a block holds or which blocks are needed
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise _Unsupported(
                "vLLM keeps recurrent states at block boundaries in its mode 'align' only: enable prefix caching"
            )
        return Recurrent()
    if type(spec) is SlidingWindowSpec:
        return SlidingWindow(spec.sliding_window, spec.extra_retained_tokens)
    if type(spec) is ChunkedLocalAttentionSpec:
        return ChunkedLocal(spec.attention_chunk_size)
    if type(spec) is MLAAttentionSpec and spec.model_version is None:
        return Latent()
    if type(spec) is FullAttentionSpec:  # also for windows if vLLM's hybrid manager is off: it keeps every block
        return FullAttention()
    raise _Unsupported(f"caches of kind {type(spec).__name__} are not supported yet")


def _read_content(vllm_config: Any, spec: Any) -> CellFacts | StateFacts:
    if isinstance(spec, MambaSpec):
        if vllm_config.parallel_config.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
            # a stage learns which drafts were accepted some steps later, and copies the state to its block then
            raise _Unsupported("with drafts, pipeline stages but the last complete recurrent states after their step")
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
        return StateFacts(
            shapes=tuple(tuple(shape) for shape in spec.shapes),
            dtypes=tuple(_name(dtype) for dtype in spec.dtypes),
            part_bytes=tuple(sizes),
            replicated=spec.tp_replicated or vllm_config.parallel_config.tensor_parallel_size == 1,
        )
    if getattr(spec, "non_causal", False):
        raise _Unsupported("non-causal attention makes the cache of a prefix depend on what follows")
    if spec.kv_quant_mode not in _QUANT_MODES or spec.tokens_per_state != 1 or spec.num_heads != spec.num_kv_heads:
        raise _Unsupported(f"cache cells of quantisation {spec.kv_quant_mode.name} or of several tokens")
    width, rest = divmod(spec.state_content_size_bytes, spec.dtype.itemsize)
    if rest or (spec.state_content_bytes is not None and not isinstance(spec, MLAAttentionSpec)):
        raise _Unsupported("packed cache cells are not supported yet")
    latent = isinstance(spec, MLAAttentionSpec)
    return CellFacts(
        rank_heads=spec.num_kv_heads,
        total_heads=1 if latent else _total_heads(vllm_config, spec),
        head_size=width if latent else spec.head_size,
        head_size_v=0 if latent else spec.head_size_v,
        element_bytes=spec.dtype.itemsize,
        dtype=_name(spec.dtype),
    )


def _total_heads(vllm_config: Any, spec: Any) -> int:
    """KV heads of a layer of the whole model. If each rank has one head, some may be copies of another rank's."""
    ranks, model = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config
    if ranks == 1 or spec.num_kv_heads > 1:
        return int(spec.num_kv_heads) * ranks
    total = int(model.get_total_num_kv_heads())
    if any(total % heads for heads in kv_head_counts(model.hf_text_config)):
        # this layer may have other heads than the model's number says: then no two ranks are known to hold one head
        return int(ranks)
    if ranks % total and total % ranks:
        raise _Unsupported(f"{total} KV heads cannot be divided evenly over {ranks} ranks")
    return min(total, ranks)


def _packing(vllm_config: Any, name: str, spec: Any) -> tuple[tuple[str, str | int], ...]:
    """On what the bytes inside a block depend, beyond the model.

    The CPU backend arranges keys by instruction set, in a way that may change with vLLM's release. The layout of a
    recurrent state depends on its kernels.
    """
    if current_platform.is_cuda():
        return _gpu_packing(vllm_config, name, spec)
    machine = current_platform.get_cpu_architecture().name
    common: tuple[tuple[str, str | int], ...] = (("block_tokens", spec.block_size), ("vllm", str(vllm.__version__)))
    if isinstance(spec, MambaSpec | MLAAttentionSpec):
        return (("backend", "CPU"), ("machine", machine), *common)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    return (("backend", "CPU_ATTN"), ("isa", isa), ("machine", machine), *common)


def _gpu_packing(vllm_config: Any, name: str, spec: Any) -> tuple[tuple[str, str | int], ...]:
    """For attention only the order of channels in a token: engines of any layout and block size share pages."""
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    if layer is None:
        raise _Unsupported(f"the attention backend of {name} is not known")
    backend = str(layer.get_attn_backend().get_name())
    if isinstance(spec, MambaSpec):
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

        kernels = (("backend", backend), ("convolution", str(get_conv_state_layout())))
        return (*kernels, ("block_tokens", spec.block_size), ("vllm", str(vllm.__version__)))
    if backend not in _TOKEN_BACKENDS:
        raise _Unsupported(f"attention backend {backend} is not known to keep the bytes of a token together")
    # until a test on a GPU has saved with one release and loaded with the other, they share nothing
    return (("cell", "token"), ("vllm", ".".join(map(str, release_of(vllm.__version__) or (str(vllm.__version__),)))))


def find_runner() -> Any | None:
    """The model runner that registers the cache. Call it from `register_kv_caches`.

    vLLM 0.32 hands no model to connectors. Its model runner calls `register_kv_caches`, and has the model: as it is, or
    within an object of another kind that replays CUDA graphs.
    """
    for frame, _ in walk_stack(sys._getframe(1)):
        runner: Any = frame.f_locals.get("self")
        if callable(getattr(runner, "get_model", None)) and getattr(runner, "model", None) is not None:
            return runner
    return None


def find_models() -> list[torch.nn.Module]:
    """The modules of the model runner that registers the cache: the model, and that of its drafts if it has one."""
    runner = find_runner()
    found = [getattr(runner, name)() for name in ("get_model", "get_draft_model") if hasattr(runner, name)]
    return [model for model in found if isinstance(model, torch.nn.Module)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
