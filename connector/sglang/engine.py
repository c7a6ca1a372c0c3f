"""What SGLang says of its model and its settings, as far as the bytes of its cache depend on them."""

from __future__ import annotations

import fcntl
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector.weights import digest_files, digest_model, stamp_weights
from kvstore.errors import InvalidRequest

_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "model_impl", "context_length"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "page_size"),
    *("dsa_prefill_backend", "dsa_decode_backend", "dsv4_prefill_backend", "dsv4_attn_backend", "mamba_backend"),
    *("linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend"),
    *("speculative_algorithm", "speculative_draft_kv_cache_dtype", "trust_remote_code"),
    # what rounds weights, activations or states otherwise than the model's files say
    *("rl_quant_profile", "modelopt_quant", "model_loader_extra_config", "speculative_draft_model_quantization"),
    *("enable_quant_communications", "deepep_dispatcher_output_dtype", "enable_w4a4_mxfp4_megamoe", "mamba_ssm_dtype"),
    *("flashinfer_mxfp4_moe_precision", "rl_on_policy_target", "dllm_algorithm", "mm_process_config"),
    *("enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds"),
    *("enable_tf32_matmul", "prefill_kv_cache_dequant_dtype", "qsa_indexer_dtype", "enable_deepseek_v4_fp4_indexer"),
    # what computes a cache otherwise: approximately, or from images that were changed
    *("enable_decoder_swa_bounded_replay", "enable_encoder_swa_bounded_replay", "forward_hooks"),
    "enable_precise_embedding_interpolation",
    "weight_version",  # weights that an engine was sent are in no file
)
"""Settings of SGLang that a namespace holds, also those that change no byte of most models' caches."""
_CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "quant_config.json", "quantize_config.json")
_OTHER_FILES = (
    *("kt_weight_path", "modelopt_checkpoint_restore_path", "decrypted_config_file", "decrypted_draft_config_file"),
    *("uno_lora_path", "dllm_algorithm_config", "checkpoint_engine_wait_weights_before_ready"),
)
"""Settings of SGLang with which weights or configurations come from elsewhere than the model's folder."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, as its settings describe it.

    Attributes:
        release: SGLang's.
        model_path: A folder or a name of a model hub.
        load_format: How SGLang reads the weights.
        draft_path: The same of a draft model; `None`: there is none.
        revision: Of a model of a hub; `None`: its main one.
        draft_revision: The same of the draft model.
        download_dir: Where weights of a hub's models are first looked for; `None`: in the hub's own cache alone.
        hub: The package of the hub. A name may stand for two models on two hubs.
        other_files: The settings with which weights or configurations come from elsewhere than the models' files.
        settings: Those of `_SETTINGS` that are set, as text.
        scales_path: A file with scales of the cache; `None`: there is none.
        has_adapters: Adapters may be used. SGLang's page keys name them and do not tell their content.
        takes_media: Prompts may have images, video or sound. SGLang's page keys hold a hash of each, which a client may
            choose: a request may have media that are already processed, with a hash, and with
            `--trust-mm-content-hashes` any may.
    """

    release: str
    model_path: str
    load_format: str = "auto"
    draft_path: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    scales_path: str | None = None
    has_adapters: bool = False
    takes_media: bool = False
    revision: str | None = None
    draft_revision: str | None = None
    download_dir: str | None = None
    hub: str = "huggingface_hub"
    other_files: tuple[str, ...] = ()


def read_engine() -> Engine:
    """The engine of this process.

    Raises:
        InvalidRequest: SGLang has changed, and does not say what is needed.
    """
    given = _settings_in_effect()
    if not given.get("model_path"):
        raise InvalidRequest("this release of SGLang does not tell its model", release=release())
    draft = given.get("speculative_draft_model_path")
    other_files = [name for name in _OTHER_FILES if given.get(name)]
    if given.get("weight_cache_mode") == "client":  # another process read the files, at another time
        other_files.append("weight_cache_mode")
    return Engine(
        release=release(),
        model_path=str(given["model_path"]),
        load_format=str(given.get("load_format", "auto")),
        draft_path=str(draft) if draft else None,
        settings={name: str(given[name]) for name in _SETTINGS if given.get(name) is not None},
        scales_path=given.get("quantization_param_path"),
        has_adapters=bool(given.get("enable_lora") or given.get("lora_paths")),
        takes_media=_takes_media(),
        revision=given.get("revision"),
        draft_revision=given.get("speculative_draft_model_revision"),
        download_dir=given.get("download_dir"),
        hub=find_hub(),
        other_files=tuple(other_files),
    )


def release() -> str:
    """SGLang's release.

    Raises:
        InvalidRequest: It does not say.
    """
    try:
        return str(importlib.import_module("sglang.version").__version__)
    except (ImportError, AttributeError):
        raise InvalidRequest("the package sglang does not tell its release") from None


def find_hub() -> str:
    """The package of the hub that SGLang uses."""
    try:
        uses_other = importlib.import_module("sglang.srt.environ").envs.SGLANG_USE_MODELSCOPE.get()
    except (ImportError, AttributeError):
        uses_other = False
    return "modelscope" if uses_other else "huggingface_hub"


def _settings_in_effect() -> Mapping[str, Any]:
    """SGLang's settings with what it decided on itself, and what was changed since, as when it reads other weights.
    `get_server_args` has neither.
    """
    try:
        context = importlib.import_module("sglang.srt.runtime_context").get_context()
        return dict(context.resolved_server_args_dict())
    except (ImportError, AttributeError) as error:
        raise InvalidRequest("this release of SGLang does not tell its settings", error=error) from error


def _takes_media() -> bool:
    try:
        return bool(importlib.import_module("sglang.srt.runtime_context").process_model_config().is_multimodal)
    except (ImportError, AttributeError) as error:
        raise InvalidRequest("this release of SGLang does not say if its model takes media") from error


class WeightsWatch:
    """Notices when SGLang loads other weights, as far as it says so. Safe from any thread."""

    def __init__(self) -> None:
        self._counted: tuple[list[Any], int, int] = [], 0, 0
        """SGLang's log of changes, how many of its entries were read, and how many of these were of weights."""

    def now(self) -> tuple[str, ...]:
        """The model's path, the version of weights, and how often either was set; empty where SGLang does not say.
        SGLang sets the path whenever it has read weights from files, also from the same ones.
        """
        try:
            context = importlib.import_module("sglang.srt.runtime_context")
            model, serving = context.get_model(), context.get_serving()
            num_set = self._count(context.get_context())
        except (ImportError, AttributeError, ValueError):  # not published: as it was at the start
            return ()
        return str(getattr(model, "model_path", "")), str(getattr(serving, "weight_version", "")), str(num_set)

    def _count(self, context: Any) -> int:
        """How many changes of settings were of weights.

        Adaptive speculation adds one whenever it changes its steps, for as long as the engine runs, and `overrides_log`
        copies them all. So only those are read that no call has counted yet.
        """
        changes: list[Any] | None = getattr(context, "_overrides_log", None)
        if changes is None:  # another release
            changes = getattr(context, "overrides_log", list)()
        log, num_read, num_set = self._counted
        if changes is not log:
            num_read, num_set = 0, 0
        new = changes[num_read:]
        num_set += sum("model_path" in fields or "weight_version" in fields for _, fields in new)
        self._counted = changes, num_read + len(new), num_set  # at once: other threads call too
        return num_set


def identify_weights(engine: Engine, weights_id: str | None, cache_folder: Path) -> dict[str, str]:
    """The fields of a namespace that say which weights and configuration an engine has. Reads all weights once; the
    ranks of a machine wait for each other and use the same digests.

    Args:
        weights_id: The operator's name of the weights and their configuration; `None`: digest the model's files.

    Raises:
        InvalidRequest: They cannot be digested: the operator has to set `weights_id`. Or they were replaced before
            all were read.
        OSError: A file cannot be read.
    """
    fields = {"weights_id": weights_id or "", "architecture": ""}
    if weights_id is None:
        if engine.other_files:
            raise InvalidRequest(
                "weights or a configuration come from elsewhere; set weights_id", seen=engine.other_files
            )
        cache_folder.mkdir(parents=True, exist_ok=True)
        models = [(engine.model_path, engine.revision)]
        if engine.draft_path is not None:
            models.append((engine.draft_path, engine.draft_revision))
        # a folder for downloads holds weights alone
        folder, *draft = [model_folder(*model, None, engine.hub) for model in models]
        paths = [str(model_folder(*model, engine.download_dir, engine.hub)) for model in models]
        before = stamp_weights(paths, engine.load_format)
        with (cache_folder / "weights.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            digests = [digest_model(path, engine.load_format, cache_folder) for path in paths]
        fields |= zip(("weights_id", "draft_weights_id"), digests, strict=False)
        if stamp_weights(paths, engine.load_format) != before:  # the engine has the old ones
            raise InvalidRequest("the weight files changed while they were read: restart the engine", paths=paths)
        fields["architecture"] = _architecture(folder / _CONFIGS[0])
        fields["model_config_id"] = digest_files((folder / name for name in _CONFIGS), folder)
        if draft:
            fields["draft_config_id"] = digest_files((draft[0] / name for name in _CONFIGS), draft[0])
        if engine.settings.get("trust_remote_code") == "True":
            fields["code_id"] = digest_files(folder.rglob("*.py"), folder)
    if engine.scales_path is not None:
        scales = Path(engine.scales_path)
        fields["scales_id"] = digest_files([scales], scales.parent)
    return fields


def model_folder(model_path: str, revision: str | None, download_dir: str | None, hub: str) -> Path:
    """The folder, or the one file, of a model that was loaded from a folder or from the local copy of a hub.

    Args:
        revision: Of a model of a hub; `None`: its main one.
        download_dir: Looked into before the hub's own cache, as SGLang does.
        hub: The package of the hub.

    Raises:
        InvalidRequest: It is not on this machine.
    """
    if Path(model_path).exists():
        return Path(model_path)
    failure: Exception | None = None
    for cache_dir in [download_dir, None] if download_dir else [None]:
        try:
            client: Any = importlib.import_module(hub)
            return Path(
                client.snapshot_download(model_path, revision=revision, cache_dir=cache_dir, local_files_only=True)
            )
        except (ImportError, OSError, ValueError) as error:
            failure = error
    raise InvalidRequest(
        "found no folder with the model's files; set weights_id",
        field="weights_id",
        model=model_path,
        revision=revision,
    ) from failure


def _architecture(config: Path) -> str:
    try:
        return str(json.loads(config.read_bytes())["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
