"""What is read of an engine on a GPU: which backends' blocks are tokens in order, and what their pages depend on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import MambaSpec

from connector.facts import EngineFacts
from connector.identity import describe_namespace, read_shape
from connector.vllm.engine_facts import read_facts
from kvstore.model.kinds import FullAttention, Latent, Recurrent
from tests.unit.connector import engine_specs
from tests.unit.connector.engine_specs import MAMBA, full, group, mla, window


def platform(name: str) -> SimpleNamespace:
    """What vLLM reports of a machine."""
    return SimpleNamespace(device_type="cuda", device_name=name, is_cpu=lambda: False, is_cuda=lambda: name == "cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.vllm.engine_facts.current_platform", platform("cuda"))


def facts(monkeypatch: pytest.MonkeyPatch, backends: dict[int, str], *groups: Any, **changes: Any) -> EngineFacts:
    """An engine whose layers, by number, have these attention backends."""

    def layer(backend: str) -> SimpleNamespace:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))

    context = {f"model.layers.{number}.attn": layer(backend) for number, backend in backends.items()}

    def read(config: Any, kv: Any, **others: Any) -> EngineFacts:
        config.compilation_config = SimpleNamespace(static_forward_context=context)
        return read_facts(config, kv, **others)

    monkeypatch.setattr(engine_specs, "read_facts", read)
    return engine_specs.facts(*groups, **changes)


@pytest.mark.usefixtures("gpu")
def test_block_size_and_backend_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with other block sizes and other backends that keep tokens in order share one namespace."""
    one = facts(monkeypatch, {0: "FLASH_ATTN", 1: "FLASH_ATTN"}, group(full(block_size=16), 0, 1))
    other = facts(monkeypatch, {0: "FLASHINFER", 1: "TRITON_ATTN"}, group(full(block_size=64), 0, 1))
    assert (one.unsupported, other.unsupported) == (None, None)
    assert [group.kind for group in one.groups] == [group.kind for group in other.groups] == [FullAttention()]
    assert (one.device, other.groups[0].block_tokens) == ("cuda", 64)
    names = [describe_namespace(read, read_shape(read), "w").id for read in (one, other)]  # type: ignore[arg-type]
    assert names[0] == names[1]


@pytest.mark.usefixtures("gpu")
def test_minor_releases_share_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test on a GPU has saved with one release and loaded with another. Corrections of one release do share."""
    names = []
    for version in ("0.32.0", "0.32.1", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        read = facts(monkeypatch, {0: "FLASH_ATTN"}, group(full(block_size=16), 0))
        names.append(describe_namespace(read, read_shape(read), "w").id)  # type: ignore[arg-type]
    assert names[0] == names[1] != names[2]


def test_a_cpu_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU engine keeps in a block is ordered by its instructions: the two never meet."""
    cpu = facts(monkeypatch, {}, group(full(block_size=128), 0))
    monkeypatch.setattr("connector.vllm.engine_facts.current_platform", platform("cuda"))
    gpu = facts(monkeypatch, {0: "FLASH_ATTN"}, group(full(block_size=128), 0))
    names = [describe_namespace(read, read_shape(read), "w").id for read in (cpu, gpu)]  # type: ignore[arg-type]
    assert names[0] != names[1]


@pytest.mark.usefixtures("gpu")
def test_latent_and_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent vectors are tokens in order as well; a state depends on its kernels and on the layout they chose."""
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    read = facts(monkeypatch, {0: "FLASHMLA"}, group(mla(block_size=64), 0))
    assert [(one.kind, one.packing) for one in read.groups] == [(Latent(), {"cell": "token", "vllm": "0.32"})]
    states = group(MambaSpec(**MAMBA), 0)
    read = facts(monkeypatch, {0: "GDN_ATTN", 1: "FLASH_ATTN"}, states, group(full(), 1))
    recurrent = read.groups[0]
    assert recurrent.kind == Recurrent()
    assert recurrent.packing["backend"] == "GDN_ATTN"
    assert recurrent.packing["convolution"] in ("SD", "DS")
    monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda: "DS")
    other = facts(monkeypatch, {0: "GDN_ATTN", 1: "FLASH_ATTN"}, states, group(full(), 1))
    monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda: "SD")
    third = facts(monkeypatch, {0: "GDN_ATTN", 1: "FLASH_ATTN"}, states, group(full(), 1))
    assert other.groups[0].packing != third.groups[0].packing


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "reader"), [("TRITON_FLASH_ATTN", "FLASH_ATTN"), ("TRITON_FLASHINFER", "FLASHINFER")])
def test_pairs_of_backends_keep_plain_cells(monkeypatch: pytest.MonkeyPatch, name: str, reader: str) -> None:
    """Two backends on one cache, one of them for images: vLLM's own class stores with Triton's method alone, and the
    engine shares the pages of those with one backend."""
    if name not in AttentionBackendEnum.__members__:
        pytest.skip(f"this vLLM has no {name}")
    # what reads it need not be installed: storing is the other one's
    reads = type(reader, (TritonAttentionBackend,), {"get_name": staticmethod(lambda: reader)})
    for module in ("flash_attn", "flashinfer"):
        stand_in = SimpleNamespace(FlashAttentionBackend=reads, FlashInferBackend=reads)
        monkeypatch.setitem(sys.modules, f"vllm.v1.attention.backends.{module}", stand_in)
        pair_of = f"vllm.v1.attention.backends.triton_{module}"
        monkeypatch.setitem(sys.modules, pair_of, stand_in)  # so that what the test imports there goes after it
        del sys.modules[pair_of]
    backend: Any = AttentionBackendEnum[name].get_class()
    assert backend.get_name() == name
    assert (backend.general_backend_cls.get_name(), backend.causal_backend_cls.get_name()) == ("TRITON_ATTN", reader)
    stores = backend.get_impl_cls().do_kv_cache_update
    impl = SimpleNamespace(general_impl=SimpleNamespace(do_kv_cache_update=lambda *what: ("by Triton", *what)))
    assert stores(impl, "key", "value") == ("by Triton", "key", "value")
    one = facts(monkeypatch, {0: name}, group(full(), 0))
    other = facts(monkeypatch, {0: "TRITON_ATTN"}, group(full(), 0))
    assert one.unsupported is None
    names = [describe_namespace(read, read_shape(read), "w").id for read in (one, other)]  # type: ignore[arg-type]
    assert names[0] == names[1]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["FLASHMLA_SPARSE", "ROCM_ATTN", "DEEPSEEK_V32_INDEXER", "TURBOQUANT"])
def test_backends_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A backend with an unknown block layout: the engine logs its name and is not cached."""
    read = facts(monkeypatch, {0: "FLASH_ATTN", 1: backend}, group(full(), 0), group(window(), 1))
    assert read.unsupported is not None
    assert backend in read.unsupported
    assert read.groups == ()


@pytest.mark.usefixtures("gpu")
def test_a_layer_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its layer there is no telling how a cache is written."""
    read = facts(monkeypatch, {0: "FLASH_ATTN"}, group(full(), 0, 1))
    assert read.unsupported is not None
    assert "model.layers.1.attn" in read.unsupported


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's GPUs call themselves cuda as well; their kernels lay blocks out in other ways."""
    monkeypatch.setattr("connector.vllm.engine_facts.current_platform", platform("rocm"))
    read = facts(monkeypatch, {0: "TRITON_ATTN"}, group(full(), 0))
    assert read.unsupported is not None
    assert "rocm" in read.unsupported
