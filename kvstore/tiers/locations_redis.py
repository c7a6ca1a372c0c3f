"""Where a Redis is, read from the text of a setting. Imports no client: settings are read where none is installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import InvalidRequest

__all__ = ["REDIS_SCHEMES", "HostPort", "RedisLocation", "parse_redis", "without_secrets"]

RedisMode = Literal["standalone", "cluster", "sentinel"]


class HostPort(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Scheme:
    mode: RedisMode
    tls: bool
    form: str


_LOGIN = "[user:password@]"
_SCHEMES = {
    "redis": _Scheme("standalone", False, f"redis://{_LOGIN}host[:port][/database]"),
    "rediss": _Scheme("standalone", True, f"rediss://{_LOGIN}host[:port][/database][?ca_file=/path]"),
    "redis+cluster": _Scheme("cluster", False, f"redis+cluster://{_LOGIN}host[:port][,host[:port]...]"),
    "rediss+cluster": _Scheme("cluster", True, f"rediss+cluster://{_LOGIN}host[:port][,host...][?ca_file=/path]"),
    "redis+sentinel": _Scheme(
        "sentinel", False, f"redis+sentinel://{_LOGIN}sentinel[:port][,sentinel[:port]...]/service[/database]"
    ),
    "rediss+sentinel": _Scheme(
        "sentinel", True, f"rediss+sentinel://{_LOGIN}sentinel[:port][,sentinel...]/service[/database][?ca_file=/path]"
    ),
}
REDIS_SCHEMES = tuple(_SCHEMES)

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379
_TLS_OPTIONS = ("ca_file", "cert_file", "key_file")


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A Redis or Valkey. Its text shows no password.

    Attributes:
        mode: What answers at the addresses.
        tls: Whether to speak TLS, to sentinels too.
        addresses: The server; or nodes of the cluster, of which one must answer; or the sentinels.
        database: Number of the database; 0 in a cluster.
        username: For ACLs; `None` for the default user.
        password: A secret.
        service: The sentinels' name for the primary; `None` for the other modes.
        sentinel_login: Whether sentinels require the same login as the servers.
        ca_file: Certificates to trust instead of the system's.
        cert_file: Our own certificate, for servers that require one.
        key_file: Its key; `None`: it is in `cert_file`.
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


def parse_redis(text: str) -> RedisLocation:
    """Read the url of a Redis; its scheme is one of `REDIS_SCHEMES`.

    Raises:
        InvalidRequest: Not of the scheme's form. The message never repeats a password.
    """
    name = text.partition("://")[0]
    if name not in _SCHEMES:
        raise InvalidRequest(f"expected one of {', '.join(_SCHEMES)}", seen=repr(without_secrets(text)))
    scheme = _SCHEMES[name]
    try:
        parts = urlsplit(text)
        login, _, hosts = parts.netloc.rpartition("@")
        port = _SENTINEL_PORT if scheme.mode == "sentinel" else _REDIS_PORT
        addresses = tuple(_address(host, port) for host in hosts.split(","))
        if parts.fragment or (scheme.mode == "standalone" and len(addresses) > 1):
            raise ValueError
        service, database = _path(scheme.mode, parts.path)
        username, _, password = login.partition(":")
        return RedisLocation(
            mode=scheme.mode,
            tls=scheme.tls,
            addresses=addresses,
            database=database,
            username=unquote(username) or None,
            password=unquote(password) or None,
            service=service,
            **_options(scheme, parts.query),  # type: ignore[arg-type]
            url=text,
        )
    except ValueError:
        expected = f"must look like {scheme.form}"
        raise InvalidRequest(expected, seen=repr(without_secrets(text))) from None  # the cause may show the password


def _address(text: str, default_port: int) -> HostPort:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise ValueError
    return HostPort(parts.hostname, default_port if parts.port is None else parts.port)


def _path(mode: RedisMode, path: str) -> tuple[str | None, int]:
    """Service and database."""
    steps = [step for step in path.split("/") if step]
    service = unquote(steps.pop(0)) if mode == "sentinel" and steps else None
    database = steps.pop(0) if steps else "0"
    if steps or not database.isdecimal() or (mode == "sentinel") != (service is not None):
        raise ValueError
    if mode == "cluster" and int(database) != 0:
        raise ValueError
    return service, int(database)


def _options(scheme: _Scheme, query: str) -> dict[str, Path | bool]:
    given = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    options: dict[str, Path | bool] = {}
    for name, values in given.items():
        if name == "sentinel_login" and scheme.mode == "sentinel" and values == ["same"]:
            options[name] = True
        elif name in _TLS_OPTIONS and scheme.tls and len(values) == 1 and values[0].startswith("/"):
            options[name] = Path(values[0])
        else:
            raise ValueError
    if "key_file" in options and "cert_file" not in options:
        raise ValueError
    return options


def without_secrets(text: str) -> str:
    """The text with everything before its last `@` hidden, except a scheme."""
    before, at, rest = text.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme if slashes else ''}{slashes}***@{rest}" if at else text
