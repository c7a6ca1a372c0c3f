"""Where the weights of a model are: names of hubs, parts in other folders, and files that change."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import vllm
from vllm.config import DeviceConfig, VllmConfig
from vllm.config.utils import is_init_field

from connector.vllm.contract import release_of
from connector.vllm.model_facts import read_rules
from connector.vllm.model_files import UNKNOWN, note_weights, stamp_at_start, would_read_the_same
from connector.weights import find_weights_id, stamp_weights
from kvstore.errors import InvalidRequest
from tests.unit.connector.engine_configs import CONFIG, rules, vllm_config, with_code
from tests.unit.connector.support import make_facts


def write_snapshot(cache: Path, **files: str) -> Path:
    """A cache of the hub with the files of `some/model`, by their names without dots."""
    commit = "a" * 40
    folder = cache / "models--some--model" / "snapshots" / commit
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    refs = cache / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    return folder


def test_names_of_the_hub(tmp_path: Path) -> None:
    """A name stands for the folder of the hub's cache that holds it; one that is not there stays a name."""
    folder = write_snapshot(tmp_path, model__safetensors="weights")
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    assert rules(model="some/model", load_config=load)["model_path"] == str(folder)
    for name in ("some/other", "no such folder/at/all"):
        assert rules(model=name, load_config=load)["model_path"] == name


def test_names_of_the_other_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ModelScope a name never stands for what another hub's cache holds under it."""
    write_snapshot(tmp_path, model__safetensors="weights")
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert rules(model="some/model", load_config=load)["model_path"] == "some/model"
    asked: dict[str, Any] = {}
    client = SimpleNamespace(snapshot_download=lambda name, **options: asked.update(options) or f"/{name}")
    monkeypatch.setitem(sys.modules, "modelscope", client)
    assert rules(model="some/model", load_config=load)["model_path"] == "/some/model"
    assert asked == {"revision": None, "cache_dir": str(tmp_path), "local_files_only": True}


def test_a_folder_for_weights_holds_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `download_dir` vLLM reads weights there, and code and settings of a processor in the hub's own cache."""
    weights = write_snapshot(tmp_path / "weights", model__safetensors="weights")
    others = write_snapshot(tmp_path / "others", modeling_my__py="SCALE = 1", processor_config__json="{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "others"))
    config = with_code("some/model")
    config.load_config.download_dir = str(tmp_path / "weights")
    config.model_config.multimodal_config = SimpleNamespace(video_pruning_rate=0.5)
    before = read_rules(config)
    assert before["model_path"] == str(weights)
    for name, part in (("modeling_my.py", "model_rules"), ("processor_config.json", "media_rules")):
        assert UNKNOWN not in before[part].values()
        (others / name).write_text("other")
        assert read_rules(config)[part] != before[part]


def test_weights_that_are_replaced_before_the_connector_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has those of its configuration. Another machine's dates say nothing, nor does a hub's name."""
    (tmp_path / "model.safetensors").write_bytes(b"old")
    configs = [vllm_config(model=str(tmp_path)) for _ in range(2)]
    hub = vllm_config(model="some/model")
    old = read_rules(configs[0])["weights_stamp"]
    for config in (*configs, hub):
        note_weights(config)
    (tmp_path / "model.safetensors").write_bytes(b"newer")
    assert read_rules(configs[0])["weights_stamp"] == old
    monkeypatch.setattr("platform.node", lambda: "another machine")
    assert read_rules(configs[1])["weights_stamp"] == stamp_weights([str(tmp_path)], "auto") != old
    assert read_rules(hub)["weights_stamp"] == ""


def test_a_configuration_with_a_note_can_be_copied(tmp_path: Path) -> None:
    """vLLM copies it for the language model of a multimodal model and for drafts, and raises at what is no field. The
    note reaches the ranks all the same.
    """
    (tmp_path / "model.safetensors").write_bytes(b"old")
    config = VllmConfig.__new__(VllmConfig)
    vars(config).update(vars(vllm_config(model=str(tmp_path))), device_config=DeviceConfig(device="cpu"))
    note_weights(config)
    assert all(is_init_field(VllmConfig, name) for name in vars(config))
    old = stamp_weights([str(tmp_path)], "auto")
    (tmp_path / "model.safetensors").write_bytes(b"newer")
    config.device_config = pickle.loads(pickle.dumps(config.device_config))
    assert stamp_at_start(config) == old


def test_a_hubs_name_that_means_other_weights_while_an_engine_starts(tmp_path: Path) -> None:
    """They were read by the name before the connector is made, and those of the new revision must not give them an id.
    Nor may an engine go on that reads its weights again: by the name, and so the new ones.
    """
    old = write_snapshot(tmp_path, model__safetensors="weights")
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    early, late = (vllm_config(model="some/model", load_config=load) for _ in range(2))
    note_weights(early)
    facts = make_facts(**read_rules(early))
    assert would_read_the_same(early, facts) and find_weights_id(facts, tmp_path / "digests")
    new = old.with_name("b" * 40)
    shutil.copytree(old, new)
    (old.parents[1] / "refs" / "main").write_text(new.name)
    assert not would_read_the_same(early, facts)
    with pytest.raises(InvalidRequest, match="changed while the engine started"):
        find_weights_id(make_facts(**read_rules(early)), tmp_path / "digests")
    note_weights(late)
    restarted = make_facts(**read_rules(late))
    assert restarted.model_path == str(new)
    assert would_read_the_same(late, restarted) and find_weights_id(restarted, tmp_path / "digests")


@pytest.mark.parametrize(
    ("architecture", "inner"),
    [
        ("JinaEmbeddingsV5Model", "adapters/retrieval"),
        ("MoonshotKimiaForCausalLM", "whisper-large-v3"),
        ("MiMoV2OmniForCausalLM", "audio_tokenizer"),
        ("Cosmos3ForConditionalGeneration", "vision_encoder"),
    ],
)
def test_weights_in_folders_of_a_models_own_count(tmp_path: Path, architecture: str, inner: str) -> None:
    """Where vLLM reads them, each with what says how they are used. What another model has there is not read."""
    part = tmp_path / inner
    part.mkdir(parents=True)
    (tmp_path / "model.safetensors").write_text("base")

    def write(name: str, text: str) -> tuple[str, Any, str]:
        """What the weights are known by with this content, and what another architecture's are."""
        (part / name).write_text(text)
        found = []
        for one in (architecture, "LlamaForCausalLM"):
            read = rules({**CONFIG, "architectures": [one]}, model=str(tmp_path))
            found.append((find_weights_id(make_facts(**read), tmp_path / "digests"), read["model_rules"]))
        (weights, settings), other = found
        return weights, str(settings), str(other)

    seen = [
        write(*file)
        for file in (
            ("model.safetensors", "one"),
            ("model.safetensors", "other"),
            ("config.json", "{}"),
            ("adapter_config.json", "{}"),
            ("README.md", "read me"),
        )
    ]
    assert len({weights for weights, _, _ in seen}) == 2
    assert len({settings for _, settings, _ in seen}) == 3
    assert len({other for _, _, other in seen}) == 1


def test_parts_of_a_model_are_found(tmp_path: Path) -> None:
    """The other models that a configuration names as parts: their folders, or their names if there are none."""
    (tmp_path / "text").mkdir()
    read = rules({**CONFIG, "text_model_id": str(tmp_path / "text"), "audio_model_id": None})
    assert read["part_paths"] == (str(tmp_path / "text"),)
    assert rules()["part_paths"] == ()


_MORE = re.compile(r"secondary_weights = |allow_patterns_overrides = |(get_hf_file_bytes|torch\.load|load_file)\(")


def test_models_that_read_weights_elsewhere_are_known() -> None:
    """A model of vLLM's that is not listed here may read files that count for nobody: see `_INNER_PARTS`."""
    if release_of(vllm.__version__) != (0, 32):
        pytest.skip("the list is of 0.32")
    package = Path(vllm.__file__).parent
    files = [*package.glob("models/**/*.py"), *package.glob("model_executor/models/**/*.py")]
    found = {file.stem for file in files if _MORE.search(file.read_text())}
    of_inner_parts = {"cosmos3", "cosmos3_edge", "jina", "kimi_audio", "mimo_audio"}
    of_other_models = {"ultravox", "qwen3_dflash"}  # a model that the configuration names, and a draft model
    after_the_cache = {"adapters", "clef_omni", "roberta"}  # what is made of the last layer's output
    assert found == of_inner_parts | of_other_models | after_the_cache
