"""vLLM's settings that determine the content of a model, its adapters and its media; read without importing vLLM."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from connector.vllm.model_files import (
    UNKNOWN,
    code_digest,
    media_libraries,
    model_folder,
    part_folders,
    part_settings_digest,
    processor_digest,
    quantization_digest,
    stamp_at_start,
)
from connector.weights import digest_files

_VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation", "max_model_len")
"""Keys of a model's configuration, nested ones included, that name its origin or that vLLM writes into it."""

_TYPES = ("torch_dtype", "dtype")
"""Covered by `compute_dtype`, which an operator may have chosen."""

_NUMBERED, _ENCODED_ELSEWHERE, _ATTENDS_AHEAD = "numbered", "encoded_elsewhere", "attends_ahead"
_ADAPTIVE_SCALES, _PRUNED = "adaptive_scales", "video_pruning_rate"
_MEDIA_REFUSALS = {
    _NUMBERED: ("media_without_hash", "vLLM does not hash media if its media caches are off"),
    _ENCODED_ELSEWHERE: (
        "media_encoded_elsewhere",
        "with ec_transfer_config another engine may encode them, and nobody knows with which weights",
    ),
    _ATTENDS_AHEAD: (
        "media_attention",
        "an item's tokens attend to later ones of it, and vLLM may compute it in parts: its cache depends on them",
    ),
    _ADAPTIVE_SCALES: (
        "media_scales",
        "without mm_encoder_fp8_scale_path the scales of an encoder in fp8 follow from what it has encoded",
    ),
    _PRUNED: (
        "media_pruned",
        "with video_pruning_rate vLLM gives tokens behind a video other positions if it resumes there",
    ),
}
"""Rules under which an item's cache is not determined by its hash: the label of a counter, and why."""

_LONG_BYTES, _LONG_ITEMS = 96 << 10, 7000
"""A longer list or map is described by its digest. Some quantizations name every layer of every expert, in megabytes,
and a description has at most 256 KiB and 16,384 values. Two flat lists just below these limits fit in it. A change of
these numbers gives models with such lists another namespace."""

_LONG_ROPES = ("longrope", "su")
_LLAMA4 = ("llama4", "llama4_text")
_TUNING, _TUNED_TOKENS = "attn_temperature_tuning", 32768
"""A field of Llama 4's configuration that vLLM overwrites, in a copy or in the one that we read; and the longest
request up to which it does not tune."""

_KV_HEADS = re.compile(r"(kv|key_value)_?heads|heads?_kv|kv_n_heads|attention_groups|query_group_num")
_HEADS_OF_A_KV_HEAD = "n_heads_in_group"
"""Fields of configurations that say how many KV heads there are, and how many heads share one."""

_MEDIA_SETTINGS = (
    *("mm_processor_kwargs", "media_io_kwargs", _PRUNED, "video_pruning_method"),
    *("mm_encoder_attn_dtype", "mm_device_do_normalize"),
)


def read_rules(vllm_config: Any) -> dict[str, Any]:
    """Some fields of `ModelFacts`: the weights' folder, the model's configuration, and settings that affect output."""
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    folder, parts = model_folder(vllm_config, model), part_folders(vllm_config)
    return {
        "model_path": folder,
        "part_paths": parts,
        "weights_stamp": stamp_at_start(vllm_config),
        "draft_path": _draft_folder(vllm_config),
        "load_format": load_format,
        "model_config": _model_config(model.hf_config.to_dict()),
        "model_rules": _model_rules(vllm_config),
        "adapter_rules": _adapter_rules(vllm_config.lora_config, model.dtype),
        "media_rules": _media_rules(vllm_config),
    }


def weights_source(vllm_config: Any) -> tuple[str, ...]:
    """What chooses the weights that vLLM reads; `reload_weights` and `update_config` change it in a running engine."""
    model, load = vllm_config.model_config, vllm_config.load_config
    return str(model.model), str(model.revision), str(load.load_format)


def kv_head_counts(config: Any) -> set[int]:
    """All numbers of KV heads that a configuration names: layers of some models differ in it (MiMo-V2, Nemotron)."""
    counts = set[int]()
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    for name, value in _fields(config.to_dict()):
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
                continue
            if _KV_HEADS.search(name):
                counts.add(number)
            elif name == _HEADS_OF_A_KV_HEAD:
                counts.add(max(1, heads // number))
    return counts


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration, nested ones included."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name), item
            yield from _fields(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _fields(item)
    elif hasattr(value, "__dict__"):
        yield from _fields(vars(value))


def _draft_folder(vllm_config: Any) -> str | None:
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return None
    return model_folder(vllm_config, draft)


def _model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    lasting = _without_volatile(config)
    if is_llama4(config):
        lasting = _without(lasting, _TUNING)
    return {str(key): _shortened(plain(value)) for key, value in lasting.items() if key not in _TYPES}


def _without_volatile(value: Any) -> Any:
    return _without(value, *_VOLATILE)


def _without(value: Any, *names: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, *names) for key, item in value.items() if key not in names}
    return value


def _model_rules(vllm_config: Any) -> dict[str, Any]:
    """What changes the model, beside its configuration: settings of the engine, and files. Empty for nearly all."""
    model, rules = vllm_config.model_config, dict[str, Any]()
    config = model.hf_config.to_dict()
    originals = list(_original_lengths(config, config.get("original_max_position_embeddings")))
    if originals:  # vLLM chooses one set of factors at start, by the longest request that it accepts
        rules["long_rope"] = [model.max_model_len > original for original in originals]
    if _has_dynamic_rope(config):  # some models scale it by the longest request that vLLM accepts
        rules["dynamic_rope"] = model.max_model_len
    if is_llama4(config):  # vLLM decides it at start, also by the longest request that it accepts
        chosen = {**model.try_get_generation_config(), **model.override_generation_config}
        rules[_TUNING] = bool(chosen.get(_TUNING, model.max_model_len > _TUNED_TOKENS))
    if code := code_digest(vllm_config):
        rules["code"] = code
    if files := quantization_digest(vllm_config):
        rules["quantization_files"] = files
    if files := part_settings_digest(vllm_config):
        rules["part_files"] = files
    if model.quantization_config is not None:
        rules["quantization_config"] = _shortened(plain(_as_mapping(model.quantization_config)))
    if model.model_class_overrides:
        rules["model_class_overrides"] = plain(model.model_class_overrides)
    return rules


def is_llama4(config: Mapping[str, Any]) -> bool:
    """Whether a configuration, or one in it, is that of a Llama 4."""
    nested = (is_llama4(value) for value in config.values() if isinstance(value, Mapping))
    return config.get("model_type") in _LLAMA4 or any(nested)


def _original_lengths(config: Mapping[str, Any], default: int | None) -> Iterator[int]:
    """At which length each longrope of a configuration switches from short to long factors."""
    if config.get("rope_type", config.get("type")) in _LONG_ROPES:
        yield int(config.get("original_max_position_embeddings") or default or 0)
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _original_lengths(value, config.get("original_max_position_embeddings") or default)


def _has_dynamic_rope(config: Mapping[str, Any]) -> bool:
    parts = (value for value in config.values() if isinstance(value, Mapping))
    return config.get("rope_type", config.get("type")) == "dynamic" or any(map(_has_dynamic_rope, parts))


def _adapter_rules(lora: Any, model_dtype: Any) -> dict[str, str]:
    if lora is None:
        return {}
    rules = {}
    if lora.target_modules:
        rules["target_modules"] = ",".join(sorted(lora.target_modules))
    if lora.lora_dtype not in ("auto", model_dtype):
        rules["dtype"] = str(lora.lora_dtype).removeprefix("torch.")
    if lora.enable_tower_connector_lora:
        rules["media_towers"] = "true"
    return rules


def media_refusal(rules: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why no item of an engine with these rules of media is cached: the label of a counter, and the reason in words."""
    if UNKNOWN in rules.values():
        return "media_files", "no folder has the model's files for media: name its folder as model"
    return next((refusal for rule, refusal in _MEDIA_REFUSALS.items() if rule in rules), None)


def _media_rules(vllm_config: Any) -> dict[str, Any]:
    """What affects media items and is not covered by vLLM's hash of an item: settings, files and libraries."""
    model = vllm_config.model_config
    media = model.multimodal_config
    if media is None:
        return {}
    found = {name: plain(getattr(media, name, None) or None) for name in _MEDIA_SETTINGS}
    found |= {"processor": processor_digest(vllm_config), "libraries": media_libraries()}
    if scales := getattr(media, "mm_encoder_fp8_scale_path", None):
        found["encoder_scales"] = digest_files([Path(scales)], Path(scales).parent) or UNKNOWN
    elif found["mm_encoder_attn_dtype"] == "fp8":
        found[_ADAPTIVE_SCALES] = True
    if getattr(media, "mm_processor_cache_gb", None) == 0 and not vllm_config.cache_config.enable_prefix_caching:
        found[_NUMBERED] = True
    transfer = vllm_config.ec_transfer_config
    found[_ENCODED_ELSEWHERE] = transfer is not None and transfer.is_ec_consumer
    found[_ATTENDS_AHEAD] = model.is_mm_prefix_lm
    return {name: value for name, value in found.items() if value}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _shortened(value: Any) -> Any:
    """The same value, with a digest in place of each list or map in it that is too long to be described."""
    if isinstance(value, dict):
        value = {key: _shortened(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_shortened(item) for item in value]
    else:
        return value
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _LONG_BYTES and len(value) <= _LONG_ITEMS:
        return value
    return {"num_items": len(value), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def plain(value: Any) -> Any:
    """JSON without floats: descriptions are compared byte by byte, and the text of a float is exact (`repr`)."""
    if isinstance(value, float):
        return repr(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)
