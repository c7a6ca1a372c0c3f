"""Urls of tiers: what is understood, what is refused, and that no secret is repeated."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.tiers.redis.url import RedisUrl
from kvstore.tiers.s3.url import S3Url


def test_redis_url() -> None:
    """All parts, their defaults, and characters that had to be escaped."""
    assert RedisUrl.parse("redis://cache") == RedisUrl("cache", 6379, None, None, 0)
    assert RedisUrl.parse("redis://me:s%40cret@10.0.0.1:7000/5") == RedisUrl("10.0.0.1", 7000, "me", "s@cret", 5)
    assert RedisUrl.parse("redis://:secret@[::1]:7000/") == RedisUrl("::1", 7000, None, "secret", 0)


@pytest.mark.parametrize(
    "url",
    [
        "http://:hunter2@host", "redis://:hunter2@", "redis://:hunter2@host:port/0", "redis://:hunter2@host/name",
        "redis://:hunter2@host/0?timeout=1", "rediss://:hunter2@host", "redis:hunter2",
    ],
)  # fmt: skip
def test_bad_redis_url(url: str) -> None:
    """A malformed url is refused, and its password is in neither the message nor a repr."""
    with pytest.raises(InvalidRequest) as caught:
        RedisUrl.parse(url)
    assert "hunter2" not in str(caught.value)


def test_redis_password_is_not_shown() -> None:
    """A url in a log or a traceback shows no password."""
    assert "hunter2" not in repr(RedisUrl.parse("redis://me:hunter2@host"))


def test_s3_url() -> None:
    """Bucket, prefix and options."""
    assert S3Url.parse("s3://pages") == S3Url("pages")
    url = "s3://pages/a/b/?endpoint_url=http://127.0.0.1:7480&region=eu-west-1"
    assert S3Url.parse(url) == S3Url("pages", "a/b", "http://127.0.0.1:7480", "eu-west-1")


@pytest.mark.parametrize(
    "url",
    ["http://pages", "s3:///a", "s3://key:hunter2@pages/a", "s3://pages?endpoint=x", "s3://pages?region=", "s3://p#x"],
)
def test_bad_s3_url(url: str) -> None:
    """A malformed url, an unknown option, or credentials in it are refused and not repeated."""
    with pytest.raises(InvalidRequest) as caught:
        S3Url.parse(url)
    assert "hunter2" not in str(caught.value)
