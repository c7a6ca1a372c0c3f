"""What the tests of identity vary: copies of a checkpoint, adapters, embeddings, weights of a running engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvstore.testing.waiting import eventually

__all__ = [
    "WeightsExtension",
    "ask_while_replaced",
    "copy_checkpoint",
    "write_adapter",
    "write_code",
    "write_embeddings",
]

_RANK = 8

_CODE = """
from transformers.models.llama.modeling_llama import LlamaModel

class OwnModel(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **others):
        rows = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        rows = rows + {share} * rows.roll(1, -1)
        return super().forward(
            attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=rows, **others
        )
"""
"""vLLM finds the arguments that it compiles for by their names."""


def copy_checkpoint(source: Path, target: Path, *, seed: int | None = None) -> Path:
    """A copy in another folder; with a `seed` one weight of the last layer but one is another, of equal size."""
    shutil.copytree(source, target)
    if seed is not None:
        file = target / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.2.mlp.down_proj.weight"
        generator = torch.Generator().manual_seed(seed)
        tensors[name] = tensors[name] + torch.randn(tensors[name].shape, generator=generator) * 0.05
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def write_code(source: Path, target: Path, *, share: float) -> Path:
    """A copy in another folder whose own code computes it (`trust_remote_code`), with a number in that code."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "modeling_own.OwnModel"}}
    (target / "config.json").write_text(json.dumps(config))
    (target / "modeling_own.py").write_text(_CODE.format(share=share))
    return target


def write_adapter(folder: Path, checkpoint: Path, *, seed: int) -> Path:
    """A LoRA adapter on the queries and values of every layer, large enough to change what is answered."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden = config["hidden_size"]
    head_size = config.get("head_dim", hidden // config["num_attention_heads"])
    sizes = {
        "q_proj": head_size * config["num_attention_heads"],
        "v_proj": head_size * config["num_key_value_heads"],
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator) / hidden**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, _RANK, generator=generator) * 0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": sorted(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def write_embeddings(path: Path, num_tokens: int, hidden: int, *, seed: int, changed_row: int | None = None) -> Path:
    """Seeded rows; with `changed_row` all equal but for that one."""
    rows = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed))
    if changed_row is not None:
        rows[changed_row] += 1.0
    torch.save(rows, path)
    return path


def ask_while_replaced(
    llm: Any, tokens: list[int], number: int, path: str, other_path: str, *, overwritten: bool
) -> list[int]:
    """Answer a prompt with an adapter whose number gets the files of another folder before the first step.

    Args:
        overwritten: They are copied over those of `path`, and the old ones are put back afterwards; else vLLM loads
            them in place.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine, kept = llm.llm_engine, f"{path}-kept"
    adapter = LoRARequest("replaced", number, path)
    if not overwritten:
        engine.add_lora(adapter)
    prompt = {"prompt_token_ids": tokens}
    engine.add_request("replaced", prompt, SamplingParams(max_tokens=4, temperature=0.0), lora_request=adapter)
    if overwritten:
        (state,) = engine.engine_core.engine_core.scheduler.connector.scheduler_side.requests.values()
        eventually(lambda: state.is_hashed)  # by the old files
        shutil.copytree(path, kept)
        shutil.copytree(other_path, path, dirs_exist_ok=True)
    else:
        engine.add_lora(LoRARequest("replaced", number, other_path, load_inplace=True))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    if overwritten:
        shutil.copytree(kept, path, dirs_exist_ok=True)
    return list(outputs[-1].outputs[0].token_ids)


class WeightsExtension:
    """A worker with what a trainer would do to it: `llm.collective_rpc("change_weights", args=(seed,))`."""

    model_runner: Any

    def change_weights(self, seed: int) -> None:
        """Update weights in place, as reinforcement learning does; vLLM tells nobody.

        Those of norms: of a linear layer vLLM keeps a packed copy on a CPU.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model_runner.get_model().named_parameters():
                if name.endswith("layernorm.weight"):
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)
