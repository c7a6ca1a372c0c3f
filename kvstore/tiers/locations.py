"""Where a slower tier is, read from the text of a setting: `redis://...`, `s3://bucket/prefix`, `file:///dir`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from kvstore.errors import InvalidRequest

__all__ = [
    "ColdLocation",
    "FileLocation",
    "HotLocation",
    "NoTier",
    "RedisLocation",
    "S3Location",
    "parse_cold",
    "parse_hot",
]

RedisMode = Literal["standalone", "cluster", "sentinel"]

_MODES: dict[str, RedisMode] = {
    "redis": "standalone",
    "rediss": "standalone",
    "redis+cluster": "cluster",
    "redis+sentinel": "sentinel",
}
_REDIS_PORT = 6379


@dataclass(frozen=True, slots=True)
class NoTier:
    """Nothing slower than memory at this place; spelled `memory:`."""

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
    """A bucket, and what all names in it start with. Credentials and endpoint come from the AWS environment.

    Attributes:
        bucket: Its name.
        prefix: Without slashes at its ends; may be empty.
    """

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A Redis or Valkey. Its text shows no password.

    Attributes:
        mode: What answers at the address.
        tls: Whether to speak TLS.
        host: A name or a literal address.
        port: Its port.
        database: Number of the database.
        username: For ACLs; `None` for the default user.
        password: A secret.
        url: The whole setting, secrets included.
    """

    mode: RedisMode
    tls: bool
    host: str
    port: int
    database: int
    username: str | None
    password: str | None = field(repr=False)
    url: str = field(repr=False, compare=False)

    def __str__(self) -> str:
        scheme = urlsplit(self.url).scheme
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.database}"


HotLocation = NoTier | RedisLocation
ColdLocation = NoTier | FileLocation | S3Location


def parse_hot(text: str) -> HotLocation:
    """Read the setting `hot`.

    Raises:
        InvalidRequest: Not a location for a hot tier. The message never repeats a password.
    """
    if text == "memory:":
        return NoTier()
    scheme = text.partition("://")[0]
    if scheme not in _MODES:
        raise InvalidRequest(
            "hot must be redis://host:port/database, rediss://, redis+cluster://, redis+sentinel:// or memory:",
            seen=repr(_without_secrets(text)),
        )
    expected = f"hot must look like {scheme}://user:password@host:port/database"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidRequest(expected, seen=repr(_without_secrets(text))) from None  # the cause may show the password
    database = parts.path.strip("/")
    if not host or (database and not database.isdecimal()) or parts.query or parts.fragment:
        raise InvalidRequest(expected, seen=repr(_without_secrets(text)))
    return RedisLocation(
        mode=_MODES[scheme],
        tls=scheme == "rediss",
        host=host,
        port=_REDIS_PORT if port is None else port,
        database=int(database or 0),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        url=text,
    )


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
        bucket, _, prefix = text.removeprefix("s3://").partition("/")
        if not bucket or "@" in bucket or set("?#") & set(text):
            raise InvalidRequest(
                "cold must look like s3://bucket/prefix; credentials come from the AWS environment",
                seen=repr(_without_secrets(text)),
            )
        return S3Location(bucket, prefix.strip("/"))
    raise InvalidRequest("cold must be s3://bucket/prefix, file:///dir or memory:", seen=repr(_without_secrets(text)))


def _without_secrets(text: str) -> str:
    """The text without anything between `//` and the last `@`."""
    scheme, slashes, rest = text.partition("//")
    return f"{scheme}{slashes}***@{rest.rpartition('@')[2]}" if "@" in rest else text
