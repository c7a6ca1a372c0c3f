"""Where a slower tier is, read from the text of a setting: `redis://...`, `s3://bucket/prefix`, `file:///dir`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import InvalidRequest
from kvstore.tiers.locations_redis import REDIS_SCHEMES, RedisLocation, parse_redis, without_secrets

__all__ = [
    "ColdLocation",
    "FileLocation",
    "HotLocation",
    "NoTier",
    "RedisLocation",
    "S3Location",
    "parse_cold",
    "parse_hot",
    "without_secrets",
]


@dataclass(frozen=True, slots=True)
class NoTier:
    """No slower tier in this place; spelled `memory:`."""

    def __str__(self) -> str:
        return "memory:"


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory.

    Attributes:
        path: Absolute.
    """

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, and the prefix of all names in it. Credentials come from the AWS environment.

    Attributes:
        bucket: Its name.
        prefix: Without slashes at its ends; may be empty.
        endpoint_url: Where the service is; `None`: from the AWS environment, else Amazon's own.
        region: `None`: from the AWS environment.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


HotLocation = NoTier | RedisLocation
ColdLocation = NoTier | FileLocation | S3Location


def parse_hot(text: str) -> HotLocation:
    """Read the setting `hot`.

    Raises:
        InvalidRequest: Not a location for a hot tier. The message never repeats a password.
    """
    if text == "memory:":
        return NoTier()
    if text.partition("://")[0] not in REDIS_SCHEMES:
        raise InvalidRequest(
            "hot must be redis://host:port/database, rediss://, redis+cluster://, redis+sentinel:// or memory:",
            seen=repr(without_secrets(text)),
        )
    try:
        return parse_redis(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"hot {error.message}", **error.details) from None


def parse_cold(text: str) -> ColdLocation:
    """Read the setting `cold`.

    Raises:
        InvalidRequest: Not a location for a cold tier.
    """
    if text == "memory:":
        return NoTier()
    if text.startswith("file://"):
        path = unquote(text.removeprefix("file://"))
        if not path.startswith("/") or "\0" in path:
            raise InvalidRequest("cold must name an absolute directory, like file:///var/lib/kvstore", seen=repr(text))
        return FileLocation(Path(path))
    if text.startswith("s3://"):
        return _parse_s3(text)
    raise InvalidRequest("cold must be s3://bucket/prefix, file:///dir or memory:", seen=repr(without_secrets(text)))


def _parse_s3(text: str) -> S3Location:
    parts = urlsplit(text)
    options = parse_qs(parts.query, keep_blank_values=True)
    given = {name: values[0] for name, values in options.items() if len(values) == 1 and values[0]}
    known = len(given) == len(options) and given.keys() <= {"endpoint_url", "region"}
    if not parts.netloc or "@" in parts.netloc or parts.fragment or not known:
        raise InvalidRequest(
            "cold must look like s3://bucket/prefix?endpoint_url=http://host:port&region=name, both options optional; "
            "credentials come from the AWS environment",
            seen=repr(without_secrets(text)),
        )
    return S3Location(parts.netloc, unquote(parts.path).strip("/"), **given)
