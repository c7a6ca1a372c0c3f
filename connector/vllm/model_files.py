"""The files of a model on which its pages depend beside its weights and configuration; read without importing vLLM."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from connector.facts import ModelFacts
from connector.weights import are_unchanged, digest_files, has_weights, stamp_weights

_PARTS = ("text_model_id", "audio_model_id")
"""Fields of a configuration that name other models, whose weights are parts of this one (Ultravox)."""

_INNER_PARTS = {
    "JinaEmbeddings": "adapters/*",  # one of them is merged into the weights
    "MiMo": "audio_tokenizer",
    "MoonshotKimia": "whisper-large-v3",
    "Cosmos3": "[tv]*er",
}
"""By the start of a model's architecture, the folders in its own from which vLLM reads weights as well (0.32)."""
_PART_SETTINGS = ("config.json", "adapter_config.json")
_PROCESSOR_SETTINGS = (
    "*process*.json",
    *("speech_tokenizer/*process*.json", "whisper-large-v3/*process*.json"),  # Fun-Audio-Chat's and Kimi-Audio's
    "tekken.json",  # Mistral's are in its tokenizer
)

_NOTED = "kvstore_weights_stamp"
"""Attribute of a configuration's `device_config`: the machine on which the configuration was made, and then the
folders of its weight files, and their stamp. It cannot be the configuration's own. vLLM copies that by its fields for
a model inside another one and for drafts, and raises at what is no field. All copies share this part."""

_MOVED = "moved"
"""In place of a stamp."""

UNKNOWN = "unknown"
"""In place of a digest of files that are not found."""
_CODE = ("*.py", "*.so")
_MEDIA_LIBRARIES = ("transformers", "mistral_common", "torchvision", "pillow")
_PLUGINS = "vllm.general_plugins"
_KNOWN_PLUGINS = ("vllm.", "connector.plugin:")


def model_folder(vllm_config: Any, model: Any) -> str:
    """The folder of a model's weights. A name on the hub becomes one in the hub's cache, or stays if there is none."""
    return _folder(str(model.model), model.revision, vllm_config.load_config.download_dir)


def part_folders(vllm_config: Any) -> tuple[str, ...]:
    """The folders of the weights of which a model's are made, beside those in its own folder."""
    model, download_dir = vllm_config.model_config, vllm_config.load_config.download_dir
    named = [_folder(name, None, download_dir) for name in _part_names(model)]
    architecture = str((model.hf_config.to_dict().get("architectures") or [""])[0])
    inner: list[Path] = []
    for start, pattern in _INNER_PARTS.items():
        if architecture.startswith(start):
            # with `download_dir` some of a hub's weights are there, and those that a model reads itself are elsewhere
            own = {model_folder(vllm_config, model), _folder(str(model.model), model.revision)}
            inner += sorted(path for folder in own for path in Path(folder).glob(pattern) if has_weights(path))
    return (*named, *map(str, inner))


def part_settings_digest(vllm_config: Any) -> str:
    """Digest of the files that say how the weights of a model's parts are used. Empty: there are none."""
    folders = map(Path, part_folders(vllm_config))
    found = [digest_files([folder / name for name in _PART_SETTINGS], folder) for folder in folders]
    return hashlib.sha256("".join(found).encode()).hexdigest() if any(found) else ""


def _part_names(model: Any) -> list[str]:
    config = model.hf_config.to_dict()
    return [str(config[name]) for name in _PARTS if config.get(name)]


def weight_folders(vllm_config: Any) -> tuple[str, ...]:
    """All folders from which vLLM reads a model's weights."""
    return (model_folder(vllm_config, vllm_config.model_config), *part_folders(vllm_config))


def note_weights(vllm_config: Any) -> None:
    """Note the weight files of a configuration, before vLLM reads them. It is passed to the ranks with the note.

    Of a hub's model only its folder in the hub's cache, of the revision that the name stands for now: its files may
    still be on their way, and are never replaced.
    """
    model = vllm_config.model_config
    if model is None or hasattr(vllm_config.device_config, _NOTED):
        return
    folders = weight_folders(vllm_config)
    are_here = all(Path(name).exists() for name in (str(model.model), *_part_names(model)))
    stamp = stamp_weights(folders, str(vllm_config.load_config.load_format)) if are_here else ""
    setattr(vllm_config.device_config, _NOTED, (platform.node(), folders, stamp))


def stamp_at_start(vllm_config: Any) -> str:
    """`stamp_weights` as it was when the engine was configured, or else as it is now. No stamp of any files: since then
    a hub's name stands for another folder.

    Another machine may have the same files with other dates.
    """
    machine, noted, stamp = getattr(vllm_config.device_config, _NOTED, ("", (), ""))
    folders = weight_folders(vllm_config)
    if machine == platform.node():
        if stamp:
            return str(stamp)
        if any(old != new and Path(old).exists() for old, new in zip(noted, folders, strict=False)):
            return _MOVED
    return stamp_weights(folders, str(vllm_config.load_config.load_format))


def would_read_the_same(vllm_config: Any, facts: ModelFacts) -> bool:
    """Whether vLLM, if it reads its weights again, finds those that it started with. Of a hub's model it reads the
    revision that the name stands for by then.
    """
    return weight_folders(vllm_config) == (facts.model_path, *facts.part_paths) and are_unchanged(facts)


def _folder(name: str, revision: str | None, cache_dir: str | None = None) -> str:
    """Where the hub that vLLM uses has a model.

    Args:
        cache_dir: vLLM's `download_dir` for weights. It keeps all other files in the hub's own cache (`None`).
    """
    if Path(name).exists():
        return name
    from vllm import envs

    # a name may stand for two models on the two hubs, so the other hub's cache says nothing
    hub = "modelscope" if envs.VLLM_USE_MODELSCOPE else "huggingface_hub"
    try:
        download = import_module(hub).snapshot_download
        return str(download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception:  # noqa: BLE001 - of a hub's client: then the weights need an id from the operator
        return name


def code_digest(vllm_config: Any) -> str:
    """Digest of the Python files that compute a model (`trust_remote_code`); empty: vLLM's own code does. `UNKNOWN`:
    they are not found.

    Two engines with equal weights and configurations compute other pages with other files. transformers reads them from
    the model's folder, or from another repository that `auto_map` names in front of `--`.
    """
    model = vllm_config.model_config
    if not getattr(model, "trust_remote_code", False) or not _uses_transformers(model):
        return ""
    references = set(_references(model.hf_config.to_dict()))
    if not references:
        return ""
    code_revision = getattr(model, "code_revision", None)
    repositories = {reference.partition("--")[0] if "--" in reference else str(model.model) for reference in references}
    folders = [
        Path(_folder(name, code_revision or (model.revision if name == str(model.model) else None)))
        for name in sorted(repositories)
    ]
    digests = [digest_files(folder.rglob("*.py"), folder) for folder in folders]
    if not all(folder.is_dir() for folder in folders) or "" in digests:
        return UNKNOWN
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _uses_transformers(model: Any) -> bool:
    """Whether transformers' code computes the model, which may be the model's own."""
    asked = getattr(model, "using_transformers_backend", None)
    return bool(asked()) if asked is not None else True


def _references(config: Mapping[str, Any]) -> Iterator[str]:
    """The classes that a configuration takes from the model's own files, nested configurations included."""
    for name, value in config.items():
        if name == "auto_map" and isinstance(value, Mapping):
            for reference in value.values():
                yield from reference if isinstance(reference, list | tuple) else [str(reference)]
        elif isinstance(value, Mapping):
            yield from _references(value)


def plugin_digests(allowed: Collection[str] | None) -> dict[str, str]:
    """By function, a digest of the code of each of vLLM's plugins that every process of an engine runs. One may
    register another class for a model, or change vLLM's own functions. vLLM's own plugins and ours are left out. What
    cannot be imported is `UNKNOWN`: vLLM does not run it either.

    Args:
        allowed: Names of the plugins that are used; `None`: all.
    """
    points = entry_points(group=_PLUGINS)
    return {
        point.value: digest_package(point.module.partition(".")[0])
        for point in points
        if (allowed is None or point.name in allowed) and not point.value.startswith(_KNOWN_PLUGINS)
    }


def digest_package(name: str) -> str:
    """Digest of the code of a package, or of one module: Python files and compiled ones. `UNKNOWN`: it cannot be
    imported.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return UNKNOWN
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    digests = [digest_files(chain.from_iterable(map(folder.rglob, _CODE)), folder) for folder in folders]
    if not folders and spec.origin is not None:
        digests = [digest_files([Path(spec.origin)], Path(spec.origin).parent)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def quantization_digest(vllm_config: Any) -> str:
    """Digest of the files that say how the weights are quantised, beside the model's configuration: the same bytes are
    other weights with other files. Empty: there are none.
    """
    model = vllm_config.model_config
    if not getattr(model, "quantization", None):
        return ""
    folder = Path(model_folder(vllm_config, model))
    found = [digest_files(folder.glob("*quant*config.json"), folder)]
    if named := model.hf_config.to_dict().get("quantization_config_file"):  # an override of vLLM's
        found.append(digest_files([Path(named)], Path(named).parent) or UNKNOWN)
    return hashlib.sha256("".join(found).encode()).hexdigest() if any(found) else ""


def processor_digest(vllm_config: Any) -> str:
    """Digest of the files that say how media items become the model's input. vLLM names an item by its content and the
    model's name, not by these. `UNKNOWN`: the model's folder, or one with code of its processor, is not found.
    """
    model = vllm_config.model_config
    folder = Path(_folder(str(model.model), model.revision))
    if not folder.is_dir():
        return UNKNOWN
    is_own = getattr(model, "trust_remote_code", False)
    settings = list(chain.from_iterable(map(folder.glob, _PROCESSOR_SETTINGS)))
    files = [*filter(Path.is_file, settings), *(folder.rglob("*.py") if is_own else ())]
    digests = [digest_files(files, folder)]
    for name in sorted(_code_repositories(folder)) if is_own else ():
        code = Path(_folder(name, getattr(model, "code_revision", None)))
        digests.append(digest_files(code.rglob("*.py"), code) or UNKNOWN)
    if UNKNOWN in digests or len(digests) == 1:
        return UNKNOWN if UNKNOWN in digests else digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _code_repositories(folder: Path) -> set[str]:
    """The other repositories whose code a model's files name, e.g. for its processor."""
    found = set[str]()
    for file in (folder / "config.json", folder / "tokenizer_config.json", *folder.glob("*process*.json")):
        with contextlib.suppress(OSError, ValueError):
            references = _references(json.loads(file.read_text(encoding="utf-8")))
            found |= {reference.partition("--")[0] for reference in references if reference and "--" in reference}
    return found


def media_libraries() -> dict[str, str]:
    """The versions of what makes a model's input of media items. With equal files another version may do it
    differently.
    """
    from vllm.version import __version__ as own

    found = {"vllm": str(own)}
    for name in _MEDIA_LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
