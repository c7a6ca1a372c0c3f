"""The settings that a service reports: enough to work on the same store, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.service.reported_settings import named_credentials, reported_settings, settings_of
from kvstore.settings import Settings, load_settings, settings_from

PASSWORD, TOKEN, KEY, QUERY = "p@ss:w/örd", "a-token-of-tcp-peers", "vault-token-1234", "api-key-5678"
SECRETS = {
    "hot": "rediss+sentinel://kv:p%40ss%3Aw%2F%C3%B6rd@one:1,two:2/main/3?sentinel_login=same&ca_file=/ca.pem",
    "cold": "s3://bucket/some/prefix?endpoint_url=https://user:p%2540ss%253Aw%252F%25C3%25B6rd@s3.internal:9000",
    "encryption_keys": f"command:vault read -token={KEY} kv",
    "otlp_traces_endpoint": f"https://collector.internal/v1/traces?key={QUERY}",
}


def told_text(settings: Settings) -> str:
    return json.dumps(reported_settings(settings))


def test_no_secret_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no source: neither passwords in urls, however they are spelled, nor commands, tokens, keys of S3."""
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-key-of-s3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-id-of-s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://u:{KEY}@elsewhere")
    flags = {**SECRETS, "token_file": str(tmp_path / "token")}
    said = told_text(load_settings(flags)) + told_text(load_settings({**flags, "cold": "s3://bucket/p"}))
    for secret in (PASSWORD, "p%40ss", "p%2540ss", "w/\\u00f6rd", KEY, QUERY, TOKEN, "the-key-of-s3", "the-id-of-s3"):
        assert secret not in said
    assert "kv:***@one:1" in said and "s3.internal:9000" in said and "AWS_SECRET_ACCESS_KEY" in said


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


def test_each_value_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strongest source of each; also where a weaker one has it too."""
    (tmp_path / "a.toml").write_text('lease_s = 7\nmemory_bytes = "1GiB"\ndrain_timeout_s = 1\n')
    monkeypatch.setenv("KVSTORE_MEMORY_BYTES", "2GiB")
    monkeypatch.setenv("KVSTORE_DRAIN_TIMEOUT_S", "2")
    settings = load_settings({"drain_timeout_s": "3"}, config=tmp_path / "a.toml")
    sources = {name: settings.source(name) for name in ("lease_s", "memory_bytes", "drain_timeout_s", "fsync")}
    assert sources == {
        "lease_s": "file",
        "memory_bytes": "environment",
        "drain_timeout_s": "flag",
        "fsync": "default",
    }
    assert (settings.memory_bytes, settings.drain_timeout_s) == (2 << 30, 3.0)


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
