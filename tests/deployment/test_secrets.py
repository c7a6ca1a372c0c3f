"""What `deploy/make-secrets.sh` makes."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import stat
from pathlib import Path

from kvstore.service.authentication import Scope, read_credentials
from kvstore.settings import load_settings
from kvstore.tiers.locations import RedisLocation
from tests.deployment.files import ROOT, compose, make_secrets, manifests


def test_it_makes_what_the_compose_file_and_the_manifests_name(tmp_path: Path) -> None:
    """Every file, in a folder for its owner alone; a second run changes nothing."""
    folder = make_secrets(tmp_path / "secrets")
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    in_containers = {Path(secret["file"]).name for secret in compose()["secrets"].values()}
    assert set(made) == in_containers | {"operator-token"}
    assert stat.S_IMODE((folder / "operator-token").stat().st_mode) == 0o600
    assert set(manifests()["Secret", "kvstore-secrets"]["stringData"]) <= set(made)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(made.values())
    make_secrets(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made


def test_secrets_are_random(tmp_path: Path) -> None:
    """Two runs share nothing but what is not secret."""
    first, second = (make_secrets(tmp_path / name) for name in "ab")
    assert [path.name for path in first.iterdir() if path.read_bytes() == (second / path.name).read_bytes()] == []


def test_redis_and_the_services_agree(tmp_path: Path) -> None:
    """The services' password is the one whose digest Redis has, with the rights that docs/redis.md gives."""
    folder = make_secrets(tmp_path)
    hot = load_settings({}, config=folder / "kvstore.toml").hot
    assert isinstance(hot, RedisLocation) and hot.password is not None and len(hot.password) == 64
    default, ours = (folder / "valkey.acl").read_text().splitlines()
    assert default == "user default on nopass resetkeys resetchannels -@all +ping"
    command = re.search(r"redis-cli ACL SETUSER kvstore .*?\n(?=```)", (ROOT / "docs/redis.md").read_text(), re.DOTALL)
    assert command is not None
    _, _, _, *documented = shlex.split(command[0].replace("\\\n", ""))  # as a shell reads it
    digest = hashlib.sha256(hot.password.encode()).hexdigest()
    assert ours == " ".join(["user", *documented]).replace(">PASSWORD", f"#{digest}")


def test_s3_and_the_services_agree(tmp_path: Path) -> None:
    """The services' key is the one that S3 knows, for one bucket."""
    folder = make_secrets(tmp_path)
    (identity,) = json.loads((folder / "s3-identities.json").read_text())["identities"]
    (key,) = identity["credentials"]
    lines = dict(line.split(" = ") for line in (folder / "s3-credentials").read_text().splitlines()[1:])
    assert lines == {"aws_access_key_id": key["accessKey"], "aws_secret_access_key": key["secretKey"]}
    assert {action.partition(":")[2] for action in identity["actions"]} == {"kvstore"}


def test_prometheus_shows_a_token_that_the_services_know(tmp_path: Path) -> None:
    """The token is an operator's that may look and nothing else."""
    folder = make_secrets(tmp_path)
    grant = read_credentials(folder / "credentials.toml").grant_of((folder / "metrics-token").read_text())
    assert grant is not None and grant.tenant is None and grant.scopes == {Scope.READ}


def test_the_operator_has_a_token_of_its_own(tmp_path: Path) -> None:
    """It may do everything; secrets that were made before there was one get it, and keep all others."""
    folder = make_secrets(tmp_path)
    token, before = folder / "operator-token", (folder / "credentials.toml").read_text()
    grant = read_credentials(folder / "credentials.toml").grant_of(token.read_text())
    assert grant is not None and grant.tenant is None and Scope.ADMIN in grant.scopes
    token.unlink()
    (folder / "credentials.toml").write_text(before.partition("\n[[")[0] + "\n")
    make_secrets(folder)
    credentials = read_credentials(folder / "credentials.toml")
    assert credentials.num_tokens == 2 and credentials.grant_of((folder / "metrics-token").read_text()) is not None
    assert credentials.grant_of(token.read_text()) is not None
