"""No secret in anything that is said: one planted in every setting that has one, then logs, errors, REST and verbs."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from kvstore.cli.main import main
from kvstore.settings import Settings
from kvstore.testing.servers import RedisServer, redis_server
from kvstore.testing.servers.ports import free_ports
from tests.unit.admin.service_harness import write_credentials

pytestmark = pytest.mark.servers

COMMAND = [sys.executable, "-m", "kvstore.cli"]
SECRETS = {
    "hot": "R3dis/p@ss\"word'",
    "cold": "endp0int-password",
    "AWS_SECRET_ACCESS_KEY": "s3cret/access+key",
    "AWS_SESSION_TOKEN": "s3ssion-token",
    "token_file": "t0ken of the data port",
    "guessed": "gu3ssed token",
    "credentials_file": "operator token",
    "encryption_keys": base64.b64encode(b"a key of thirty-two bytes, no more"[:32]).decode(),
}
HOLD_SECRETS = {"hot", "cold", "token_file", "credentials_file", "encryption_keys"}
"""Settings that are, or name a file of, something that nobody else may know."""
HARMLESS_FILES = {"tls_certificate_file", "tls_key_file", "tls_client_ca_file", "tls_ca_file"}
"""Read by the TLS library alone; messages hold their paths."""


def spellings(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), quote(secret), repr(secret)[1:-1], json.dumps(secret)[1:-1]}


def test_every_setting_that_holds_a_secret_is_planted() -> None:
    """A new setting that names a file or a place is looked at here: it either holds a secret, or is known not to."""
    named = {name for name in Settings.model_fields if name.endswith(("_file", "_keys")) or name in ("hot", "cold")}
    assert named - HARMLESS_FILES == HOLD_SECRETS


def planted(folder: Path, redis: RedisServer, admin: int, s3: int) -> dict[str, str]:
    """Settings of a service by environment, with a secret wherever there can be one."""
    token, keys = folder / "token", folder / "keys.toml"
    token.write_text(SECRETS["token_file"])
    keys.write_text(f'[[key]]\ntenant = "*"\nid = 1\nsecret = "{SECRETS["encryption_keys"]}"\n')
    for path in (token, keys):
        path.chmod(0o600)
    return {
        "KVSTORE_LISTEN": f"unix:{folder / 's'}",
        "KVSTORE_ADMIN_LISTEN": f"127.0.0.1:{admin}",
        "KVSTORE_TOKEN_FILE": str(token),
        "KVSTORE_CREDENTIALS_FILE": str(write_credentials(folder / "credentials.toml")),
        "KVSTORE_ENCRYPTION_KEYS": str(keys),
        "KVSTORE_MEMORY_BYTES": "8MiB",
        "KVSTORE_LOG_FORMAT": "json",
        "KVSTORE_HOT": f"redis://:{quote(SECRETS['hot'], safe='')}@{redis.host}:{redis.port}/0",
        "KVSTORE_COLD": f"s3://bucket/p?region=x&endpoint_url=http://user:{SECRETS['cold']}@127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": SECRETS["AWS_SECRET_ACCESS_KEY"],
        "AWS_SESSION_TOKEN": SECRETS["AWS_SESSION_TOKEN"],
    }


def answers_of(port: int) -> Iterator[str]:
    """What the administration says to an operator, and to somebody who guesses."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        for who in (SECRETS["credentials_file"], SECRETS["guessed"]):
            headers = {"Authorization": f"Bearer {who}"}
            for path in ("readyz", "metrics", "v1/tiers", "v1/namespaces", "v1/requests"):
                answer = client.get(f"/{path}", headers=headers)
                yield answer.text + str(answer.headers)
            pin = {"namespace": "0" * 32, "prefix": "0" * 64, "expires_in_s": 60}
            yield client.post("/v1/pins", headers=headers, json=pin).text


def test_nothing_that_is_said_shows_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real service whose Redis refuses its password and whose S3 is not there, asked by verbs and routes."""
    (admin, s3) = free_ports(2)
    said: list[str] = []
    with redis_server(password="another one") as redis:
        environment = planted(tmp_path, redis, admin, s3)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def verb(*arguments: str, **more: str) -> int:
            with monkeypatch.context() as patch:
                for name, value in more.items():
                    patch.setenv(name, value)
                status = main(list(arguments))
            said.extend(capsys.readouterr())
            return status

        service = subprocess.Popen([*COMMAND, "serve"], stderr=subprocess.PIPE, text=True)
        try:
            assert service.stderr is not None
            for line in service.stderr:
                said.append(line)
                if "ready:" in line:
                    break
            else:
                raise AssertionError(f"it did not start: {said}")
            said.extend(answers_of(admin))
            assert verb("status") == 0
            assert verb("status", "--json") == 0
            assert verb("explain", "--json") == 0
            for token_shown in (SECRETS["credentials_file"], SECRETS["guessed"]):
                for asking in (("ls",), ("ls", "--json"), ("quota", "--json")):
                    assert verb(*asking, KVSTORE_TOKEN=token_shown) in (0, 1, 2)
            assert verb("doctor", "--json", "--timeout", "0.5") == 1
            # what is wrong about a setting is shown without what is secret about it
            assert verb("serve", KVSTORE_HOT=environment["KVSTORE_HOT"] + "/x/y?z=1") == 2
            assert verb("serve", KVSTORE_COLD=environment["KVSTORE_COLD"] + "&z=1") == 2
            with (tmp_path / "keys.toml").open("a") as file:
                file.write("[[key]]\n")
            assert verb("serve") == 2
            (tmp_path / "token").chmod(0o644)
            assert verb("status") == 2
        finally:
            service.terminate()
            _, rest = service.communicate(timeout=60)
            said.append(rest)
    text = "\n".join(said)
    assert "kvstore.audit" in text and "127.0.0.1" in text
    hashes = {hashlib.sha256(value.encode()).hexdigest() for value in SECRETS.values()}
    shown = {name: one for name, secret in SECRETS.items() for one in spellings(secret) if one in text} | {
        one: "digest" for one in hashes if one in text
    }
    assert not shown, shown
