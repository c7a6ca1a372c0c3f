"""The store that a tool finds by the settings that a service reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.doctor.store_in_use import named_credentials, settings_of
from kvstore.service.reported_settings import reported_settings
from kvstore.settings import Settings, load_settings, settings_from


def told_text(settings: Settings) -> str:
    return json.dumps(reported_settings(settings))


_PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "listen": st.sampled_from(["unix:/a/b", "tcp://127.0.0.1:7", "tls://[::1]:8"]),
        "admin_listen": st.sampled_from(["off", "tls://host:1", "127.0.0.1:2"]),
        "hot": st.sampled_from(["memory:", "redis://host", "redis+cluster://a:1,b:2", "rediss://h:1/4?ca_file=/x"]),
        "cold": st.sampled_from(["memory:", "file:///a dir", "s3://b", "s3://b/p q?endpoint_url=http://h:1&region=r"]),
        "cold_bytes": st.sampled_from(["1", "8GiB"]),
        "quotas": st.sampled_from(["a=1GiB:2GiB,b=:3GiB", "c=5:"]),
        "memory_bytes": st.just("1GiB"),
        "lease_s": st.floats(0.1, 100),
        "log_format": st.just("json"),
        "encryption_keys": st.just("/a/file"),
        "credentials_file": st.just("/another/file"),
        "traces_share": st.floats(0, 1),
    },
)


@given(flags=_PLAIN)
def test_a_tool_that_was_told_has_the_same_settings(flags: dict[str, object]) -> None:
    """A tool in another environment gets each value that the service was given, and lacks none."""
    serving = load_settings({"memory_bytes": "2GiB", **flags})
    settings, lacking = settings_of(json.loads(told_text(serving)), load_settings({}))
    assert lacking == []
    for name in Settings.model_fields:
        mine, theirs = getattr(settings, name), getattr(serving, name)
        assert mine == theirs or str(mine) == str(theirs), name


def test_a_secret_of_the_same_place_is_taken_from_here() -> None:
    """A tool with the password of the very server uses it; with that of another one, or none, it says what it lacks."""
    serving = load_settings({"hot": "redis://kv:secret@redis.internal:6379/0", "memory_bytes": "1GiB"})
    told = json.loads(told_text(serving))
    for login in ("kv:secret", "ops:another"):
        own = load_settings({"hot": f"redis://{login}@redis.internal:6379/0"})
        settings, lacking = settings_of(told, own)
        assert (settings.hot, lacking) == (own.hot, [])
    for other in ("redis://kv:secret@redis.internal:6380/0", "redis://kv:secret@redis.internal:6379/1", "memory:"):
        assert settings_of(told, load_settings({"hot": other}))[1] == ["hot"]


def test_settings_of_a_tool_do_not_mix_with_those_that_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the tool says nothing of what the service left out."""
    monkeypatch.setenv("KVSTORE_COLD_BYTES", "5GiB")
    assert settings_from({"memory_bytes": "1GiB"}).cold_bytes is None
    assert settings_of({"settings": {"memory_bytes": {"value": "1GiB"}}}, load_settings({}))[0].cold_bytes is None


def test_logins_of_s3_are_named_where_they_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and only where the tool has no login of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    told = reported_settings(load_settings({"cold": "s3://bucket/p", "memory_bytes": "1GiB"}))
    assert named_credentials(told) == []
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert named_credentials(told) == ["AWS_ACCESS_KEY_ID"]
    monkeypatch.setenv("AWS_PROFILE", "ops")
    assert named_credentials(told) == []
