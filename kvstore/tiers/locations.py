"""Parses the settings `hot` and `cold`: `redis://...`, `s3://bucket/prefix`, `file:///dir`, `memory:`.

This module imports no client library, so settings can be read where none is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import InvalidRequest

RedisMode = Literal["standalone", "cluster", "sentinel"]


class HostPort(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class NoTier:
    """No slower tier in this place; written `memory:`."""

    def __str__(self) -> str:
        return "memory:"


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory, by its absolute path."""

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, and the prefix of all names in it. Credentials come from the AWS environment.

    Attributes:
        prefix: Without slashes at its ends; may be empty.
        endpoint_url: Where the service is. `None`: from the AWS environment, else Amazon's own.
        region: `None`: from the AWS environment.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A Redis or Valkey. Its text shows no password.

    Attributes:
        mode: What listens at the addresses.
        tls: Whether to use TLS, also with sentinels.
        addresses: The server; or nodes of the cluster, of which one must answer; or the sentinels.
        database: Number of the database; 0 in a cluster.
        username: For ACLs. `None`: the default user.
        password: A secret.
        service: The sentinels' name for the primary; `None` in the other modes.
        sentinel_login: Whether sentinels require the same login as the servers.
        ca_file: Certificates to trust instead of the system's.
        cert_file: Our own certificate, for servers that require one.
        key_file: Its key. `None`: it is in `cert_file`.
        url: The whole setting, secrets included.
    """

    mode: RedisMode
    tls: bool
    addresses: tuple[HostPort, ...]
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    service: str | None = None
    sentinel_login: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    url: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        scheme = urlsplit(self.url).scheme or "redis"
        service = f"/{self.service}" if self.service is not None else ""
        database = "" if self.mode == "cluster" else f"/{self.database}"
        return f"{scheme}://{','.join(map(str, self.addresses))}{service}{database}"


HotLocation = NoTier | RedisLocation
ColdLocation = NoTier | FileLocation | S3Location
TierLocation = RedisLocation | FileLocation | S3Location
Place = Literal["hot", "cold"]

_REDIS_MODES: dict[str, RedisMode] = {
    "redis": "standalone",
    "rediss": "standalone",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
}
"""Modes by scheme; `rediss` means TLS."""
_REDIS_FORMS: dict[RedisMode, str] = {
    "standalone": "[user:password@]host[:port][/database]",
    "cluster": "[user:password@]host[:port][,host[:port]...]",
    "sentinel": "[user:password@]sentinel[:port][,sentinel[:port]...]/service[/database]",
}
_REDIS_PORT = 6379
_SENTINEL_PORT = 26379
_TLS_OPTIONS = ("ca_file", "cert_file", "key_file")


def parse_hot(text: str) -> HotLocation:
    """Parse the setting `hot`.

    Raises:
        InvalidRequest: Not a location for a hot tier. The message never contains a password.
    """
    location = NoTier() if text == "memory:" else _parsed("hot", text, ("hot",), f"{_FORMS['hot']} or memory:")
    assert isinstance(location, HotLocation)
    return location


def parse_cold(text: str) -> ColdLocation:
    """Parse the setting `cold`.

    Raises:
        InvalidRequest: Not a location for a cold tier. The message never contains a password.
    """
    location = NoTier() if text == "memory:" else _parsed("cold", text, ("cold",), f"{_FORMS['cold']} or memory:")
    assert isinstance(location, ColdLocation)
    return location


def parse_tier(text: str, *, field: str) -> TierLocation:
    """Parse the location of a tier of either place.

    Args:
        field: What was given, for errors.

    Raises:
        InvalidRequest: Not the location of a tier; `memory:` is none. The message never contains a password.
    """
    return _parsed(field, text, ("cold", "hot"), f"{_FORMS['cold']}, {_FORMS['hot']}")


def _parsed(field: str, text: str, places: tuple[Place, ...], expected: str) -> TierLocation:
    scheme, slashes, _ = text.partition("://")
    kind = SCHEMES.get(scheme) if slashes else None
    if kind is None or kind.place not in places:
        raise InvalidRequest(f"{field} must be {expected}{_likely(text, places)}", seen=repr(without_secrets(text)))
    try:
        return kind.parse(text)
    except InvalidRequest as error:
        # without the cause, whose text may contain the password
        raise InvalidRequest(f"{field} {error.message}", **error.details) from None


def _likely(text: str, places: tuple[Place, ...]) -> str:
    """What was meant with a path or with a host and its port, as the end of an error; empty: not known."""
    if text.startswith("/") and "cold" in places:
        return f", like file://{text}"
    return f", like redis://{text}" if "hot" in places and re.fullmatch(r"[A-Za-z0-9.-]+:\d+(/\d+)?", text) else ""


def parse_redis(text: str) -> RedisLocation:
    """Parse the url of a Redis.

    Raises:
        InvalidRequest: Not of its scheme's form. The message never contains a password.
    """
    scheme = text.partition("://")[0]
    if scheme not in _REDIS_MODES:
        raise InvalidRequest(f"expected one of {', '.join(_REDIS_MODES)}", seen=repr(without_secrets(text)))
    mode, tls = _REDIS_MODES[scheme], scheme.startswith("rediss")
    try:
        parts = urlsplit(text)
        login, _, hosts = parts.netloc.rpartition("@")
        port = _SENTINEL_PORT if mode == "sentinel" else _REDIS_PORT
        addresses = tuple(_address(host, port) for host in hosts.split(","))
        if parts.fragment or (mode == "standalone" and len(addresses) > 1):
            raise ValueError
        service, database = _service_and_database(mode, parts.path)
        username, _, password = login.partition(":")
        return RedisLocation(
            mode=mode,
            tls=tls,
            addresses=addresses,
            database=database,
            username=unquote(username) or None,
            password=unquote(password) or None,
            service=service,
            **_redis_options(mode, tls, parts.query),  # type: ignore[arg-type]
            url=text,
        )
    except ValueError:
        form = f"{scheme}://{_REDIS_FORMS[mode]}" + ("[?ca_file=/path]" if tls else "")
        # without the cause, whose text may contain the password
        raise InvalidRequest(f"must look like {form}", seen=repr(without_secrets(text))) from None


def _address(text: str, default_port: int) -> HostPort:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise ValueError
    return HostPort(parts.hostname, default_port if parts.port is None else parts.port)


def _service_and_database(mode: RedisMode, path: str) -> tuple[str | None, int]:
    steps = [step for step in path.split("/") if step]
    service = unquote(steps.pop(0)) if mode == "sentinel" and steps else None
    database = steps.pop(0) if steps else "0"
    if steps or not database.isdecimal() or (mode == "sentinel") != (service is not None):
        raise ValueError
    if mode == "cluster" and int(database) != 0:
        raise ValueError
    return service, int(database)


def _redis_options(mode: RedisMode, tls: bool, query: str) -> dict[str, Path | bool]:
    options: dict[str, Path | bool] = {}
    for name, values in parse_qs(query, keep_blank_values=True, strict_parsing=bool(query)).items():
        if name == "sentinel_login" and mode == "sentinel" and values == ["same"]:
            options[name] = True
        elif name in _TLS_OPTIONS and tls and len(values) == 1 and values[0].startswith("/"):
            options[name] = Path(values[0])
        else:
            raise ValueError
    if "key_file" in options and "cert_file" not in options:
        raise ValueError
    return options


def _parse_file(text: str) -> FileLocation:
    path = unquote(text.removeprefix("file://"))
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest("must name an absolute directory, like file:///var/lib/kvstore", seen=repr(text))
    return FileLocation(Path(path))


def _parse_s3(text: str) -> S3Location:
    parts = urlsplit(text)
    options = parse_qs(parts.query, keep_blank_values=True)
    given = {name: values[0] for name, values in options.items() if len(values) == 1 and values[0]}
    known = len(given) == len(options) and given.keys() <= {"endpoint_url", "region"}
    if not parts.netloc or "@" in parts.netloc or parts.fragment or not known:
        raise InvalidRequest(
            "must look like s3://bucket/prefix?endpoint_url=http://host:port&region=name, both options optional; "
            "credentials come from the AWS environment",
            seen=repr(without_secrets(text)),
        )
    return S3Location(parts.netloc, unquote(parts.path).strip("/"), **given)


def without_secrets(text: str) -> str:
    """The text with `***` in place of everything between its scheme and its last `@`."""
    before, at, rest = text.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme if slashes else ''}{slashes}***@{rest}" if at else text


class Scheme(NamedTuple):
    """A kind of location.

    Attributes:
        place: The setting that names it.
        parse: Reads its text; raises `InvalidRequest`, whose message continues the name of what was given.
    """

    place: Place
    parse: Callable[[str], TierLocation]


SCHEMES: Mapping[str, Scheme] = {
    **dict.fromkeys(_REDIS_MODES, Scheme("hot", parse_redis)),
    "file": Scheme("cold", _parse_file),
    "s3": Scheme("cold", _parse_s3),
}
"""What the location of a tier may begin with."""
_FORMS: Mapping[Place, str] = {
    "hot": "redis://host:port/database, rediss://, redis+cluster://, redis+sentinel://",
    "cold": "s3://bucket/prefix, file:///dir",
}
