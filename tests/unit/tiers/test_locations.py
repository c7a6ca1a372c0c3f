"""Malformed urls of tiers are refused, and their passwords are not repeated. (Well-formed ones: test_settings.py.)"""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.tiers.locations import parse_cold, parse_redis


@pytest.mark.parametrize(
    "url",
    [
        "http://:hunter2@h", "redis://:hunter2@", "redis://:hunter2@h:port", "redis://:hunter2@h:1,i:2",
        "redis://:hunter2@h/x", "redis+cluster://:hunter2@h/1", "redis+sentinel://:hunter2@h",
        "redis+sentinel://:hunter2@h/main/x", "redis://:hunter2@h?ca_file=/a", "rediss://:hunter2@h?ca_file=a",
        "rediss://:hunter2@h?key_file=/a", "rediss://:hunter2@h?colour=red", "redis://:hunter2@h#x",
        "redis+cluster://:hunter2@h,,i", "redis+sentinel://:hunter2@h/main?sentinel_login=maybe",
    ],
)  # fmt: skip
def test_malformed_urls(url: str) -> None:
    """A url that is not of its scheme's form is refused with the form, and its password is not repeated."""
    with pytest.raises(InvalidRequest) as caught:
        parse_redis(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.__cause__)


@pytest.mark.parametrize(
    "url",
    ["http://pages", "s3:///a", "s3://key:hunter2@pages/a", "s3://pages?endpoint=x", "s3://pages?region=", "s3://p#x"],
)
def test_bad_s3_url(url: str) -> None:
    """A malformed url, an unknown option, or credentials in it are refused and not repeated."""
    with pytest.raises(InvalidRequest) as caught:
        parse_cold(url)
    assert "hunter2" not in str(caught.value)
