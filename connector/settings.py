"""The operator's settings, from `kv_connector_extra_config` and `KVSTORE_CONNECTOR_*`, parsed once at start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvstore.client import BlockingStore, ClientOptions, ClientTls, EmbeddedOptions
from kvstore.errors import InvalidRequest
from kvstore.model.instance import EngineInstance
from kvstore.model.media import parse_media
from kvstore.runtime.sizes import parse_bytes

_ENVIRONMENT = "KVSTORE_CONNECTOR_"
_MODES = ("both", "load", "save", "off")
_COMPRESSIONS = ("auto", "planes", "tiles", "none")
_BLOCK_NAMES = ("off", "hashes", "tokens")
_WAIT_MS_MAX = 7 * 86_400_000
"""A week. Timers fail for much longer times."""
_SAVE_MEMORY_BYTES = 64 << 20
"""For a dozen records of some MiB that are encoded, sent or copied; a client that has no more room sends records."""
_MODE_OF_ROLE = {"kv_producer": "save", "kv_consumer": "load"}

STORE_SETTINGS = (
    *("url", "token_file", "tls_ca_file", "tls_certificate_file", "tls_key_file", "mode", "weights_id"),
    *("memory_bytes", "disk_bytes", "stall_timeout_ms", "max_wait_ms"),
)
"""Settings that also apply, with the same meaning, where an engine's own offloading moves the pages."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings of one engine's connector.

    Attributes:
        url: The service: `embedded:` (a private one, started on demand), `unix:/path`, `tcp://host:port` or
            `tls://host:port`.
        token_file: File with the bearer token for a service on TCP. vLLM logs its arguments, so the token itself is no
            setting.
        tls_ca_file: Authorities that this engine trusts for a `tls://` service's certificate; else the system's.
        tls_certificate_file: This engine's certificate in PEM, for a `tls://` service that requires one.
        tls_key_file: Its key, if that is not in the same file.
        mode: `both`, `load` (read only), `save` (write only) or `off`.
        compression: How this engine stores what it saves, without loss. `planes` and `tiles` compress bfloat16 to about
            .75 of its size: planes on processors, tiles also on a GPU. With `none` a page costs less
            processor time, and takes more memory, Redis and network. `auto` is `planes` on a processor, and `none` on a
            GPU, which reads such pages where they are. Every engine reads all, see `docs/vllm.md` for those of earlier
            releases.
        weights_id: Identifies the weights instead of a digest of their files. Engines with equal ids share pages, so
            an id that stays the same while weights change serves wrong output.
        weights_may_change: The weights are updated in place (reinforcement learning): a reset of the caches ends saves
            and loads until there is another weights id.
        weights_id_file: File with that id; write it before the reset that is to use it. Only with
            `weights_may_change`.
        trust_mm_uuids: Use identifiers of media as their content, even if users may have chosen them. Without it,
            requests with media are not cached. A user who gives two images one identifier gets the wrong one's pages.
        pinned_bytes: Host memory per rank for pages on their way, half of it for saves. On a GPU as much as that half
            is taken from the GPU's memory too. Pages of a step that do not fit wait in their blocks for up to five
            seconds. `None`: twice what the engine computes in a step, at least 512 MiB, at most an eighth of the
            machine's memory shared by its ranks, and on a GPU at most 1 GiB; the log shows the value.
        memory_bytes: Memory tier of the embedded service; `None` is its default, a quarter of the RAM up to 8
            GiB, or a tenth of it if that is more.
        disk_bytes: Directory of the embedded service; `None` is its default, a tenth of the free disk.
        lookup_timeout_ms: Longest wait for a lookup. Only its request waits, and only for a service that does not
            answer. A shorter time turns hits into recomputations on a busy machine.
        stall_timeout_ms: Fetching ends when no record arrived for this long; the records that have arrived are used.
            Keep it longer than the service's own `stall_timeout_ms`, or that service's partial answer is missed.
        max_wait_ms: Longest wait for a fetch, even if records keep arriving.
        whole_prompt_hits: A prompt that is stored completely is loaded completely, and one token is computed instead of
            a block; only for models with attention only. Off by default: then a restored run equals a run from vLLM's
            own cache bit for bit.
        load_always: Take every hit in full, within `max_wait_ms`, even if computing would be faster; for comparing
            the two.
        event_media: Names of tiers in this engine's cache events, for a router that weighs more media than vLLM's own
            names: `redis=SHARED_STORAGE,s3=OBJECT_STORE` for llm-d. Without it memory is `CPU`, a directory, Redis and
            S3 are `STORAGE`. A router gives no credit for a name that it does not know.
        name_blocks: What this engine tells the service of each page, for the cache events that the service publishes
            (`events_endpoint`): `off`, `hashes` of the blocks as vLLM names them, or also their `tokens`. Token ids are
            the users' prompts, and leave the engine. Never a salt.
        audit_rate: Share of resume points (0 to 1, chosen by their hash) whose records this engine checks. The first
            request that would resume there computes instead, and its pages are compared with the stored ones. Loads are
            read back. 0.01 makes one first resume in a hundred as slow as a miss; 1 is for tests.
        blend: Also reuse documents wherever they stand in a prompt, for requests that ask for it and have a
            `cache_salt` that begins with `blend:`. Approximate: answers differ from those of a full computation
            (docs/blending.md).
        blend_recompute_ratio: Share of the documents' tokens that are computed again (0 to 1). With more of
            them the first token takes longer, and answers differ less.
        blend_audit_rate: Share of blended requests (0 to 1) that are also computed in full, and the difference
            reported.
        blend_kl_max: The largest mean difference of the next token's distribution (KL divergence, in nats) that audits
            may find. Above it blending turns itself off until the engine is started again.
        allow_untested_vllm: Also save and load with a vLLM release that was not tested with this connector, if it has
            all names that the connector uses. Its pages are in a namespace of that version alone. An engine loads
            nothing until its first resume points were computed again and equalled the stored pages. Off by default: a
            release may change what a block holds, or when, without changing any name.
        instance_id: The name by which routers know this engine; they get it in answers of `/v1/query`. `None` is the
            name of the host, which is the pod's name in Kubernetes. Data-parallel ranks have one name.
        instance_address: Where this engine takes requests, for the same answers; not used otherwise.
    """

    url: str = "embedded:"
    token_file: str | None = None
    tls_ca_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    mode: str = "both"
    compression: str = "auto"
    weights_id: str | None = None
    weights_may_change: bool = False
    weights_id_file: str | None = None
    trust_mm_uuids: bool = False
    pinned_bytes: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    lookup_timeout_ms: int = 300
    stall_timeout_ms: int = 600
    max_wait_ms: int = 10_000
    whole_prompt_hits: bool = False
    load_always: bool = False
    event_media: str = ""
    name_blocks: str = "off"
    audit_rate: float = 0.0
    blend: bool = False
    blend_recompute_ratio: float = 0.15
    blend_audit_rate: float = 0.02
    blend_kl_max: float = 0.1
    allow_untested_vllm: bool = False
    instance_id: str | None = None
    instance_address: str | None = None

    def for_role(self, kv_role: str) -> ConnectorSettings:
        """These settings as vLLM's role narrows them: `kv_producer` only saves, `kv_consumer` only loads.

        A consumer takes every hit in full, since its prefill engine computes prompts for it.

        Raises:
            InvalidRequest: `mode` contradicts the role.
        """
        narrowed = _MODE_OF_ROLE.get(kv_role)
        if narrowed is None or self.mode == "off":
            return self
        load_always = self.load_always or narrowed == "load"
        if self.mode == narrowed:
            return replace(self, load_always=load_always)
        if self.mode != "both":
            raise InvalidRequest(
                f"kv_role {kv_role} only {narrowed}s: leave mode out, or set kv_role to kv_both",
                field="mode",
                seen=self.mode,
                kv_role=kv_role,
            )
        return replace(self, mode=narrowed, load_always=load_always)

    @property
    def loads(self) -> bool:
        return self.mode in ("both", "load")

    @property
    def saves(self) -> bool:
        return self.mode in ("both", "save")

    def connect(
        self, name: str, token: str | None, *, instance: EngineInstance | None = None, saves: bool = False
    ) -> BlockingStore:
        """A client of the service.

        Args:
            name: This process, as the service shows it to its operator.
            token: As `read_token` gives it, which reads the file again.
            instance: The engine, of the one client that looks up for it.
            saves: Whether this client makes records, if this engine saves.

        Raises:
            InvalidRequest: `url`, or the token or certificates that it needs, cannot be used.
        """
        stall_s = self.stall_timeout_ms / 1000
        options = ClientOptions(
            name=name,
            stall_timeout_s=stall_s,
            first_stall_timeout_s=10 * stall_s,
            tls=self.tls(),
            save_memory_bytes=_SAVE_MEMORY_BYTES if saves and self.saves else 0,
            instance=instance,
        )
        embedded = EmbeddedOptions(memory_bytes=self.memory_bytes, disk_bytes=self.disk_bytes)
        try:
            return BlockingStore(self.url, token=token, options=options, embedded=embedded)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error}; or embedded:", field="url") from error

    @classmethod
    def parse(
        cls,
        extra_config: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> ConnectorSettings:
        """Read the settings; the environment wins over `extra_config`.

        Args:
            extra_config: What the operator wrote for this engine.
            environment: `None`: the process's.
            only: The keys that `extra_config` may have; `None`: all. The environment may have all, since other engines
                share it.

        Raises:
            InvalidRequest: An unknown key (with the nearest valid one), or a value that does not fit its field.
        """
        # the only place of this package that reads the environment
        environment = os.environ if environment is None else environment  # noqa: TID251
        known = {field.name: str(field.type) for field in fields(cls)}
        seen: dict[str, tuple[str, Any]] = {}
        for key, value in extra_config.items():
            _check_known(key, key, known if only is None else only)
            seen[key] = key, value
        for name, value in environment.items():
            if name.startswith(_ENVIRONMENT):
                key = name.removeprefix(_ENVIRONMENT).lower()
                _check_known(key, name, known)
                seen[key] = name, value
        values = {key: _convert(origin, known[key], value) for key, (origin, value) in seen.items()}
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.mode not in _MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(_MODES)}", field="mode", seen=self.mode)
        if self.compression not in _COMPRESSIONS:
            expected = ", ".join(_COMPRESSIONS)
            raise InvalidRequest(f"compression must be one of {expected}", field="compression", seen=self.compression)
        for field in ("lookup_timeout_ms", "stall_timeout_ms", "max_wait_ms"):
            if not 0 < getattr(self, field) <= _WAIT_MS_MAX:
                raise InvalidRequest(
                    "expected a positive number",
                    field=field,
                    expected=f"1 to {_WAIT_MS_MAX}",
                    seen=getattr(self, field),
                )
        for field in ("pinned_bytes", "memory_bytes", "disk_bytes"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise InvalidRequest("expected a positive number", field=field, seen=value)
        for field in ("audit_rate", "blend_recompute_ratio", "blend_audit_rate"):
            if not 0 <= getattr(self, field) <= 1:
                raise InvalidRequest("expected a share from 0 to 1", field=field, seen=getattr(self, field))
        if not self.blend_kl_max > 0:
            raise InvalidRequest("expected a positive number", field="blend_kl_max", seen=self.blend_kl_max)
        parse_media(self.event_media)
        if self.name_blocks not in _BLOCK_NAMES:
            choices = ", ".join(_BLOCK_NAMES)
            raise InvalidRequest(f"name_blocks must be one of {choices}", field="name_blocks", seen=self.name_blocks)
        if self.weights_id == "":
            raise InvalidRequest("expected a name, or leave it out for a digest of the files", field="weights_id")

    def tls(self) -> ClientTls:
        """The certificates for a `tls://` address."""
        files = (self.tls_ca_file, self.tls_certificate_file, self.tls_key_file)
        return ClientTls(*(Path(name) if name is not None else None for name in files))

    def read_token(self) -> str | None:
        """The bearer token, without surrounding white space, or `None` when no file is named.

        Raises:
            InvalidRequest: The file cannot be read or is empty.
        """
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_text().strip()
        except OSError as error:
            raise InvalidRequest("cannot read the token file", field="token_file", error=error) from error
        except UnicodeDecodeError:
            # without the cause: it holds the file's bytes
            raise InvalidRequest("the token file is not text", field="token_file", path=self.token_file) from None
        if not token:
            raise InvalidRequest("the token file is empty", field="token_file", path=self.token_file)
        return token


def _check_known(key: str, origin: str, known: Collection[str]) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(sorted(known))}"
        hint += f"; a setting of the service is KVSTORE_{key.upper()} where it starts" if origin == key else ""
        raise InvalidRequest(f"unknown connector setting {origin!r}: {hint}")


def cache_folder() -> Path:
    """The folder in which digests of weight files are cached between starts: that of an embedded service."""
    return EmbeddedOptions().directory


def _convert(origin: str, wanted: str, value: Any) -> Any:
    if value is None and "None" in wanted:
        return None
    if wanted.startswith("str") and isinstance(value, str):
        return value
    if wanted == "bool":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "1", "false", "0"):
            return value.lower() in ("true", "1")
    if wanted == "float":
        with suppress(ValueError, TypeError):
            if not isinstance(value, bool):
                return float(value)
    if wanted.startswith("int"):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return parse_bytes(value)
    expected = {"bool": "true or false", "float": "a number", "int": "a whole number, or for bytes a text like '8GiB'"}
    kind = "text" if wanted.startswith("str") else expected["int" if wanted.startswith("int") else wanted]
    raise InvalidRequest(f"expected {kind}", field=origin, seen=repr(value))
