"""A vLLM that is not the one we were written for: what is missing is found before it is imported, and said."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

import connector
from connector.plugin import register
from connector.vllm import inert
from connector.vllm.connector import KVStoreConnector
from connector.vllm.contract import BASE, Use, is_tested, missing, release_of
from connector.vllm.model_files import stamp_at_start
from connector.weights import stamp_weights


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    inert.connector_class.cache_clear()
    yield
    inert.connector_class.cache_clear()


def config(**settings: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config=settings, kv_role="kv_both")
    return SimpleNamespace(kv_transfer_config=transfer)


def start(chosen: type, caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[list[Any], list[str]]:
    """Both sides of an engine in the order in which vLLM makes them, and what they warn of."""
    with caplog.at_level(logging.WARNING, logger="vllm.kvstore"):
        sides = [
            chosen(config(**settings), role, SimpleNamespace())
            for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER)
        ]
    return sides, [record.getMessage() for record in caplog.records if record.name == "vllm.kvstore"]


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32)),
        ("0.32.1+cpu", (0, 32)),
        ("0.33.0rc1", (0, 33)),
        ("0.33.1.dev12+g1234567", (0, 33)),
        ("0.320.0", (0, 320)),
        ("v0.32", (0, 32)),
        ("1.0", (1, 0)),
        ("dev", None),
        ("", None),
        (None, None),
        ((0, 32), None),
        (b"0.32.0", None),
    ],
)
def test_versions_are_compared_as_numbers(version: object, release: tuple[int, int] | None) -> None:
    """0.320 is not 0.32, however they begin. What is no text is no release, and no error."""
    assert release_of(version) == release


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        *((version, True) for version in ("0.32.0", "0.32", "v0.32.1", "0.32.1+cpu", "0.32.0.post1")),
        *((version, False) for version in ("0.32.1rc1", "0.33.1.dev12+g1234567", "0.32-dev", "0.32.x", " 0.32.0")),
        *((version, False) for version in ("0.29.0", "0.320.0", "1.0", "dev", "", None, 0.32)),
    ],
)
def test_development_builds_are_not_tested(version: object, expected: bool) -> None:
    """A build between two releases may have what only the next one has."""
    assert is_tested(version) is expected


def test_the_installed_vllm_has_all_of_it() -> None:
    """The table is right for the release that the suite runs on, which is a tested one."""
    assert missing() == []
    assert is_tested(vllm.__version__)
    assert connector.KVStoreConnector is KVStoreConnector is connector.KVStoreConnector


def test_every_hook_of_ours_is_in_the_table() -> None:
    """What we override and vLLM no longer calls would be a silent loss. Hooks that came after 0.30 may be missing."""
    later = {"get_external_cache_hit_sources", "unregister_kv_caches", "restore_kv_caches"}
    hooks = {name for use in connector.vllm.contract.USES if use.module == BASE for name in use.hooks}
    ours = {
        name
        for cls in KVStoreConnector.__mro__
        if cls.__module__.startswith("connector.")
        for name, value in vars(cls).items()
        if callable(value) or isinstance(value, property | classmethod)
    }
    assert {name for name in ours if hasattr(KVConnectorBase_V1, name)} - later <= hooks | {"__doc__"}


@pytest.mark.parametrize(
    ("use", "lack"),
    [
        (Use("vllm.v1.no_such_module", "Name"), "vllm.v1.no_such_module"),
        (Use("vllm.v1.request", "NoSuchName"), "vllm.v1.request.NoSuchName"),
        (Use("vllm.v1.request", "Request", fields=("no_such_field",)), "vllm.v1.request.Request.no_such_field"),
        (Use("vllm.v1.outputs", "KVConnectorOutput", fields=("no_such",)), "vllm.v1.outputs.KVConnectorOutput.no_such"),
        (
            Use("vllm.v1.kv_cache_interface", "group_kernel_blocks", takes=("cache", "blocks")),
            "vllm.v1.kv_cache_interface.group_kernel_blocks with blocks",
        ),
        (
            Use(BASE, "SupportsHMA", hooks={"request_finished_all_groups": ("request",)}),
            f"{BASE}.SupportsHMA.request_finished_all_groups(request), it takes (request, block_ids)",
        ),
        (
            Use(
                BASE, "SupportsHMA", hooks={"no_such_hook": (), "request_finished_all_groups": ("request", "block_ids")}
            ),
            f"{BASE}.SupportsHMA.no_such_hook",
        ),
        (
            Use(BASE, "KVConnectorWorkerMetadata", hooks={"__init__": ("args", "kwargs")}),
            f"{BASE}.KVConnectorWorkerMetadata without aggregate, which every connector must answer",
        ),
    ],
)
def test_what_is_missing_is_named(use: Use, lack: str) -> None:
    """A module, a name, a field, a parameter, a hook, its parameters, a hook that we do not know."""
    assert missing((use,)) == [lack]


@pytest.mark.parametrize("seen", [None, 7, dict.get, type])
def test_a_hook_that_tells_no_parameters(monkeypatch: pytest.MonkeyPatch, seen: object) -> None:
    """What stands in a hook's place, it is named."""
    monkeypatch.setattr(KVConnectorBase_V1, "get_transfer_results", seen)
    (lack,) = missing()
    assert "get_transfer_results" in lack


@pytest.mark.parametrize("error", [RuntimeError("no driver"), OSError("no file"), KeyError("no key")])
def test_a_module_whose_import_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """It is missing, after any error; the error is named."""

    class Failing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "vllm.v1.request":
                raise error

    monkeypatch.delitem(sys.modules, "vllm.v1.request")
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    assert missing((Use("vllm.v1.request", "Request"),)) == [
        f"vllm.v1.request (its import raised {type(error).__name__}: {error})"
    ]


def test_a_hook_that_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The engine gets a connector that does nothing, is accepted for hybrid models, and warns once of the hook."""
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    chosen = connector.KVStoreConnector
    assert chosen is not KVStoreConnector and chosen is connector.KVStoreConnector
    assert issubclass(chosen, KVConnectorBase_V1) and issubclass(chosen, base.SupportsHMA)
    (worker, scheduler), warnings = start(chosen, caplog)
    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
    assert isinstance(scheduler.build_connector_meta(SimpleNamespace()), base.KVConnectorMetadata)
    assert scheduler.request_finished_all_groups(SimpleNamespace(), ()) == (False, None)
    assert scheduler.update_state_after_alloc(SimpleNamespace(), None, 0) is None
    assert not scheduler.requires_kv_delivery and not scheduler.has_pending_push_work()
    assert worker.get_handshake_metadata() is None
    assert worker.wait_for_save() is worker.start_load_kv(None) is None
    (warning,) = warnings
    assert "this engine is not cached" in warning and "KVConnectorBase_V1.get_transfer_results" in warning
    assert vllm.__version__ in warning and "0.30, 0.31, 0.32" in warning


def test_a_hook_that_is_new(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A question that every connector must answer, and we have never heard of: the engine starts all the same."""

    def verify_everything(self: Any) -> str:
        return "the base's answer"

    monkeypatch.setattr(KVConnectorBase_V1, "verify_everything", verify_everything, raising=False)
    asked = KVConnectorBase_V1.__abstractmethods__ | {"verify_everything"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", asked)
    (_, scheduler), (warning,) = start(connector.KVStoreConnector, caplog)
    assert scheduler.verify_everything() == "the base's answer"
    assert "without verify_everything" in warning


@pytest.mark.parametrize("error", [ImportError("no such name"), AttributeError("no such attribute"), TypeError("no")])
def test_an_error_that_the_table_did_not_foresee(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """While our own modules are imported: uncached, with the error in the log."""

    class Failing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "connector.vllm.connector":
                raise error

    monkeypatch.delitem(sys.modules, "connector.vllm.connector")
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    _, (warning,) = start(connector.KVStoreConnector, caplog)
    assert type(error).__name__ in warning and "this engine is not cached" in warning


def test_a_base_class_that_moved(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While vLLM still names it beside its old place we are accepted, inert; if not, nothing can be: the error says
    what to do."""
    monkeypatch.setitem(sys.modules, BASE, None)
    chosen = connector.KVStoreConnector
    assert issubclass(chosen, KVConnectorBase_V1)
    assert start(chosen, caplog)[1] != []
    monkeypatch.delattr("vllm.distributed.kv_transfer.kv_connector.v1.KVConnectorBase_V1")
    inert.connector_class.cache_clear()
    with pytest.raises(ImportError, match=r"has no KVConnectorBase_V1 .* without --kv-transfer-config"):
        start(connector.KVStoreConnector, caplog)


def test_a_factory_that_changed_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin runs in every engine of the environment, also in those that do not use the connector."""
    monkeypatch.delattr(KVConnectorFactory, "_registry")
    with caplog.at_level(logging.WARNING, logger="vllm.kvstore"):
        register()
    assert "kv_connector_module_path" in caplog.text


@pytest.mark.parametrize("lacking", ["", ".VllmConfig._resolve_mm_embedding_inputs", ".VllmConfig.__post_init__"])
def test_a_configuration_that_changed_ends_no_engine(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Nor does it keep the connector from being registered."""
    if not lacking:
        monkeypatch.setitem(sys.modules, "vllm.config", None)
    else:
        monkeypatch.delattr(f"vllm.config{lacking}")
    register()
    assert "KVStoreConnector" in vars(KVConnectorFactory)["_registry"]


def test_a_release_that_nobody_tested(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It has all that we use, and may use it differently: uncached, one warning, nothing of it is read."""
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert connector.KVStoreConnector is KVStoreConnector
    (worker, scheduler), (warning,) = start(KVStoreConnector, caplog)
    caplog.clear()
    assert worker.worker_side is None and worker.get_handshake_metadata() is None
    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
    assert scheduler.build_connector_meta(SimpleNamespace()).jobs.saves == ()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): None})
    assert scheduler.scheduler_side is None
    assert caplog.records == []
    assert "0.34.0" in warning and "allow_untested_vllm" in warning and "0.30, 0.31, 0.32, 0.33" in warning


def test_an_engine_that_is_off_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The operator switched it off."""
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert start(KVStoreConnector, caplog, mode="off")[1] == []


ROOT = Path(__file__).resolve().parents[3]

REGISTERED = """
import sys
from connector.plugin import register

register()
register()
ours = [name for name in sys.modules if name.split(".")[0] in ("connector", "kvstore")]
assert sorted(ours) == ["connector", "connector.plugin"], ours

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
from connector import KVStoreConnector

assert found is KVStoreConnector
print("found")
"""


@pytest.mark.parametrize(
    ("connector", "encodes_elsewhere", "may_lack"),
    [("KVStoreConnector", False, False), ("KVStoreConnector", True, True), ("NixlConnector", False, True)],
)
def test_media_without_their_embeddings(connector: str, *, encodes_elsewhere: bool, may_lack: bool) -> None:
    """Our engines refuse them, unless another engine encodes. Else vLLM takes them, and ends if it must compute one."""
    register()
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    media = SimpleNamespace(allow_missing_mm_embeddings=None, enable_mm_embeds=False, language_model_only=False)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        ec_transfer_config=SimpleNamespace(is_ec_consumer=encodes_elsewhere),
        kv_transfer_config=transfer,
    )
    vars(VllmConfig)["_resolve_mm_embedding_inputs"](config)
    assert (media.allow_missing_mm_embeddings, media.enable_mm_embeds) == (may_lack, may_lack)
    assert config.kv_transfer_config is transfer


@pytest.mark.parametrize("transfer", [None, "MultiConnector"])
def test_a_configuration_notes_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transfer: str | None
) -> None:
    """Those of an engine with a connector, once: what vLLM reads a moment later is what is there now."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None, hf_config=SimpleNamespace(to_dict=dict)),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        device_config=SimpleNamespace(),
        kv_transfer_config=transfer,
    )
    monkeypatch.setattr(VllmConfig, "__post_init__", lambda self: None)
    register()
    old = stamp_weights([str(tmp_path)], "auto")
    VllmConfig.__post_init__(config)
    weights.write_bytes(b"newer")
    VllmConfig.__post_init__(config)  # vLLM does it again in the engine's core
    assert (stamp_at_start(config) == old) is (transfer is not None)


def test_the_package_names_its_plugin() -> None:
    """Where the package is installed, vLLM finds the entry point in its own group."""
    (ours,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvstore"]
    assert ours.value == "connector.plugin:register"


def test_registering_loads_nothing_of_ours() -> None:
    """Any number of calls makes the name known; the connector is imported when it is requested, by any path."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "found"
