"""Settings of a service: flags over environment over one TOML file over defaults. No part of a store knows them."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

from kvstore.errors import InvalidRequest
from kvstore.eviction.holdings import Quota
from kvstore.model.media import parse_media
from kvstore.runtime.machine import disk_size_and_free, usable_bytes
from kvstore.runtime.sizes import parse_bytes
from kvstore.runtime.wrong_values import cut, expectation, shown
from kvstore.tiers.locations import (
    ColdLocation,
    FileLocation,
    HotLocation,
    NoTier,
    parse_cold,
    parse_hot,
    without_secrets,
)
from kvstore.wire.address import Address, TcpAddress, UnixAddress, parse_address
from kvstore.wire.private_place import default_directory
from kvstore.wire.tls import ServerTls

Source = Literal["flag", "environment", "file", "default"]
"""Where the value of a setting came from."""

ENV_PREFIX = "KVSTORE_"
CONFIG_VARIABLE = "KVSTORE_CONFIG"
"""The variable that names the TOML file of settings where no flag names one."""
TOKEN_VARIABLE = "KVSTORE_TOKEN"
"""Holds the token of verbs where no file does; services do not read it."""

_SECONDS_MIN = 0.01
"""Services look at leases and at Redis this often: shorter pauses would keep processors busy with that."""
_SECONDS_MAX = 10**9
"""Thirty years; of milliseconds eleven days."""
_MEMORY_BYTES = 8 << 30
"""Three quarters of it hold the hit of 49,152 tokens of 128 KiB, as of an 8B model."""
_TEXT_CHARS_MAX = 4096
"""Longer than any path; a longer list of quotas stands in the file as a table."""

_FOREIGN_PREFIXES = ("KVSTORE_CONNECTOR_", "KVSTORE_TEST_")
"""The engine's side, and the test suite, read these."""


def _address(value: object) -> Address:
    return value if isinstance(value, UnixAddress | TcpAddress) else _parsed(parse_address, value)


def _admin_address(value: object) -> TcpAddress | None:
    if value is None or isinstance(value, TcpAddress):
        return value
    if value == "off":
        return None
    expected = "expected host:port or tls://host:port, like 127.0.0.1:7070, or off"
    try:
        address = parse_address(f"tcp://{value}" if "://" not in str(value) else str(value))
    except InvalidRequest as error:
        raise ValueError(expected) from error
    if not isinstance(address, TcpAddress):
        raise ValueError(expected)
    return address


def _hot(value: object) -> HotLocation:
    return value if isinstance(value, HotLocation) else _parsed(parse_hot, value)


def _cold(value: object) -> ColdLocation:
    return value if isinstance(value, ColdLocation) else _parsed(parse_cold, value)


def _parsed(parse: Any, value: object) -> Any:
    """Call one of our parsers from inside pydantic, which knows only `ValueError`."""
    if not isinstance(value, str):
        raise ValueError("expected text")
    try:
        return parse(value)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _media(value: str) -> str:
    try:
        parse_media(value)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return value


def _quotas(value: object) -> Mapping[str, Quota]:
    """A table by tenant, or text like `team-a=10GiB:50GiB,team-b=:20GiB`: guarantee and maximum of each tenant."""
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part]
        value = {
            name.strip(): dict(zip(("guaranteed", "maximum"), sizes.split(":", 1), strict=False)) if equals else None
            for name, equals, sizes in parts
        }
        if len(value) < len(parts):
            raise ValueError("expected each tenant once")
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


def _collector(value: object) -> object:
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"https?://[^@\s]+", value)):
        raise ValueError("expected the url of a collector without a login, like http://collector:4318/v1/traces")
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Seconds = Annotated[float, Field(ge=_SECONDS_MIN, le=_SECONDS_MAX, allow_inf_nan=False)]
Millis = Annotated[int, Field(gt=0, le=_SECONDS_MAX)]


def _share_of_ram() -> int:
    """Room for the hit of a long prompt on a small machine; of a large one a tenth, since most is for its engines."""
    usable = usable_bytes()  # a container's limit, where there is one
    return max(min(usable // 4, _MEMORY_BYTES), usable // 10)


class Settings(BaseModel):
    """The settings of a service. Frozen; made with `load_settings`.

    Attributes:
        listen: Where engines connect: `unix:/path` or `tcp://host:port`. A Unix socket is faster and needs no token.
        admin_listen: `host:port` of the administration interface, `tls://host:port` for one with TLS, or `off`. Without
            `credentials_file` it must be a loopback address, and serves processes of the service's user only.
        token_file: A file with the token that clients on TCP must present. A TCP service needs this or
            `credentials_file`.
        tls_certificate_file: Certificate of a `tls://` address, with its chain, in PEM. Both ports use it. Verbs
            present it too, to a service that requires a client certificate. Read again when it, the key or the
            authorities change.
        tls_key_file: The certificate's key, if it is not in the same file.
        tls_client_ca_file: If set, only clients with a certificate of these authorities may connect to a `tls://`
            address.
        tls_ca_file: Authorities that verbs trust when they call a `tls://` service; by default the system's.
        credentials_file: A TOML file of `[[credential]]` tables with `tenant`, `token_sha256` and `scopes`. A client's
            token decides its tenant, and tenants share nothing. Read again when it changes. A file without entries
            admits no client.
        encryption_keys: A file with the keys that records are encrypted with before they are stored (see
            docs/encryption.md), or `command:` and a command that prints such a file. Read again when it changes.
        memory_bytes: Size of the memory tier. Three quarters of it must hold the hits of a node's concurrent requests:
            one prompt of 8,192 tokens of a 7B model is 0.5-4 GiB. A hit that does not fit is shortened.
        disk_bytes: Size of the directory tier; by default a tenth of the free space at start. Without Redis, whole
            boundaries are evicted, longest prefixes first. With Redis, and while the catalog is rebuilt, the oldest
            records are evicted.
        hot: A Redis that all nodes share, or `memory:` for none. Without one, a node can read what another node saved
            only once it is in `cold`.
        hot_connections: Connections to each server of `hot` for records; one more carries small commands. Use more when
            one connection cannot fill the link, as with TLS.
        hot_in_flight_bytes: Bytes on their way to or from `hot` at a time; further reads and writes wait within their
            deadline. At least 4 MiB. It limits the memory that a slow Redis can occupy on this node.
        io_threads: Threads that move bytes to and from `hot` and an S3 `cold`, each with an event loop and its share of
            the connections. With 1 the service's own loop moves them. More take processors from the engine, and can be
            faster where the link has room: with several servers, or S3 beside Redis.
        catalog_look_s: How often one of the services checks whether `hot` evicted records, and whether the catalog is
            complete. If not, the service compares the catalog with what is stored, or rebuilds it. Longer loads Redis
            less, but totals are corrected later.
        cold: `s3://bucket/prefix`, `file:///dir`, or `memory:` for none: then a restart loses everything.
        cold_bytes: What `cold` may hold, over all services; by default only `disk_bytes` limits it. Needs a catalog:
            Redis as `hot`, or a directory as `cold`. Whole boundaries are evicted, longest prefixes first.
        cold_unused_s: Boundaries that were neither stored nor read for this long are removed from `cold`; by default
            they stay. Needs a catalog, as `cold_bytes`.
        quotas: Shares of `cold`, by tenant (see `credentials_file`). A tenant's records below its `guaranteed` bytes
            are not evicted for other tenants. Beyond its `maximum`, its records are evicted first. In TOML a table,
            `[quotas.team-a]`; elsewhere `team-a=10GiB:50GiB,team-b=:20GiB`. All guarantees together are at most three
            quarters of the limit.
        retention_policy: What is evicted first: `lru`, `flops_per_byte`, or `auto`, which simulates these on a sample
            of this node's lookups and follows the one with the most hits (see `kvstore simulate`).
        retention_admission: Which records are written to `cold`, of saves that do not wait for `hot` or `cold`. `all`:
            every record. `second_sight`: only records that a lookup queried before, which avoids most writes but loses
            the first reuse of records that `hot` has evicted. `auto`: all while `cold_bytes` has room, then the rule
            with the most hits. The service that owns a namespace decides, as for the policy.
        fsync: `none`: a power failure may lose the last records (their checksums make that a miss). `data`: a disk
            flush per record, which makes writes slower.
        lease_s: How long staged records stay in memory when their engine stops responding. Longer pins memory for dead
            engines.
        stall_timeout_ms: A stage ends when no record begins or finishes to arrive for this long. Raise it for a disk or
            link that needs as long for one record; requests then wait as long. A lookup ends after twice this time.
        fetch_timeout_ms: Timeout of one read of one record, which has a few MiB.
        write_back_bytes: Bytes in the queue to each slower tier, in memory beside `memory_bytes`. What finds no room
            there waits in `memory_bytes`, and is not written if it is evicted before its turn; what `hot` has by then
            is copied to `cold` from there.
        write_back_in_flight: Records written to one tier at a time. More is faster and takes more of the link.
        pending_bytes: Bytes of records in `hot` that `cold` does not have yet, over all services; `hot` cannot evict
            them. Beyond this limit new records are not written to `hot`, and saves that wait for it answer busy. Keep
            it well below the memory of `hot`: the rest is for hits.
        pending_lease_s: How long after a service's death another one finishes its writes to `cold`. Shorter finishes
            sooner, but repeats the work of a service that only hangs for that long.
        drain_timeout_s: How long a stopping service continues to write the records that wait.
        log_format: `text`, or `json`: one object per line, for collectors. Both contain the request, tenant and
            namespace that a line belongs to, and neither contains a secret.
        otlp_traces_endpoint: Where spans are sent, `http://collector:4318/v1/traces`; by default there is no tracing,
            at no cost. Needs `kvstore-vllm[tracing]`.
        traces_share: Share of the requests without a trace of their own that are traced. A request with one is traced
            if its trace is sampled. 1 traces every request, which slows a busy service.
        events_endpoint: ZeroMQ address at which this service publishes cache events, of all engines that name their
            pages (`name_blocks`): `tcp://*:5557` is bound, `tcp://router:5557` connected. Off by default. A client that
            can reach it learns which prompts are cached. Needs `kvstore-vllm[events]`.
        events_replay_endpoint: Where subscribers ask for events that they have missed, `tcp://*:5558`. Keeps the last
            10,000 batches, at most 64 MiB. Only with `events_endpoint`.
        events_numbers: How messages are numbered: `zero` begins at 0 with each start of the service, which llm-d needs
            to replay; `clock` at the time, so that numbers grow over restarts. Dynamo drops numbers that do not grow.
        events_node: Names of this node in topics, separated by commas: `kv@<name>@<model>`. By default `node:` and the
            host's name. Events of memory and directory are sent once for each name.
        event_media: Names of tiers in cache events, for a router that weighs more media than vLLM's own names:
            `redis=SHARED_STORAGE,s3=OBJECT_STORE` for llm-d. A router gives no credit for a name that it does not know.
        idle_exit_s: Exit when no client was connected for this long; by default never. For private services.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    listen: Annotated[Address, BeforeValidator(_address)] = UnixAddress("/run/kvstore.sock")
    admin_listen: Annotated[TcpAddress | None, BeforeValidator(_admin_address)] = TcpAddress("127.0.0.1", 7070)
    token_file: Path | None = None
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    tls_ca_file: Path | None = None
    credentials_file: Path | None = None
    encryption_keys: Annotated[str, Field(min_length=1)] | None = None
    memory_bytes: Bytes = Field(default_factory=_share_of_ram)
    disk_bytes: Bytes | None = None
    hot: Annotated[HotLocation, BeforeValidator(_hot)] = NoTier()
    hot_connections: Annotated[int, Field(ge=1, le=64)] = 4
    hot_in_flight_bytes: Annotated[Bytes, Field(ge=4 << 20)] = 256 << 20
    io_threads: Annotated[int, Field(ge=1, le=8)] = 1
    catalog_look_s: Seconds = 15.0
    cold: Annotated[ColdLocation, BeforeValidator(_cold)] = Field(
        default_factory=lambda: FileLocation(default_directory() / "records")
    )
    cold_bytes: Bytes | None = None
    cold_unused_s: Seconds | None = None
    quotas: Annotated[Mapping[str, Quota], BeforeValidator(_quotas)] = Field(default_factory=dict)
    retention_policy: Literal["auto", "lru", "flops_per_byte"] = "auto"
    retention_admission: Literal["auto", "all", "second_sight"] = "auto"
    fsync: Literal["none", "data"] = "none"
    lease_s: Seconds = 30.0
    stall_timeout_ms: Millis = 400
    fetch_timeout_ms: Millis = 5000
    write_back_bytes: Bytes = 96 << 20
    write_back_in_flight: Annotated[int, Field(ge=1, le=256)] = 4
    pending_bytes: Bytes = 8 << 30
    pending_lease_s: Seconds = 30.0
    drain_timeout_s: Annotated[float, Field(ge=0, le=_SECONDS_MAX, allow_inf_nan=False)] = 5.0
    log_format: Literal["text", "json"] = "text"
    otlp_traces_endpoint: Annotated[str | None, BeforeValidator(_collector)] = None
    traces_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    events_endpoint: Annotated[str, Field(max_length=_TEXT_CHARS_MAX)] = ""
    events_replay_endpoint: Annotated[str, Field(max_length=_TEXT_CHARS_MAX)] = ""
    events_numbers: Literal["zero", "clock"] = "zero"
    events_node: Annotated[str, Field(max_length=_TEXT_CHARS_MAX)] = ""
    event_media: Annotated[str, Field(max_length=_TEXT_CHARS_MAX), AfterValidator(_media)] = ""
    idle_exit_s: Seconds | None = None

    _sources: Mapping[str, Source] = PrivateAttr(default_factory=dict)
    _typed: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def source(self, name: str) -> Source:
        """Where the value of a setting came from."""
        return self._sources.get(name, "default")

    def given(self, name: str) -> str:
        """How the value of a setting was given, like `as KVSTORE_LISTEN`; empty: it is the default."""
        return self._typed.get(name, "")

    @property
    def names_a_store(self) -> bool:
        """Whether `hot` or `cold` was given. Else the store is a default one, which an embedded store has too."""
        return bool({"hot", "cold"} & self.model_fields_set)

    def tls(self) -> ServerTls | None:
        """The TLS settings of a `tls://` address; `None`: there is no certificate.

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
        return max(1, disk_size_and_free(directory)[1] // 10)


def load_settings(flags: Mapping[str, object] | None = None, *, config: Path | None = None) -> Settings:
    """Read all sources; for each field the first that has it counts: flags, `KVSTORE_...`, TOML file, default.

    Args:
        flags: Fields given on the command line; `None` values count as not given.
        config: The TOML file; else `KVSTORE_CONFIG` names it; else there is none.

    Raises:
        InvalidRequest: A key that no setting has (the nearest one is named), a value that does not fit, or a file that
            cannot be read. Never shows a secret.
    """
    from_flags = {name: value for name, value in (flags or {}).items() if value is not None}
    _check_names(from_flags, "flag")
    environment = {
        name.upper(): value
        for name, value in os.environ.items()  # noqa: TID251
        if name.upper().startswith(ENV_PREFIX)
    }
    from_environment = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name not in (CONFIG_VARIABLE, TOKEN_VARIABLE) and not name.startswith(_FOREIGN_PREFIXES)
    }
    _check_names(from_environment, "environment variable", spell=lambda name: ENV_PREFIX + name.upper())
    if config is None and environment.get(CONFIG_VARIABLE):
        config = Path(environment[CONFIG_VARIABLE])
    from_file = _read_toml(config) if config is not None else {}
    for name, value in from_file.items():
        if isinstance(value, dict) and name not in Settings.model_fields:
            raise InvalidRequest(f"settings stand at the top of {config}: remove the line [{name}]")
    _check_names(from_file, f"key in {config}")
    values: dict[str, object] = {**from_file, **from_environment, **from_flags}
    for name, value in values.items():
        if isinstance(value, str) and len(value) > _TEXT_CHARS_MAX:
            raise InvalidRequest(f"setting {name}: expected at most {_TEXT_CHARS_MAX} characters", seen=len(value))
        if isinstance(value, bool):  # else `traces_share = true` would be 1
            raise InvalidRequest(f"setting {name}: expected a number or text", seen=str(value).lower())
    typed = dict.fromkeys(from_file, f"in {config}")
    typed |= {name: f"as {ENV_PREFIX}{name.upper()}" for name in from_environment}
    typed |= {name: f"as --{name.replace('_', '-')}" for name in from_flags}
    settings = _made(values, typed)
    settings._typed = typed
    settings._sources = {
        **dict.fromkeys(from_file, "file"),
        **dict.fromkeys(from_environment, "environment"),
        **dict.fromkeys(from_flags, "flag"),
    }
    return settings


def settings_from(values: Mapping[str, object]) -> Settings:
    """Settings with these values, and defaults for all others. The environment and files are not read.

    Raises:
        InvalidRequest: As `load_settings`.
    """
    values = dict(values)
    _check_names(values, "setting")
    return _made(values, {})


def _made(values: Mapping[str, object], typed: Mapping[str, str]) -> Settings:
    """Settings of these values; an error says where each wrong one was `typed`."""
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest(_explain(error, values, typed)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidRequest("cannot read the settings file", path=path, error=error.strerror) from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise InvalidRequest("the settings file is not TOML", path=path, error=cut(str(error))) from error


def _check_names(values: dict[str, Any], what: str, spell: Any = str) -> None:
    """Refuse an unknown name, and name the nearest one."""
    known = sorted(Settings.model_fields)
    for name in sorted(values):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            step = f"did you mean {spell(near[0])}? Settings" if near else "docs/settings.md lists all; settings"
            step += " of engines belong in their kv_connector_extra_config"
            raise InvalidRequest(f"unknown {what} {cut(spell(name))}: {step}")


def _explain(error: ValidationError, seen: Mapping[str, object], typed: Mapping[str, str]) -> str:
    """Every wrong field: its name, how or where it was typed, what was expected, what was seen."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        name = str(problem["loc"][0])
        expected = expectation(problem)
        value = seen.get(name)
        value = without_secrets(value) if isinstance(value, str) else value
        seen_text = "" if "seen=" in expected else f" seen={shown(value)}"
        where = f" (given {typed[name]})" if name in typed else ""
        lines.append(f"setting {name}: {cut(expected, 300)}{seen_text}{where}")
    return "; ".join(lines)
