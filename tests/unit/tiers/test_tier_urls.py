"""Urls of tiers: what is understood, what is refused, and that no secret is repeated."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.tiers.locations import S3Location, parse_cold


def test_s3_url() -> None:
    """Bucket, prefix and options."""
    assert parse_cold("s3://pages") == S3Location("pages")
    url = "s3://pages/a/b/?endpoint_url=http://127.0.0.1:7480&region=eu-west-1"
    assert parse_cold(url) == S3Location("pages", "a/b", "http://127.0.0.1:7480", "eu-west-1")


@pytest.mark.parametrize(
    "url",
    ["http://pages", "s3:///a", "s3://key:hunter2@pages/a", "s3://pages?endpoint=x", "s3://pages?region=", "s3://p#x"],
)
def test_bad_s3_url(url: str) -> None:
    """A malformed url, an unknown option, or credentials in it are refused and not repeated."""
    with pytest.raises(InvalidRequest) as caught:
        parse_cold(url)
    assert "hunter2" not in str(caught.value)
