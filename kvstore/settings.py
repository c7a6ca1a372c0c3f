"""Settings of a service: flags over environment over one TOML file over defaults. Only `kvstore.compose` reads them."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvstore.client.embedded import default_directory
from kvstore.errors import InvalidRequest
from kvstore.eviction.holdings import Quota
from kvstore.tiers.locations import (
    ColdLocation,
    FileLocation,
    HotLocation,
    NoTier,
    RedisLocation,
    S3Location,
    parse_cold,
    parse_hot,
    without_secrets,
)
from kvstore.wire.address import Address, TcpAddress, UnixAddress, parse_address
from kvstore.wire.tls import ServerTls

__all__ = ["TOKEN_VARIABLE", "Settings", "load_settings", "parse_bytes"]

ENV_PREFIX = "KVSTORE_"
CONFIG_VARIABLE = "KVSTORE_CONFIG"
"""Names the TOML file where no flag does."""
TOKEN_VARIABLE = "KVSTORE_TOKEN"
"""Holds the token of verbs that ask a service, where no file does; services do not read it."""

_FOREIGN_PREFIXES = ("KVSTORE_CONNECTOR_", "KVSTORE_TEST_")
"""The engine's side, and the test suite, read these."""

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(value: object) -> int:
    """Read a number of bytes: a whole number, or text like `8GiB`, `500 MB`, `1.5TiB`.

    Raises:
        ValueError: Neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    unit = next((size for name, size in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ValueError("expected bytes, like 8GiB, 500MB or 1048576")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _address(value: object) -> Address:
    return value if isinstance(value, UnixAddress | TcpAddress) else _parsed(parse_address, value)


def _admin_address(value: object) -> TcpAddress | None:
    if value is None or isinstance(value, TcpAddress):
        return value
    if value == "off":
        return None
    address = _parsed(parse_address, f"tcp://{value}" if isinstance(value, str) and "://" not in value else value)
    if not isinstance(address, TcpAddress):
        raise ValueError("expected host:port or tls://host:port, like 127.0.0.1:7070, or off")
    return address


def _hot(value: object) -> HotLocation:
    return value if isinstance(value, NoTier | RedisLocation) else _parsed(parse_hot, value)


def _cold(value: object) -> ColdLocation:
    return value if isinstance(value, NoTier | FileLocation | S3Location) else _parsed(parse_cold, value)


def _parsed(parse: Any, value: object) -> Any:
    """Call one of our parsers from inside pydantic, which knows only `ValueError`."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    try:
        return parse(value)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _quotas(value: object) -> Mapping[str, Quota]:
    """A table by tenant, or text like `team-a=10GiB:50GiB,team-b=:20GiB` of what is guaranteed and at most taken."""
    if isinstance(value, str):
        parts = (part.partition("=") for part in value.split(",") if part)
        value = {
            name.strip(): dict(zip(("guaranteed", "maximum"), sizes.split(":", 1), strict=False))
            for name, _, sizes in parts
        }
    if not isinstance(value, Mapping):
        raise ValueError("expected tenants with what they get, like team-a=10GiB:50GiB")
    return {str(tenant): _quota(str(tenant), given) for tenant, given in value.items()}


def _quota(tenant: str, given: object) -> Quota:
    if isinstance(given, Quota):
        return given
    if not isinstance(given, Mapping) or not set(given) <= {"guaranteed", "maximum"}:
        raise ValueError(f"expected guaranteed and maximum of tenant {tenant!r}, like 10GiB and 50GiB")
    sizes = {name: parse_bytes(size) for name, size in given.items() if size != ""}
    quota = Quota(sizes.get("guaranteed", 0), sizes.get("maximum"))
    if quota.maximum_bytes is not None and not max(1, quota.guaranteed_bytes) <= quota.maximum_bytes:
        raise ValueError(f"the maximum of tenant {tenant!r} is less than what is guaranteed to it, or nothing")
    return quota


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Millis = Annotated[int, Field(gt=0)]


def _tenth_of_ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10


class Settings(BaseSettings):
    """What an operator may choose. Frozen; make it with `load_settings`.

    Attributes:
        listen: Where engines connect: `unix:/path` or `tcp://host:port`. A Unix socket is faster and needs no token.
        admin_listen: `host:port` of the administration interface, `tls://host:port` for one that speaks TLS, or `off`.
            Without `credentials_file` a loopback address only, for processes of the service's own user.
        token_file: A file with the token that clients on TCP must show; without it, or credentials, TCP is refused.
        tls_certificate_file: What a `tls://` address shows, with its chain, in PEM; renewed files are taken up. Verbs
            that ask such a service show it too, where it asks for one. Both ports use these files.
        tls_key_file: Its key, if that is not in the same file.
        tls_client_ca_file: Only peers with a certificate of these authorities may connect to a `tls://` address.
        tls_ca_file: Authorities that verbs believe when they ask a `tls://` service; else the system's.
        credentials_file: A TOML file of `[[credential]]` tables with `tenant`, `token_sha256` and `scopes`: whoever
            shows that token is that tenant, and tenants share nothing. Read again when it changes.
        encryption_keys: A file with the keys that records are encrypted with before they are stored (see
            docs/encryption.md), or `command:` and what prints such a file. Read again when it changes.
        memory_bytes: Memory tier. More holds longer prompts at a time: one of 8,192 tokens of a 7B model is 0.5-4 GiB.
        disk_bytes: Directory tier; by default a tenth of what is free there at start. Without a Redis whole boundaries
            leave, ends of prefixes first; else, and while the catalog is made anew, the oldest records.
        hot: A Redis that all nodes share, or `memory:` for none: then a node cannot read what another saved until it
            is in `cold`.
        hot_connections: To each server of `hot`, for records; one more carries small commands. More help where one
            connection is slower than the link, TLS above all.
        hot_in_flight_bytes: On their way to or from `hot` at a time; further reads and writes wait within their
            deadline. At least 4 MiB; it bounds what a slow Redis holds of this node's memory.
        catalog_look_s: How often one of the services asks `hot` whether it let records go by itself, and if so compares
            the catalog with what is there. Longer costs Redis less, and totals are right later.
        cold: `s3://bucket/prefix`, `file:///dir`, or `memory:` for none: then a restart loses everything.
        cold_bytes: What `cold` may hold, over all services: where `hot` is a Redis, which keeps the books, or `cold` is
            a directory; unset: no bound but `disk_bytes`. Ends of prefixes leave first, whole boundaries at a time.
        cold_unused_s: What was neither stored nor read for so long leaves `cold`; unset: stays. Likewise.
        quotas: Of `cold`, by tenant (see `credentials_file`): `guaranteed`, within which nothing of it leaves for
            others, and `maximum`, beyond which it leaves before all others. In TOML a table, `[quotas.team-a]`;
            elsewhere `team-a=10GiB:50GiB,team-b=:20GiB`. Guarantees together are three quarters of the bound at most.
        retention_policy: Who leaves first: `lru`, `s3fifo`, `flops_per_byte`, or `auto`, which tries these on the
            lookups of this node, in small, and follows the one that hits most (see `kvstore simulate`).
        retention_admission: What `cold` gets of saves that do not wait for `hot` or `cold`: `all`; on `second_sight`
            only, what a lookup has asked for before, which saves most of the writes and costs the first reuse of what
            `hot` has let go by then; `by_size` prompts of 1,024 tokens or more; or `auto`: all while there is room in
            `cold_bytes`, then what hits most. Each namespace follows the service that owns it, as for the policy.
        fsync: `none`: a power failure may lose the last records (their checksums make that a miss). `data`: a disk
            flush per record, about 1 ms on NVMe and 10 ms on a disk.
        stage_bytes: Of the memory tier, for leased records; at most three quarters, which is the default. A hit that
            does not fit is cut.
        lease_s: How long staged records stay if the engine falls silent. Longer pins memory for dead engines.
        stall_timeout_ms: A stage ends when no bytes arrive for so long. Longer waits out a slow disk or link; the
            request waits with it.
        fetch_timeout_ms: One read of one record, of a few MiB, gives up after this.
        write_back_bytes: Bytes that may wait for each slower tier. More rides out a longer outage, and is memory
            beside `memory_bytes`. What `hot` holds already is not lost beyond it: it is copied from there later.
        write_back_in_flight: Records written to one tier at a time. More is faster and takes more of the link.
        pending_bytes: Bytes of records in `hot` that `cold` does not have yet, over all services: `hot` may not evict
            these. Beyond, new records are not written to `hot`, and saves that wait for it answer busy. Well below the
            memory of `hot`: the rest of that is for hits.
        pending_lease_s: So long after a service's death another one finishes what it left. Shorter finishes sooner, and
            what a service that hangs for so long has begun is done twice.
        drain_timeout_s: How long a stopping service goes on writing what waits.
        log_format: `text`, or `json`: an object on each line, for collectors. Both tell the request, tenant and
            namespace that a line belongs to, and neither shows a secret.
        otlp_traces_endpoint: Where spans go, `http://collector:4318/v1/traces`; unset: there are none, at no cost.
            Needs `kvstore[tracing]`.
        traces_share: Of requests that come without a trace of their own; one that comes with one is traced if that is.
            All of a busy service's are many thousands a second.
        idle_exit_s: End when no client was there for so long; unset: never. For private services.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, enable_decoding=False, hide_input_in_errors=True
    )

    listen: Annotated[Address, BeforeValidator(_address)] = UnixAddress("/run/kvstore.sock")
    admin_listen: Annotated[TcpAddress | None, BeforeValidator(_admin_address)] = TcpAddress("127.0.0.1", 7070)
    token_file: Path | None = None
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    tls_ca_file: Path | None = None
    credentials_file: Path | None = None
    encryption_keys: Annotated[str, Field(min_length=1)] | None = None
    memory_bytes: Bytes = Field(default_factory=_tenth_of_ram)
    disk_bytes: Bytes | None = None
    hot: Annotated[HotLocation, BeforeValidator(_hot)] = NoTier()
    hot_connections: Annotated[int, Field(ge=1, le=64)] = 4
    hot_in_flight_bytes: Annotated[Bytes, Field(ge=4 << 20)] = 256 << 20
    catalog_look_s: Seconds = 15.0
    cold: Annotated[ColdLocation, BeforeValidator(_cold)] = Field(
        default_factory=lambda: FileLocation(default_directory() / "records")
    )
    cold_bytes: Bytes | None = None
    cold_unused_s: Seconds | None = None
    quotas: Annotated[Mapping[str, Quota], BeforeValidator(_quotas)] = Field(default_factory=dict)
    retention_policy: Literal["auto", "lru", "s3fifo", "flops_per_byte"] = "auto"
    retention_admission: Literal["auto", "all", "second_sight", "by_size"] = "auto"
    fsync: Literal["none", "data"] = "none"
    stage_bytes: Bytes | None = None
    lease_s: Seconds = 30.0
    stall_timeout_ms: Millis = 400
    fetch_timeout_ms: Millis = 5000
    write_back_bytes: Bytes = 96 << 20
    write_back_in_flight: Annotated[int, Field(ge=1, le=256)] = 4
    pending_bytes: Bytes = 8 << 30
    pending_lease_s: Seconds = 30.0
    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    log_format: Literal["text", "json"] = "text"
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://[^@\s]+$")] | None = None
    traces_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    idle_exit_s: Seconds | None = None

    def tls(self) -> ServerTls | None:
        """What a `tls://` address shows, if there is a certificate.

        Raises:
            InvalidRequest: A file cannot be used, or there is one without its certificate.
        """
        if self.tls_certificate_file is None:
            for name in ("tls_key_file", "tls_client_ca_file"):
                if getattr(self, name) is not None:
                    raise InvalidRequest("setting tls_certificate_file: missing, though there is one", also=name)
            return None
        return ServerTls(self.tls_certificate_file, self.tls_key_file, self.tls_client_ca_file)

    def disk_budget_bytes(self, directory: Path) -> int:
        """`disk_bytes`, or a tenth of what is free where `directory` is or will be."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        return max(1, shutil.disk_usage(existing).free // 10)


def load_settings(flags: Mapping[str, object] | None = None, *, config: Path | None = None) -> Settings:
    """Read all sources; for each field the strongest wins: flags, `KVSTORE_...`, the TOML file, the default.

    Args:
        flags: Fields given on the command line; `None` values count as not given.
        config: The TOML file; else `KVSTORE_CONFIG` names it; else there is none.

    Raises:
        InvalidRequest: A key that no setting has (the nearest one is named), a value that does not fit, or a file that
            cannot be read. Never shows a secret.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown(given, "flag")
    environment = {name: value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}  # noqa: TID251
    in_environment = {
        name.upper().removeprefix(ENV_PREFIX).lower()
        for name in environment
        if name.upper() not in (CONFIG_VARIABLE, TOKEN_VARIABLE) and not name.upper().startswith(_FOREIGN_PREFIXES)
    }
    _refuse_unknown(in_environment, "environment variable", spell=lambda name: ENV_PREFIX + name.upper())
    if config is None and environment.get(CONFIG_VARIABLE):
        config = Path(environment[CONFIG_VARIABLE])
    from_file = _read_toml(config) if config is not None else {}
    _refuse_unknown(from_file, f"key in {config}")
    weaker = {name: value for name, value in from_file.items() if name not in in_environment}
    try:
        return Settings(**{**weaker, **given})
    except ValidationError as error:
        raise InvalidRequest(_explain(error, {**from_file, **_lower(environment), **given})) from None


def _lower(environment: Mapping[str, str]) -> dict[str, str]:
    return {name.upper().removeprefix(ENV_PREFIX).lower(): value for name, value in environment.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidRequest("cannot read the settings file", path=path, error=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("the settings file is not TOML", path=path, error=error) from error


def _refuse_unknown(names: Iterable[str], what: str, spell: Any = str) -> None:
    known = sorted(Settings.model_fields)
    for name in sorted(names):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidRequest(f"unknown {what} {spell(name)}: did you mean {spell(near)}?")


def _explain(error: ValidationError, seen: Mapping[str, object]) -> str:
    """Every wrong field: its name, what was expected, what was seen."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(problem["loc"][0])
        expected = problem["msg"].removeprefix("Value error, ")
        expected = expected[:1].lower() + expected[1:]
        value = seen.get(name)
        value = without_secrets(value) if isinstance(value, str) else value
        shown = "" if "seen=" in expected else f" seen={value!r}"
        lines.append(f"setting {name}: {expected}{shown}")
    return "; ".join(lines)
