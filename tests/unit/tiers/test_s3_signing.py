"""Our signatures against botocore's, which signs the same requests."""

from __future__ import annotations

from datetime import UTC, datetime
from unittest.mock import patch

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from botocore.utils import percent_encode

from kvstore.tiers.s3.objects import Signer

HOST = "store.example:9000"
NOON = datetime(2026, 3, 1, 12, 30, 59, tzinfo=UTC)
ALICE = ReadOnlyCredentials("ALICE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", None)
BOB = ReadOnlyCredentials("BOB", "another/secret", "FwoGZXIvYXdzE//token==")


def botocores(
    verb: str, path: str, fields: dict[str, str], credentials: ReadOnlyCredentials, now: datetime, region: str
) -> dict[str, str]:
    """The fields that botocore sends."""
    request = AWSRequest(method=verb, url=f"http://{HOST}{path}", headers={"Host": HOST, **fields})
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    with patch("botocore.auth.get_current_datetime", lambda: now):
        S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


@pytest.mark.parametrize("credentials", [ALICE, BOB], ids=["a key", "a session"])
@pytest.mark.parametrize(
    ("verb", "name", "fields"),
    [
        ("GET", "kv/1/abc/def/0-0", {}),
        ("PUT", "kv/1/abc/def/0-0", {"Content-Type": "application/octet-stream", "If-None-Match": "*"}),
        ("GET", "a b+c/~d%e/ü/..//f", {}),
        ("GET", "x", {"Range": "  bytes=0-9  "}),
    ],
)
def test_signatures_are_botocores(
    verb: str, name: str, fields: dict[str, str], credentials: ReadOnlyCredentials
) -> None:
    """Every field that is sent is the same, so an endpoint that accepts theirs accepts ours."""
    path = "/bucket/" + percent_encode(name, safe="/~")
    ours = Signer(HOST, "eu-central-2").sign(verb, path, fields, credentials, NOON)
    assert ours == botocores(verb, path, fields, credentials, NOON, "eu-central-2")


def test_a_key_is_derived_again_when_it_must_be() -> None:
    """One signer follows a new day, and credentials that were renewed, and goes back to earlier ones."""
    signer = Signer(HOST, "us-east-1")
    for now, credentials in [
        (NOON, ALICE),
        (NOON.replace(day=2), ALICE),
        (NOON.replace(day=2), BOB),
        (NOON, ALICE),
    ]:
        expected = botocores("GET", "/bucket/x", {}, credentials, now, "us-east-1")
        assert signer.sign("GET", "/bucket/x", {}, credentials, now) == expected
