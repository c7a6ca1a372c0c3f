"""Malformed urls of tiers are refused, and their passwords are not repeated. (Well-formed ones: test_settings.py.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.media import MEDIA, medium_of
from kvstore.tiers.locations import (
    FileLocation,
    RedisLocation,
    S3Location,
    TierLocation,
    parse_cold,
    parse_redis,
    parse_tier,
)

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("rediss+cluster://host", RedisLocation),
        ("file:///var/lib/kv", FileLocation),
        ("s3://bucket/a", S3Location),
    ],
)
def test_a_tier_of_either_place(text: str, location: type[TierLocation]) -> None:
    """The scheme says which it is."""
    assert isinstance(parse_tier(text, field="TIER"), location)


@pytest.mark.parametrize("text", ["tape://drive", "memory:", "redis", "redisx://user:secret@host", "file://relative"])
def test_what_is_no_tier(text: str) -> None:
    """The error names what was given, and shows no password."""
    with pytest.raises(InvalidRequest, match=r"^TIER must ") as caught:
        parse_tier(text, field="TIER")
    assert "secret" not in str(caught.value)


def test_each_tier_has_a_medium() -> None:
    """Of a tier without one no page could be published: that is an error, and no silence."""
    files = (ROOT / "kvstore/tiers").glob("*/*.py")
    found = {name for file in files for name in re.findall(r'^    name = "(\w+)"$', file.read_text(), re.MULTILINE)}
    assert found == {"filesystem", "redis", "s3"}
    assert [medium_of(name) for name in sorted(found)] == [MEDIA[name] for name in sorted(found)]
    with pytest.raises(InvalidRequest, match="MEDIA"):
        medium_of("tape")
