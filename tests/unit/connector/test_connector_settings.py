"""What an operator may set: every key from both places, and refusals that name the key, the expected and the seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.settings import ConnectorSettings, cache_folder
from kvstore.errors import InvalidRequest
from kvstore.runtime.sizes import parse_bytes

VALID: dict[str, tuple[Any, str]] = {
    "url": ("tcp://10.0.0.1:7071", "tcp://10.0.0.1:7071"),
    "token_file": ("/run/token", "/run/token"),
    "mode": ("load", "load"),
    "compression": ("none", "none"),
    "weights_id": ("release-7", "release-7"),
    "weights_may_change": (True, "true"),
    "weights_id_file": ("/run/weights-id", "/run/weights-id"),
    "tls_ca_file": ("/etc/ca.pem", "/etc/ca.pem"),
    "tls_certificate_file": ("/etc/engine.pem", "/etc/engine.pem"),
    "tls_key_file": ("/etc/engine.key", "/etc/engine.key"),
    "trust_mm_uuids": (True, "1"),
    "pinned_bytes": (64 << 20, "64MiB"),
    "memory_bytes": (8 << 30, "8GiB"),
    "disk_bytes": (1 << 40, "1TiB"),
    "lookup_timeout_ms": (70, "70"),
    "stall_timeout_ms": (80, "80"),
    "max_wait_ms": (90, "90"),
    "whole_prompt_hits": (True, "true"),
    "load_always": (True, "true"),
    "event_media": ("redis=SHARED_STORAGE", "redis=SHARED_STORAGE"),
    "name_blocks": ("hashes", "hashes"),
    "audit_rate": (0, "0"),
    "blend": (True, "true"),
    "blend_recompute_ratio": (0.5, "0.5"),
    "blend_audit_rate": (0.25, "0.25"),
    "blend_kl_max": (2.5, "2.5"),
    "allow_untested_vllm": (True, "true"),
    "instance_id": ("node-7", "node-7"),
    "instance_address": ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
}
"""By key a value that is not its default (where there is another one), and the same as text of an environment."""


def parse(extra: Mapping[str, Any] | None = None, **environment: str) -> ConnectorSettings:
    return ConnectorSettings.parse(extra or {}, environment)


def test_every_setting_is_covered_here() -> None:
    """A new setting fails this test until it is tested below."""
    assert set(VALID) == {field.name for field in fields(ConnectorSettings)}


@pytest.mark.parametrize("key", VALID)
def test_each_key_from_each_place(key: str) -> None:
    """Every key is read from the engine's configuration and, as text, from the environment, and changes only itself."""
    value, text = VALID[key]
    expected = {field.name: field.default for field in fields(ConnectorSettings)} | {key: value}
    for settings in (parse({key: value}), parse(**{f"KVSTORE_CONNECTOR_{key.upper()}": text})):
        assert {field.name: getattr(settings, field.name) for field in fields(settings)} == expected


@pytest.mark.parametrize("key", VALID)
def test_environment_wins(key: str) -> None:
    """With both given, what the environment says is used."""
    value, text = VALID[key]
    other = next(field.default for field in fields(ConnectorSettings) if field.name == key)
    assert getattr(parse({key: other}, **{f"KVSTORE_CONNECTOR_{key.upper()}": text}), key) == value


@pytest.mark.parametrize("text", ["8GB", "1.5GiB", "500 MB", "64mib", "1048576"])
def test_bytes_are_spelled_as_the_services_are(text: str) -> None:
    """One operator sets both."""
    assert parse({"pinned_bytes": text}).pinned_bytes == parse_bytes(text)


def test_other_environment_is_left_alone() -> None:
    """Variables of the service or of other programs are no settings of the connector."""
    assert parse(KVSTORE_LISTEN="unix:/x", PATH="/bin", CONNECTOR_URL="x") == ConnectorSettings()


@pytest.mark.parametrize(
    ("seen", "nearest"), [("urls", "url"), ("pined_bytes", "pinned_bytes"), ("max_wait_s", "max_wait_ms")]
)
def test_unknown_key_names_the_nearest(seen: str, nearest: str) -> None:
    """A misspelt key is refused with the key that was probably meant, from both places."""
    with pytest.raises(InvalidRequest, match=f"'{seen}'.*'{nearest}'"):
        parse({seen: 1})
    variable = f"KVSTORE_CONNECTOR_{seen.upper()}"
    with pytest.raises(InvalidRequest, match=f"'{variable}'.*'{nearest}'"):
        parse(**{variable: "1"})


def test_unknown_key_like_none_lists_all() -> None:
    """A key that resembles no other is refused with all that there are."""
    with pytest.raises(InvalidRequest) as refusal:
        parse({"qqqq": 1})
    assert all(key in str(refusal.value) for key in VALID)


def test_it_is_said_where_a_setting_of_the_service_belongs() -> None:
    """Whether it resembles one of the connector's or none."""
    with pytest.raises(InvalidRequest, match=r"'hot'.* a setting of the service is KVSTORE_HOT where it starts"):
        parse({"hot": "redis://a:1"})


def test_a_place_may_have_some_keys_only() -> None:
    """Another key of the connector is refused there, with the nearest of those that it may have; the environment, which
    other engines share, may have all.
    """
    only = ("url", "max_wait_ms")
    with pytest.raises(InvalidRequest, match=r"'max_wait'.*'max_wait_ms'"):
        ConnectorSettings.parse({"max_wait": 1}, {}, only=only)
    with pytest.raises(InvalidRequest, match="'pinned_bytes': known keys are max_wait_ms, url"):
        ConnectorSettings.parse({"pinned_bytes": 1}, {}, only=only)
    read = ConnectorSettings.parse({"max_wait_ms": 7}, {"KVSTORE_CONNECTOR_PINNED_BYTES": "9"}, only=only)
    assert (read.max_wait_ms, read.pinned_bytes) == (7, 9)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("url", 5, "text"),
        ("url", None, "text"),
        ("mode", "on", "both, load, save, off"),
        ("compression", "zstd", "auto, planes, tiles, none"),
        ("weights_may_change", "yes", "true or false"),
        ("weights_may_change", 1, "true or false"),
        ("pinned_bytes", "lots", "8GiB"),
        ("pinned_bytes", "8gigs", "8GiB"),
        ("pinned_bytes", "1.5", "8GiB"),
        ("pinned_bytes", True, "8GiB"),
        ("pinned_bytes", 1.5, "8GiB"),
        ("pinned_bytes", float("nan"), "8GiB"),
        ("pinned_bytes", float("inf"), "8GiB"),
        ("pinned_bytes", "-5", "8GiB"),
        ("pinned_bytes", "", "8GiB"),
        ("pinned_bytes", 0, "positive"),
        ("memory_bytes", -1, "positive"),
        ("disk_bytes", 0, "positive"),
        ("lookup_timeout_ms", 0, "positive"),
        ("stall_timeout_ms", -5, "positive"),
        ("max_wait_ms", [1], "whole number"),
        ("max_wait_ms", 10**30, "1 to 604800000"),
        ("audit_rate", 1.5, "from 0 to 1"),
        ("blend", "yes", "true or false"),
        ("blend_recompute_ratio", 1.5, "from 0 to 1"),
        ("blend_recompute_ratio", float("nan"), "from 0 to 1"),
        ("blend_audit_rate", -0.1, "from 0 to 1"),
        ("blend_kl_max", 0, "positive"),
        ("weights_id", "", "name"),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: Any, expected: str) -> None:
    """A value that does not fit is refused with its field, what fits, and what was seen."""
    with pytest.raises(InvalidRequest) as refusal:
        parse({key: value})
    text = str(refusal.value)
    assert expected in text
    assert key in text
    if value != "":
        assert str(value) in text


def test_bad_value_of_the_environment_names_the_variable() -> None:
    """What is wrong in the environment is named as it stands there."""
    with pytest.raises(InvalidRequest, match="KVSTORE_CONNECTOR_PINNED_BYTES"):
        parse(KVSTORE_CONNECTOR_PINNED_BYTES="lots")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        (" 8gib ", 8 << 30),
        ("512MiB", 512 << 20),
        ("3KiB", 3 << 10),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("7", 7),
    ],
)
def test_texts_for_bytes(text: str, value: int) -> None:
    """Bytes may be written with binary units, in any case, with or without a space."""
    assert parse({"pinned_bytes": text}).pinned_bytes == value


def test_whole_floats_are_numbers() -> None:
    """JSON writers may turn 1000 into 1000.0."""
    assert parse({"max_wait_ms": 1000.0}).max_wait_ms == 1000


def test_modes() -> None:
    """Each mode says whether it loads and whether it saves."""
    modes = {mode: parse({"mode": mode}) for mode in ("both", "load", "save", "off")}
    assert {mode: (settings.loads, settings.saves) for mode, settings in modes.items()} == {
        "both": (True, True),
        "load": (True, False),
        "save": (False, True),
        "off": (False, False),
    }


def test_token_is_read_and_never_shown(tmp_path: Path) -> None:
    """The token comes from its file without white space; no text form of the settings shows it."""
    file = tmp_path / "token"
    file.write_text("  s3cret-token\n")
    settings = parse({"token_file": str(file)})
    assert settings.read_token() == "s3cret-token"
    assert "s3cret" not in repr(settings) + str(settings)
    assert parse().read_token() is None


def test_token_files_that_cannot_be_used(tmp_path: Path) -> None:
    """A missing, an empty and a binary token file are refused by name, and none of them shows its content."""
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"s3cret\xff\xfe")
    for path, expected in ((tmp_path / "none", "cannot read"), (empty, "is empty"), (binary, "text")):
        with pytest.raises(InvalidRequest, match=expected) as refusal:
            parse({"token_file": str(path)}).read_token()
        assert "token_file" in str(refusal.value)
        assert "s3cret" not in str(refusal.value)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`XDG_CACHE_HOME` moves the folder, as it moves an embedded service's; empty or relative, it counts as not set."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/kvstore")
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == Path.home() / ".cache" / "kvstore"


@pytest.mark.parametrize(
    ("role", "mode", "loads", "saves"),
    [
        ("kv_both", "both", True, True),
        ("kv_both", "load", True, False),
        ("kv_producer", "both", False, True),
        ("kv_producer", "save", False, True),
        ("kv_consumer", "both", True, False),
        ("kv_consumer", "load", True, False),
        ("kv_producer", "off", False, False),
        ("kv_consumer", "off", False, False),
    ],
)
def test_a_role_narrows_the_mode(role: str, mode: str, loads: bool, saves: bool) -> None:
    """A producer only saves; a consumer only loads, and takes every hit: another engine computes prompts for it."""
    settings = ConnectorSettings(mode=mode).for_role(role)
    assert settings.load_always == (role == "kv_consumer" and loads)
    assert (settings.loads, settings.saves) == (loads, saves)


@pytest.mark.parametrize(("role", "mode"), [("kv_producer", "load"), ("kv_consumer", "save")])
def test_a_contradiction_is_refused_by_name(role: str, mode: str) -> None:
    """An engine that could then neither load nor save is refused, with both fields named."""
    with pytest.raises(InvalidRequest, match=f"{role} only .* field=mode seen={mode}"):
        ConnectorSettings(mode=mode).for_role(role)


def test_an_engine_with_a_contradiction_does_not_start() -> None:
    """The connector itself is where vLLM's role and the operator's mode meet."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from connector import KVStoreConnector

    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "load"}, kv_role="kv_producer")
    with pytest.raises(InvalidRequest, match="kv_role kv_producer only saves"):
        KVStoreConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.WORKER, None)
