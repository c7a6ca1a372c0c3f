"""As much of vLLM's configuration as says what an engine computes, and what is read of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from connector.vllm.model_facts import read_rules

CONFIG: dict[str, Any] = {"hidden_size": 64, "rope_theta": 10000.0, "text_config": {"num_layers": 2}}


def vllm_config(config: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    model = {
        "model": "/models/a",
        "revision": None,
        "hf_config": SimpleNamespace(to_dict=lambda: dict(CONFIG if config is None else config)),
        "dtype": torch.bfloat16,
        "max_model_len": 4096,
        "quantization_config": None,
        "model_class_overrides": {},
        "multimodal_config": None,
        "is_mm_prefix_lm": False,
    }
    others: dict[str, Any] = {
        "load_config": SimpleNamespace(load_format="auto", download_dir=None),
        "device_config": SimpleNamespace(),
        "speculative_config": None,
        "lora_config": None,
        "ec_transfer_config": None,
    }
    for name in list(changes):
        (model if name in model else others)[name] = changes.pop(name)
    return SimpleNamespace(model_config=SimpleNamespace(**model), **others)


def rules(config: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return read_rules(vllm_config(config, **changes))


def with_code(folder: Path | str, reference: str = "modeling_my.MyModel", **changes: Any) -> Any:
    config = vllm_config({**CONFIG, "auto_map": {"AutoModel": reference}}, model=str(folder))
    model = {"trust_remote_code": True, "using_transformers_backend": lambda: True, "code_revision": None, **changes}
    vars(config.model_config).update(model)
    return config
