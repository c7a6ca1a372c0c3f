"""vLLM's own specs as canonical groups: what is supported, what is refused, and in which words."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import fields
from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

import connector
from connector.facts import CellFacts, EngineFacts, StateFacts
from connector.identity import CacheShape, describe_namespace, read_shape
from connector.vllm.engine_facts import cache_layers, read_name
from kvstore.model.kinds import ChunkedLocal, FullAttention, Latent, Recurrent, SlidingWindow
from tests.unit.connector.engine_specs import HEADS, MAMBA, facts, full, group, mla, window


def shape_of(*groups: KVCacheGroupSpec, **changes: Any) -> CacheShape:
    shape = read_shape(facts(*groups, **changes))
    assert isinstance(shape, CacheShape), shape
    return shape


def test_layers_of_one_kind_are_one_group() -> None:
    """vLLM's groups of a model with windows become two: by kind, layers in the model's order, a feed for each table."""
    read = facts(group(window(), 0, 3), group(window(), 1, 4), group(full(), 2, 10))
    assert read.unsupported is None
    windows, whole = read.groups
    assert windows.kind == SlidingWindow(512)
    assert [name.split(".")[2] for name in windows.layer_names] == ["0", "1", "3", "4"]
    assert (windows.feeds, windows.feed_groups) == ((0, 1, 0, 1), (0, 1))
    assert (whole.kind, whole.feed_groups) == (FullAttention(), (2,))
    shape = shape_of(group(window(), 0, 3), group(window(), 1, 4), group(full(), 2, 10))
    assert (shape.layout.page_tokens, [group.num_slices for group in shape.layout.groups]) == (512, [2, 2])


def test_how_vllm_groups_layers_does_not_matter() -> None:
    """Two engines whose vLLM grouped a model's layers differently share a namespace."""
    one = facts(group(window(), 0, 3), group(window(), 1, 4), group(full(), 2, 5))
    other = facts(group(full(), 2, 5), group(window(), 0, 1, 3, 4))
    names = [describe_namespace(read, read_shape(read), "w").id for read in (one, other)]  # type: ignore[arg-type]
    assert names[0] == names[1]


def test_different_layers_in_one_group() -> None:
    """A group of unlike layers (an indexer beside latent attention) is distinguished layer by layer."""
    specs = {"model.layers.0.attn": mla(), "model.layers.1.attn": mla(), "model.layers.0.indexer": mla(head_size=128)}
    mixed = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    latent, indexer = facts(mixed).groups
    assert (latent.kind, latent.content.token_bytes, len(latent.layer_names)) == (Latent(), 1152, 2)
    assert (indexer.content.token_bytes, indexer.feed_groups) == (256, (0,))


def test_recurrent_states() -> None:
    """States of three vLLM groups beside attention: pages are the scheduler's block, states in shares of the ranks."""
    groups = [group(MambaSpec(**MAMBA), number) for number in range(3)]
    read = facts(*groups, group(full(), 3))
    states, attention = read.groups
    assert (states.kind, states.feed_groups, attention.feed_groups) == (Recurrent(), (0, 1, 2), (3,))
    assert isinstance(states.content, StateFacts)
    assert (states.content.num_bytes, states.content.element_bytes) == (48 + 4096, 4)
    shape = shape_of(*groups, group(full(), 3))
    assert shape.layout.page_tokens == 128
    two = shape_of(*groups, group(full(num_kv_heads=1), 3), ranks=2)
    assert [group.num_slices for group in two.layout.groups] == [2, 2]


def test_tensor_parallel_size_matters_for_states_only() -> None:
    """Attention of any number of ranks is one namespace; recurrent states are of their own number of ranks."""

    def name(*groups: KVCacheGroupSpec, **changes: Any) -> bytes:
        read = facts(*groups, **changes)
        shape = read_shape(read)
        assert isinstance(shape, CacheShape)
        return describe_namespace(read, shape, "w").id

    assert name(group(full(), 0)) == name(group(full(num_kv_heads=1), 0), ranks=2)
    assert name(group(full(), 0)) == name(group(full(num_kv_heads=1), 0), ranks=4)  # replicated heads
    assert name(group(mla(), 0)) == name(group(mla(), 0), ranks=8)
    hybrid = [group(MambaSpec(**MAMBA), 0), group(full(), 1)]
    halves = [group(MambaSpec(**{**MAMBA, "shapes": ((3, 4), (2, 16, 16))}), 0), group(full(num_kv_heads=1), 1)]
    assert name(*hybrid) != name(*halves, ranks=2)


@pytest.mark.parametrize(
    ("text_config", "total_heads", "seen"),
    [
        ({"num_key_value_heads": 2}, 2, 2),
        ({"num_key_value_heads": 2, "num_global_key_value_heads": 1}, 2, 2),  # replicas of both kinds of layers
        ({"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, 2, 4),
        ({"block_configs": [{"attention": {"n_heads_in_group": number}} for number in (8, None, 2)]}, 1, 4),
        ({"block_configs": [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=2))]}, 1, 4),
        ({"attention_other_setting": {"num_attention_groups": 4}}, 2, 4),
        ({"num_key_value_heads": [1, 4]}, 1, 4),
    ],
)
def test_replicas_only_where_all_layers_have_such_heads(
    text_config: dict[str, Any], total_heads: int, seen: int
) -> None:
    """Where layers differ in KV heads, ranks with one head each may hold different ones, whatever the number is."""
    read = facts(group(full(num_kv_heads=1), 0), ranks=4, total_heads=total_heads, text_config=text_config)
    content = read.groups[0].content
    assert isinstance(content, CellFacts)
    assert content.total_heads == seen


def pipeline(*stages: Sequence[KVCacheGroupSpec], **changes: Any) -> list[EngineFacts]:
    """What the first rank of each stage reads, after the stages have told each other what they hold."""
    told: list[Any] = []

    def listen(seen: list[Any], mine: Any, group: object) -> None:
        told.append(mine)
        seen[:] = [mine] * len(stages)

    def exchange(seen: list[Any], mine: Any, group: object) -> None:
        assert mine in told
        seen[:] = told

    def read() -> list[EngineFacts]:
        ranks = changes.get("ranks", 1)
        sizes = {"pipeline_parallel_size": len(stages), **changes}
        return [facts(*groups, rank=number * ranks, **sizes) for number, groups in enumerate(stages)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("connector.vllm.engine_facts.get_pp_group", lambda: SimpleNamespace(cpu_group=None))
        for talk in (listen, exchange):
            patch.setattr("torch.distributed.all_gather_object", talk)
            found = read()
        return found


def test_stages_of_a_pipeline() -> None:
    """Every stage knows the same groups, in one order and with all block tables, and its own layers of them."""
    first, last = pipeline(
        [group(window(), 0), group(window(), 1), group(full(), 2)], [group(full(), 3), group(window(), 4, 5)]
    )
    assert (first.groups[0].stage, last.groups[0].stage, first.pp_size, first.num_ranks) == (0, 1, 2, 2)
    assert (
        [each.kind for each in first.groups]
        == [each.kind for each in last.groups]
        == [SlidingWindow(512), FullAttention()]
    )
    windows = [read.groups[0] for read in (first, last)]
    assert [(each.feeds, each.feed_groups) for each in windows] == [((0, 1), (0, 1)), ((1, 1), (0, 1))]
    assert [name.split(".")[2] for name in windows[1].layer_names] == ["4", "5"]
    assert windows[0].stages == windows[1].stages == (windows[0].layer_names, windows[1].layer_names)
    one, other = read_shape(first), read_shape(last)
    assert isinstance(one, CacheShape) and isinstance(other, CacheShape)
    assert one.layout == other.layout
    assert [each.num_slices for each in one.layout.groups] == [4, 4]
    assert describe_namespace(first, one, "w").id == describe_namespace(last, other, "w").id


def test_stages_are_of_the_namespace() -> None:
    """Records are of one stage's layers, so engines share them if the stages are equal, at any number of ranks."""

    def name(*stages: Sequence[KVCacheGroupSpec], **changes: Any) -> bytes:
        read = pipeline(*stages, **changes)[0]
        shape = read_shape(read)
        assert isinstance(shape, CacheShape)
        return describe_namespace(read, shape, "w").id

    whole, halves = [group(full(), 0, 1, 2, 3)], [[group(full(), 0, 1)], [group(full(), 2, 3)]]
    others = [[group(full(), 0)], [group(full(), 1, 2, 3)]]
    on_two = [[group(full(num_kv_heads=1), 0, 1)], [group(full(num_kv_heads=1), 2, 3)]]
    assert len({name(whole), name(*halves), name(*others)}) == 3
    assert name(*halves) == name(*on_two, ranks=2)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([group(window(), 1)], "stages 0 and 1 do not hold layers of the same kinds"),
        ([group(full(head_size=32), 1)], "stages 0 and 1 do not hold layers of the same kinds"),
        ([group(full(non_causal=True), 1)], "non-causal"),
    ],
)
def test_unequal_stages_are_refused(last: list[KVCacheGroupSpec], reason: str) -> None:
    """What one stage cannot cache, or does not hold at all, leaves every stage uncached, for one reason."""
    for read in pipeline([group(full(), 0)], last):
        assert read.unsupported is not None and reason in read.unsupported
        assert read.groups == ()


def test_a_stage_that_is_refused_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may be found on one machine of a pipeline and not on another, whose ranks would wait for ever."""
    told: list[Any] = []

    def exchange(seen: list[Any], mine: Any, group: object) -> None:
        told.append(mine)
        seen[:] = [mine, {}]

    monkeypatch.setattr("connector.vllm.engine_facts.get_pp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr("torch.distributed.all_gather_object", exchange)
    read = facts(group(full(), 0), pipeline_parallel_size=2, worker_cls="gone.Worker")
    assert told == [read.unsupported] and "worker_cls" in told[0]
    spec = SimpleNamespace(block_size=128, prefix_cacheable=True)  # of a release that is not known
    read = facts(group(spec, 0), pipeline_parallel_size=2)  # type: ignore[arg-type]
    assert told[1:] == [read.unsupported] and "has changed: AttributeError" in told[1]


def test_states_that_a_stage_completes_late_are_refused() -> None:
    """With drafts a stage but the last copies a state to its block some steps after that step's saves."""
    stages = [[group(MambaSpec(**MAMBA), number)] for number in range(2)]
    drafts = SimpleNamespace(draft_model_config=None)
    assert all("drafts" in str(read.unsupported) for read in pipeline(*stages, drafts=drafts))
    assert {read.unsupported for read in pipeline(*stages)} == {None}
    assert facts(*stages[0], drafts=drafts).unsupported is None
    attention = [[group(full(), number)] for number in range(2)]
    assert {read.unsupported for read in pipeline(*attention, drafts=drafts)} == {None}


def test_engines_that_step_together() -> None:
    """Data-parallel engines of a model with experts; vLLM makes those of others engines of their own."""
    assert [facts(group(full(), 0), data_parallel_size=size).steps_together for size in (1, 2)] == [False, True]


def test_chunked_and_draft_layers() -> None:
    """Chunked-local layers are a kind; a draft model's layers are a group of their own, last."""
    chunks = ChunkedLocalAttentionSpec(block_size=128, attention_chunk_size=8192, **HEADS)
    read = facts(group(full(), 9, is_eagle_group=True), group(chunks, 0, 1), group(full(), 2))
    assert [(each.kind, each.drafts) for each in read.groups] == [
        (ChunkedLocal(8192), False),
        (FullAttention(), False),
        (FullAttention(), True),
    ]


@pytest.mark.parametrize(
    ("groups", "changes", "reason"),
    [
        ([group(MambaSpec(**{**MAMBA, "mamba_cache_mode": "none"}), 0)], {}, "mode 'align'"),
        ([group(full(non_causal=True), 0)], {}, "non-causal"),
        ([group(full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), 0)], {}, "INT8_PER_TOKEN_HEAD"),
        ([group(full(state_content_bytes=300), 0)], {}, "packed"),
        ([group(CircularBufferSpec(block_size=8, **HEADS), 0)], {}, "does not cache by prefix"),
        ([group(mla(model_version="deepseek_v4"), 0)], {}, "MLAAttentionSpec"),
        ([group(full(), 0)], {"decode_context_parallel_size": 2}, "context parallelism"),
        ([group(full(), 0)], {"prefill_context_parallel_size": 2}, "context parallelism"),
        ([group(full(), 0)], {"calculate_kv_scales": True}, "calculate_kv_scales"),
        ([group(full(), 0)], {"is_diffusion": True}, "diffusion"),
        ([group(full(), 0)], {"pooling_resumes": False}, "pooling"),
        ([group(full(), 0)], {"returns_experts": True}, "enable_return_routed_experts"),
        ([group(full(), 0)], {"weight_transfer": "nccl"}, "set weights_may_change"),
        ([group(full(), 0)], {"code": "modeling_own.OwnModel"}, "trust_remote_code"),
        (
            [group(full(num_kv_heads=1), 0)],
            {"ranks": 4, "total_heads": 3},
            "3 KV heads cannot be divided",
        ),
    ],
)
def test_what_is_not_proven_is_refused(groups: list[KVCacheGroupSpec], changes: dict[str, Any], reason: str) -> None:
    """The model is left uncached, with the reason in words."""
    read = facts(*groups, **changes)
    assert read.unsupported is not None and reason in read.unsupported
    assert read.groups == ()


@pytest.mark.parametrize(("release", "is_refused"), [("0.30.0", True), ("0.31.1", True), ("0.32.0", False)])
def test_cascade_attention_is_refused(monkeypatch: pytest.MonkeyPatch, release: str, *, is_refused: bool) -> None:
    """Of two requests one has a block that is being saved: two references, as if both had it."""
    monkeypatch.setattr("vllm.__version__", release)
    assert ("cascade" in (facts(group(full(), 0), cascades=True).unsupported or "")) is is_refused
    assert facts(group(full(), 0)).unsupported is None


def test_variables_that_change_the_model_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are chosen at random, as in a benchmark: nobody else may get such pages."""
    assert facts(group(full(), 0)).model_rules == {}
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    environment: dict[str, Any] = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
    assert facts(group(full(), 0)).model_rules == {"environment": environment}
    monkeypatch.setenv("VLLM_B12X_MOE_FP4_FORCE_A16", "1")  # activations of experts in 16 bits instead of 4 or 8
    environment |= {"VLLM_B12X_MOE_FP4_FORCE_A16": True}
    assert facts(group(full(), 0)).model_rules == {"environment": environment}


def test_updates_of_weights_that_are_foreseen() -> None:
    """An engine to which a trainer sends weights is cached if the operator has said that they change."""
    assert facts(group(full(), 0), weight_transfer="nccl", weights_may_change=True).unsupported is None


def test_a_worker_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change the model: its name counts, and the files of its package. vLLM's workers do not. If its files are
    not found, the engine is not cached."""
    assert facts(group(full(), 0)).model_rules == facts(group(full(), 0), worker_cls="auto").model_rules == {}
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    for code in ("first", "second"):
        (tmp_path / "own.py").write_text(code)
        invalidate_caches()
        seen.append(facts(group(full(), 0), worker_cls="own.Worker").model_rules["worker"])
    assert [worker["class"] for worker in seen] == ["own.Worker"] * 2
    assert seen[0]["code"] != seen[1]["code"]
    assert "worker_cls" in str(facts(group(full(), 0), worker_cls="gone.Worker").unsupported)


def test_blocks_that_do_not_fit_are_refused() -> None:
    """Block sizes that are no multiple of a hash link are refused, in the operator's words."""
    reason = read_shape(facts(group(full(block_size=24), 0)))
    assert isinstance(reason, str) and "multiple of 16" in reason


def test_kernel_blocks_and_shared_layers() -> None:
    """Kernel blocks become a dimension of the manager's blocks; layers that share a cache are not looked at."""
    whole = torch.zeros(100, 2, 128, 128)
    split = torch.zeros(400, 2, 32, 128)
    layers = cache_layers({"a": whole, "b": split, "shares a": whole}, ("b", "a"), 100)
    assert [tuple(layer.shape) for layer in layers] == [(100, 4, 2, 32, 128), (100, 2, 128, 128)]


def test_every_fact_is_read() -> None:
    """A fact that nothing in the connector reads is none: it looks like a part of the identity, and is not."""
    sources = [
        path.read_text() for path in Path(connector.__file__).parent.rglob("*.py") if path.name != "engine_facts.py"
    ]
    unread = [fact.name for fact in fields(EngineFacts) if not re.search(rf"\.{fact.name}\b", "\n".join(sources))]
    assert unread == []


@pytest.mark.parametrize(
    ("model", "served", "named"),
    [("/models/llama/", None, "llama"), ("org/llama", "chat", "chat"), ("org/llama", ["chat", "other"], "chat")],
)
def test_a_name_for_people(model: str, served: object, named: str) -> None:
    """As users ask for the model, else its folder, and no path of the machine; and the process."""
    config = SimpleNamespace(model_config=SimpleNamespace(model=model, served_model_name=served))
    assert read_name(config) == f"vllm {named}, pid {os.getpid()}"
