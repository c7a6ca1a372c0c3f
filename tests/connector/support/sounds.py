"""A small model that hears: its checkpoint, and prompts with sounds of 100 tokens. For images vLLM needs a library that
its environment here lacks.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.testing.checkpoints import VOCABULARY, Checkpoint, draw, keep
from kvstore.testing.engine import Request, seeded_prompt
from kvstore.testing.engine.spec import SOUND_RATE

__all__ = ["answer_across_a_loss", "hearing", "write_hearing_checkpoint"]

_BEGIN, _END, _SOUND = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
_SPECIAL = {"<|audio_bos|>": _BEGIN, "<|audio_eos|>": _END, "<|AUDIO|>": _SOUND}

_CHECKPOINT = Checkpoint(
    {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": _SOUND,
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 1500,
        },
    }
)
_FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
    "feature_size": 128,
    "sampling_rate": SOUND_RATE,
    "return_attention_mask": True,
}


def hearing(folder: Path, *parts: tuple[int, int] | int, max_tokens: int = 8) -> Request:
    """A request with sounds.

    Args:
        folder: For files.
        parts: Of its prompt: text, as a seed and a number of tokens, or the seed of a sound.
    """
    ids: list[int] = []
    files = []
    for part in parts:
        ids += [_BEGIN, _SOUND, _END] if isinstance(part, int) else seeded_prompt(*part)
        if isinstance(part, int):
            files.append(str(folder / f"{part}.npy"))
            np.save(files[-1], _melody(part))
    return Request(tuple(ids), max_tokens=max_tokens, sounds=tuple(files))


def _melody(seed: int) -> npt.NDArray[np.float32]:
    """Four seconds of 40 tones: [samples]. Noise would be the same to the model, whatever its seed."""
    tones_hz = np.random.default_rng(seed).uniform(100, 4000, 40).repeat(SOUND_RATE // 10)
    return np.sin(2 * np.pi * np.cumsum(tones_hz) / SOUND_RATE).astype(np.float32)


def answer_across_a_loss(llm: Any, request: dict[str, Any], service_pid: int) -> tuple[int, list[int]]:
    """For an engine's process: what a request found, and its tokens, when it loses all that it has after its first
    token: the service is killed, and vLLM takes the blocks of the running request.
    """
    from vllm import SamplingParams

    from kvstore.testing.engine.main import prompt_of

    engine, found = llm.llm_engine, None
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True)
    engine.add_request("loses all", prompt_of(request), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if found is None and output.outputs[0].token_ids:
                found = output.num_cached_tokens or 0
                os.kill(service_pid, signal.SIGKILL)
                assert llm.reset_prefix_cache(reset_running_requests=True)
            if output.finished:
                return found or 0, list(output.outputs[0].token_ids)
    raise AssertionError("the request did not end")


def write_hearing_checkpoint(parent: Path) -> Path:
    """Write the checkpoint into its folder under `parent`, or keep the one that is there; returns the folder."""
    return keep(parent / "qwen2audio", _config(), _write)


def _config() -> dict[str, Any]:
    text = {"model_type": "qwen2", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    return {**_CHECKPOINT.full_config(), "text_config": {**_CHECKPOINT.shared, **text, "rope_theta": 1e6}}


def _write(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, Qwen2AudioForConditionalGeneration

    (folder / "config.json").write_text(json.dumps(_config()))
    with torch.device("meta"):
        model = Qwen2AudioForConditionalGeneration(AutoConfig.from_pretrained(folder))
    generator, weights = torch.Generator().manual_seed(7), {}
    for name, parameter in model.named_parameters():
        weight = draw(name, parameter.shape, _CHECKPOINT, generator)
        if "conv" in name:
            weight = torch.randn(parameter.shape, generator=generator) * 0.1
        short = name.removeprefix("model.").replace("language_model.", "language_model.model.")
        weights[short.replace("lm_head.", "language_model.lm_head.")] = weight  # as vLLM names them
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_processor(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def _write_processor(folder: Path) -> None:
    """A tokenizer with a word for each token id, and what makes features of sounds."""
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = {number: word for word, number in _SPECIAL.items()}
    tokenizer = Tokenizer(
        WordLevel({words.get(number, f"w{number}"): number for number in range(VOCABULARY)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "pad_token": "w0"},
        "preprocessor_config": _FEATURES,
        "processor_config": {"processor_class": "Qwen2AudioProcessor"},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
