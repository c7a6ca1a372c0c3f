"""What decides a namespace: each field that changes the model's cache separates engines, and nothing else does."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.facts import EngineFacts
from connector.identity import CacheShape, describe_namespace, read_shape
from connector.vllm.model_facts import media_refusal, read_rules, weights_source
from connector.vllm.model_files import (
    UNKNOWN,
    code_digest,
    plugin_digests,
    processor_digest,
)
from kvstore.model.keys import NamespaceId
from kvstore.model.kinds import SlidingWindow
from tests.unit.connector.engine_configs import CONFIG, rules, vllm_config, with_code
from tests.unit.connector.support import make_facts

LONG_ROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}


@dataclass
class Online:
    """Stands for vLLM's arguments of a quantisation that is made at start."""

    linear: str = "fp8"


def test_what_a_reload_may_read_instead() -> None:
    """`update_config` changes a revision or a load format in a running engine, and `reload_weights` follows it."""
    other_format = SimpleNamespace(load_format="mistral", download_dir=None)
    others = [vllm_config(model="/models/b"), vllm_config(revision="v2"), vllm_config(load_config=other_format)]
    assert weights_source(vllm_config()) == weights_source(vllm_config())
    assert len({weights_source(config) for config in (vllm_config(), *others)}) == 4


def namespace(weights_id: str = "w", **changes: Any) -> NamespaceId:
    facts = make_facts(**changes)
    shape = read_shape(facts)
    assert isinstance(shape, CacheShape)
    return describe_namespace(facts, shape, weights_id).id


def grouped(**changes: Any) -> dict[str, Any]:
    """Facts with the one group changed."""
    return {"groups": (replace(make_facts().groups[0], **changes),)}


def content(**changes: Any) -> dict[str, Any]:
    return grouped(content=replace(make_facts().groups[0].content, **changes))


SEPARATING: dict[str, dict[str, Any]] = {
    "architecture": {"architecture": "Mistral"},
    "model config": {"model_config": {"hidden_size": 64, "sliding_window": 8}},
    "rope settings": {"model_config": {"hidden_size": 64, "rope_parameters": {"rope_theta": "500000.0"}}},
    "compute dtype": {"compute_dtype": "bfloat16"},
    "weight quantisation": {"quantization": "awq"},
    "quantisation at start": {"model_rules": {"quantization_config": {"linear": "fp8"}}},
    "rope for long requests": {"model_rules": {"long_rope": [True]}},
    "cache dtype": {"cache_dtype": "fp8_e5m2"},
    "cell dtype": content(dtype="bfloat16"),
    "head size": content(head_size=4),
    "value size": content(head_size_v=4),
    "number of heads": content(rank_heads=4, total_heads=4),
    "window": grouped(kind=SlidingWindow(32)),
    "wider window": grouped(kind=SlidingWindow(64)),
    "layers": grouped(stages=(("layer.0", "layer.2"),)),
    "pipeline stages": {**grouped(stages=(("layer.0",), ("layer.1",))), "pp_size": 2},
    "backend or instruction set": grouped(packing={"backend": "other"}),
    "draft layers": grouped(drafts=True),
    "weights": {"weights_id": "v"},
}


def test_each_field_that_matters_separates() -> None:
    """Any two of them, and the engine without, have different namespaces."""
    seen = {name: namespace(**changes) for name, changes in SEPARATING.items()}
    seen["none"] = namespace()
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_path": "/other/place"},
        {"num_blocks": 7},
        {"load_failure_policy": "fail"},
        {"prefix_caching": False},
        {"retention_tokens": 640},
        {"load_format": "safetensors"},
        {"draft_path": "/models/draft"},
        {"adapter_rules": {"target_modules": "q_proj"}},
        {"media_rules": {"video_pruning_rate": "0.5"}},
        {"cache_dtype": "float32"},  # what `auto` means for this model
        {"tp_size": 2, "rank_heads": 1},
        {"tp_size": 2, "tp_rank": 1, "rank_heads": 1},
    ],
)
def test_what_does_not_matter_does_not_separate(changes: dict[str, Any]) -> None:
    """Paths, sizes and ways of running keep engines together; adapters and media are in the prefix hash instead."""
    assert namespace(**changes) == namespace()


@pytest.mark.parametrize("config", [{**CONFIG, "rope_theta": 10001.0}, {**CONFIG, "text_config": {"num_layers": 3}}])
def test_the_configuration_counts_with_its_overrides(config: dict[str, Any]) -> None:
    """vLLM writes overrides into the configuration; floats are kept exactly, as text."""
    assert rules(config)["model_config"] != rules()["model_config"]


@pytest.mark.parametrize(
    "more",
    [
        {"_name_or_path": "/elsewhere"},
        {"transformers_version": "9.9"},
        {"torch_dtype": "float16"},
        {"max_model_len": 7},  # some models have settings
        {"text_config": {"num_layers": 2, "_name_or_path": "/elsewhere"}},
    ],
)
def test_where_a_configuration_is_from_does_not_count(more: dict[str, Any]) -> None:
    """Paths and versions in it, also in the part of a language model, are not the model."""
    assert rules({**CONFIG, **more})["model_config"] == rules()["model_config"]


def test_the_longest_request_counts_for_long_ropes_only() -> None:
    """vLLM chooses the factors of a longrope by `max_model_len`; for every other model it changes nothing."""
    assert rules(max_model_len=8192) == rules()
    short, long = (rules(LONG_ROPE, max_model_len=length)["model_rules"] for length in (4096, 4097))
    assert (short, long) == ({"long_rope": [False]}, {"long_rope": [True]})
    outside = {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}
    assert rules(outside, max_model_len=8192)["model_rules"] == {"long_rope": [True]}


def test_the_longest_request_counts_for_dynamic_ropes() -> None:
    """MiniMax M2 and Plamo 3 give `max_model_len` to the rope, and a dynamic one makes its base of it."""
    dynamic = {"rope_parameters": {"full": {"rope_type": "dynamic", "factor": 2.0}}}
    assert rules(dynamic, max_model_len=8192)["model_rules"] == {"dynamic_rope": 8192}
    assert rules({"rope_scaling": {"type": "dynamic"}}, max_model_len=7)["model_rules"] == {"dynamic_rope": 7}


def test_quantisation_that_is_made_at_start_counts() -> None:
    """Weights that are quantised while they are loaded are not those of the files."""
    found = [rules(quantization_config=given)["model_rules"] for given in (None, Online(), {"linear": "int8"})]
    assert found == [
        {},
        {"quantization_config": {"linear": "fp8"}},
        {"quantization_config": {"linear": "int8"}},
    ]


def test_files_that_say_how_weights_are_quantised_count(tmp_path: Path) -> None:
    """vLLM reads such a file if the configuration does not say it; without quantisation it reads none."""

    def found(quantization: str | None = "auto_awq", **config: Any) -> Any:
        config = vllm_config({**CONFIG, **config}, model=str(tmp_path))
        config.model_config.quantization = quantization
        return read_rules(config)["model_rules"].get("quantization_files")

    assert found() is None
    seen = set()
    for name in ("quant_config.json", "quantize_config.json", "hf_quant_config.json"):
        for text in ('{"zero_point": true}', '{"zero_point": false}'):
            (tmp_path / name).write_text(text)
            seen.add(found())
    assert len(seen) == 6 and None not in seen
    assert found(None) is None
    named = tmp_path / "elsewhere" / "torchao.json"
    named.parent.mkdir()
    for text in ("{}", "[]"):
        named.write_text(text)
        seen.add(found(quantization_config_file=str(named)))
    assert len(seen) == 8


def lora(**changes: Any) -> Any:
    values = {"target_modules": None, "lora_dtype": "auto", "enable_tower_connector_lora": False, **changes}
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (lora(), {}),
        (lora(lora_dtype=torch.bfloat16), {}),  # the model's
        (lora(lora_dtype=torch.float16), {"dtype": "float16"}),
        (lora(target_modules=["v_proj", "q_proj"]), {"target_modules": "q_proj,v_proj"}),
        (lora(enable_tower_connector_lora=True), {"media_towers": "true"}),
    ],
)
def test_what_changes_an_adapter(settings: Any, expected: dict[str, str]) -> None:
    """Settings under which one adapter does something else; to have adapters at all is none."""
    assert rules(lora_config=settings)["adapter_rules"] == expected


def test_what_changes_media() -> None:
    """Settings of the engine that vLLM's hash of an item does not cover."""
    media = SimpleNamespace(mm_processor_kwargs={"size": 2}, media_io_kwargs={}, video_pruning_rate=0.0)
    found = rules(multimodal_config=media)["media_rules"]
    assert {"vllm", "transformers"} <= found.pop("libraries").keys()
    assert found == {"mm_processor_kwargs": {"size": 2}, "processor": UNKNOWN}


def test_another_release_of_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may make something else of an image with the same files; a library that is not installed counts too."""
    seen = []
    for release in ("5.16.1", "5.19.0", None):

        def version(name: str, release: str | None = release) -> str:
            if release is None:
                raise PackageNotFoundError(name)
            return release

        monkeypatch.setattr("connector.vllm.model_files.version", version)
        seen.append(rules(multimodal_config=SimpleNamespace())["media_rules"])
    assert seen[0] != seen[1] != seen[2] != seen[0]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("media_pruned", {"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)}),
        ("media_encoded_elsewhere", {"ec_transfer_config": SimpleNamespace(is_ec_consumer=True)}),
        ("media_attention", {"is_mm_prefix_lm": True}),
        ("media_scales", {"multimodal_config": SimpleNamespace(mm_encoder_attn_dtype="fp8")}),
        (None, {"ec_transfer_config": SimpleNamespace(is_ec_consumer=False)}),
        (None, {"is_mm_prefix_lm": False}),
    ],
)
def test_media_whose_cache_depends_on_more_than_them(folder: Path, reason: str | None, changes: dict[str, Any]) -> None:
    """Pruned videos, encoders of other engines, items whose tokens attend to later ones, and scales that follow from
    what was encoded before."""
    media = SimpleNamespace()
    refusal = media_refusal(rules(**{"model": str(folder), "multimodal_config": media, **changes})["media_rules"])
    assert (refusal and refusal[0]) == reason


@pytest.mark.parametrize(
    ("gib", "caches_prefixes", "numbered"), [(0, False, True), (0, True, False), (4, False, False)]
)
def test_media_are_numbered_where_nothing_needs_hashes(gib: int, *, caches_prefixes: bool, numbered: bool) -> None:
    """Then vLLM's identifiers are no content, with or without a hash around them."""
    media = SimpleNamespace(mm_processor_cache_gb=gib)
    caches = SimpleNamespace(enable_prefix_caching=caches_prefixes)
    found = rules(multimodal_config=media, cache_config=caches)["media_rules"]
    refusal = media_refusal({**found, "processor": "known"})
    assert (refusal is not None and refusal[0] == "media_without_hash") is numbered


def test_draft_models() -> None:
    """A draft model with weights of its own has a folder of its own; layers of the model itself have not."""
    paths = {}
    for name in ("/models/a", "/models/draft"):
        draft = SimpleNamespace(model=name, revision=None)
        paths[name] = rules(speculative_config=SimpleNamespace(draft_model_config=draft))["draft_path"]
    assert paths == {"/models/a": None, "/models/draft": "/models/draft"}
    assert rules(speculative_config=SimpleNamespace(draft_model_config=None))["draft_path"] is None


def test_rules_are_facts() -> None:
    """What is read are fields of the facts, and nothing of it is a float."""
    read = rules(LONG_ROPE)
    facts = make_facts(**read)
    assert isinstance(facts, EngineFacts)
    assert namespace(**read)


def test_a_quantization_that_names_every_layer_of_every_expert() -> None:
    """DeepSeek-V3 with 44,544 names, as a list and as a map, twice: described by digests that differ where they do."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(3, 61)
        for expert in range(256)
        for part in ("gate", "up", "down")
    ]
    described = set()
    for ignored in (names, names[:-1], {name: {"bits": 4, "data_type": "int"} for name in names}):
        quantization = {"quant_method": "compressed-tensors", "ignore": ignored}
        found = rules({**CONFIG, "quantization_config": quantization}, quantization_config=quantization)
        assert found["model_config"]["quantization_config"]["quant_method"] == "compressed-tensors"
        assert found["model_config"]["quantization_config"]["ignore"]["num_items"] == len(ignored)
        described.add(namespace(**{name: found[name] for name in ("model_config", "model_rules")}))
    assert len(described) == 3
    few = {"quant_method": "compressed-tensors", "ignore": names[:1500]}
    assert rules({**CONFIG, "quantization_config": few})["model_config"]["quantization_config"] == few


LLAMA4: dict[str, Any] = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}


def tuned(max_model_len: int, written: bool | None = None, **chosen: bool) -> dict[str, Any]:
    """The rules of an engine with a Llama 4, in whose configuration vLLM may have written already."""
    text = {**LLAMA4["text_config"], **({} if written is None else {"attn_temperature_tuning": written})}
    config = vllm_config({**LLAMA4, "text_config": text}, max_model_len=max_model_len)
    config.model_config.try_get_generation_config = lambda: {"temperature": 0.6}
    config.model_config.override_generation_config = chosen
    return read_rules(config)


def test_the_tuning_of_a_llama_4_counts() -> None:
    """vLLM tunes with long requests, or as the generation config says. It notes that in a copy of the configuration, or
    in the one that is read here, before or after."""
    assert tuned(32768)["model_rules"] == {"attn_temperature_tuning": False}
    assert tuned(32769)["model_rules"] == {"attn_temperature_tuning": True}
    assert tuned(100, attn_temperature_tuning=True)["model_rules"] == {"attn_temperature_tuning": True}
    assert tuned(40000, attn_temperature_tuning=False)["model_rules"] == {"attn_temperature_tuning": False}
    assert tuned(100) == tuned(100, written=False) == tuned(100, written=True)
    other = {**CONFIG, "attn_temperature_tuning": True}  # a model that reads it from its configuration
    assert rules(other)["model_config"] != rules()["model_config"] and rules(other)["model_rules"] == {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with code of its own, and a processor of images."""
    (tmp_path / "modeling_my.py").write_text("SCALE = 1")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "attention.py").write_text("")
    (tmp_path / "processor_config.json").write_text('{"image_mean": 0.5}')
    (tmp_path / "weights.safetensors").write_text("")
    return tmp_path


def test_a_models_own_code_counts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each of its Python files, wherever the folder is; not where vLLM's own code computes the model."""
    code = read_rules(with_code(folder))["model_rules"]["code"]
    assert read_rules(with_code(folder, f"{folder}--modeling_my.MyModel"))["model_rules"]["code"] == code
    moved = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(folder, moved)
    assert read_rules(with_code(moved))["model_rules"]["code"] == code
    (moved / "weights.safetensors").write_text("other")
    assert read_rules(with_code(moved))["model_rules"]["code"] == code
    (moved / "layers" / "attention.py").write_text("WINDOW = 3")
    assert read_rules(with_code(moved))["model_rules"]["code"] != code
    for changes in ({"trust_remote_code": False}, {"using_transformers_backend": lambda: False}):
        assert read_rules(with_code(folder, **changes))["model_rules"] == {}
    assert read_rules(vllm_config(model=str(folder)))["model_rules"] == {}


def test_code_that_is_not_found_is_told(folder: Path) -> None:
    """It may be anything: the engine is not cached."""
    assert code_digest(with_code("someone/elsewhere")) == UNKNOWN
    assert code_digest(with_code(folder, "someone/elsewhere--modeling_my.MyModel")) == UNKNOWN
    (folder / "modeling_my.py").unlink()
    (folder / "layers" / "attention.py").unlink()
    assert code_digest(with_code(folder)) == UNKNOWN


def test_how_media_are_processed_counts(folder: Path) -> None:
    """The files that say it, with the settings that vLLM's hash of an item leaves out."""

    def media_rules(folder: Path | str) -> dict[str, Any]:
        return rules(model=str(folder), multimodal_config=SimpleNamespace(media_io_kwargs={"a": 1}))["media_rules"]

    before = media_rules(folder)
    assert before["media_io_kwargs"] == {"a": 1} and len(before["processor"]) == 64
    (folder / "config.json").write_text("{}")
    (folder / "modeling_my.py").write_text("it is not trusted, so it is not run")
    assert media_rules(folder) == before
    (folder / "processor_config.json").write_text('{"image_mean": 0.4}')
    changed = media_rules(folder)
    assert changed != before
    (folder / "preprocessor_config.json").write_text("{}")
    assert media_rules(folder) not in (before, changed)
    (folder / "tekken.json").write_text("{}")
    assert media_rules(folder)["processor"] not in (before["processor"], changed["processor"])
    whole = media_rules(folder)
    (folder / "speech_tokenizer").mkdir()
    (folder / "speech_tokenizer" / "preprocessor_config.json").write_text("{}")
    assert media_rules(folder) != whole
    assert media_rules("someone/elsewhere")["processor"] == UNKNOWN
    known, unknown = (media_refusal(media_rules(place)) for place in (folder, "someone/elsewhere"))
    assert known is None and unknown is not None and unknown[0] == "media_files"


def test_code_of_a_processor_in_another_repository_counts(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model's files may name it, as those of a fine-tuned copy do: not found, media are not cached."""
    other = tmp_path_factory.mktemp("other")
    (other / "processing.py").write_text("SIZE = 1")
    config = vllm_config(model=str(folder))
    before = processor_digest(config)
    for place in (str(other), "someone/elsewhere"):
        named = {"auto_map": {"AutoImageProcessor": [None, f"{place}--processing.Own"]}}
        (folder / "preprocessor_config.json").write_text(json.dumps(named))
        assert processor_digest(config) not in (before, UNKNOWN)  # code that is not trusted is not run
        config.model_config.trust_remote_code = True
        first = processor_digest(config)
        (other / "processing.py").write_text("SIZE = 2")
        assert (first == UNKNOWN) == (place != str(other))
        assert (processor_digest(config) == first) == (place != str(other))
        config.model_config.trust_remote_code = False


def test_both_names_of_a_cache_type_are_one() -> None:
    assert namespace(cache_dtype="fp8") == namespace(cache_dtype="fp8_e4m3") != namespace(cache_dtype="fp8_e5m2")


def test_plugins_of_vllm_are_known_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are installed or those that `VLLM_PLUGINS` names, each with the files of its whole package; one that
    cannot be imported is named. vLLM's own and the connector are left out."""
    assert plugin_digests(None) == {}
    (tmp_path / "patches" / "deep").mkdir(parents=True)
    for file in ("__init__.py", "deep/__init__.py"):
        (tmp_path / "patches" / file).touch()
    (tmp_path / "patches-1.0.dist-info").mkdir()
    points = "[vllm.general_plugins]\npatch = patches.deep:patch\ngone = no_such_package:patch\n"
    (tmp_path / "patches-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    found = plugin_digests(None)
    assert found.keys() == {"patches.deep:patch", "no_such_package:patch"}
    assert found["no_such_package:patch"] == UNKNOWN != found["patches.deep:patch"]
    assert plugin_digests(["patch"]).keys() == {"patches.deep:patch"} and plugin_digests([]) == {}
    seen = [found]
    for name in ("other.py", "compiled.so", "deep/compiled.cpython-311-x86_64-linux-gnu.so"):
        (tmp_path / "patches" / name).write_text("x = 1")
        seen.append(plugin_digests(["patch"]))
    assert len({one["patches.deep:patch"] for one in seen}) == 4


def test_scales_of_a_media_encoder_count(tmp_path: Path) -> None:
    """A file of scales changes what an encoder in fp8 makes of an image; without the file media are not cached."""
    seen = []
    for content in ("{}", '{"layer": {"q": 2.0}}', None):
        file = tmp_path / "scales.json"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        media = SimpleNamespace(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file))
        seen.append(rules(multimodal_config=media)["media_rules"]["encoder_scales"])
    assert len(set(seen)) == 3
    assert seen[2] == UNKNOWN
