"""The settings that a service reports: where each came from, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.service.reported_settings import reported_settings
from kvstore.settings import Settings, load_settings

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
