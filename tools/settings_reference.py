"""Writes docs/settings.md from the settings themselves: what each takes, its default, and what choosing it costs.

python tools/settings_reference.py            # prints it
python tools/settings_reference.py --write    # writes docs/settings.md
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
sys.path.insert(0, str(ROOT))

from connector.settings import ConnectorSettings  # noqa: E402
from kvstore.runtime.sizes import format_bytes  # noqa: E402
from kvstore.settings import Settings  # noqa: E402

MADE_DEFAULTS = {
    "memory_bytes": "a quarter of the RAM up to 8 GiB, or a tenth of it if that is more",
    "cold": "`file://` and `kvstore/records` under `$XDG_CACHE_HOME`",
    "quotas": "none",
}
"""In words, where a function makes the default."""

SERVICE_CHANGE_WHEN = {
    "listen": "Change it when engines run on other machines or in containers without a shared directory.",
    "admin_listen": "Change it when Prometheus or operators reach this service from other machines.",
    "token_file": "Set it when engines of one owner connect over TCP.",
    "tls_certificate_file": "Set it when clients connect over a network that others can read.",
    "tls_key_file": "Set it when key and certificate are in two files.",
    "tls_client_ca_file": "Set it when a client must also prove its identity with a certificate.",
    "tls_ca_file": "Set it when a private authority signed the service's certificate.",
    "credentials_file": "Set it when several tenants share the service, or when operators' rights differ.",
    "encryption_keys": "Set it when those who can read Redis, S3 or the disk must not read prompts' pages.",
    "memory_bytes": "Raise it when `kvstore explain` says `node_memory`, or most hits come from slower tiers.",
    "disk_bytes": "Set it when the directory shares a disk, or when it may use more than a tenth of it.",
    "hot": "Set it when several nodes share pages.",
    "hot_connections": "Raise it when Redis is reached over TLS and reads are slower than the link.",
    "hot_in_flight_bytes": "Lower it when a node has little memory. Raise it when a fast link to Redis is not filled.",
    "io_threads": "Raise it when a fast link is not filled and processors are idle ([redis.md](redis.md)).",
    "catalog_look_s": "Raise it when Redis evicts all the time and its processor is busy with the comparisons.",
    "cold": "Set it when pages must survive the node, or when nodes share them.",
    "cold_bytes": "Set it when the bucket must not grow without a limit.",
    "cold_unused_s": "Set it when rules demand that unused data is deleted, or when its storage costs too much.",
    "quotas": "Set it when one tenant's pages evict another's.",
    "retention_policy": "Change it when `kvstore simulate` shows more hits for one policy on your traffic.",
    "retention_admission": "Set `second_sight` when writes to `cold` cost much, `all` when each save must reach it.",
    "fsync": "Set `data` when records in the directory must survive a power failure.",
    "lease_s": "Raise it when engines pause longer. Lower it when killed engines cause `node_memory`.",
    "stall_timeout_ms": "Raise it when `kvstore explain` says `stall` although the disk or link works.",
    "fetch_timeout_ms": "Raise it when the tier needs longer for one record, as over a slow link to S3.",
    "write_back_bytes": "Raise it, or `memory_bytes`, when records are dropped as `evicted`.",
    "write_back_in_flight": "Raise it when records wait for a distant S3 while the link has room.",
    "pending_bytes": "Change it with the memory of Redis. Raise it when S3 may be down for long.",
    "pending_lease_s": "Raise it when machines pause longer than this, as in a live migration.",
    "drain_timeout_s": "Raise it when a stop loses records, and the supervisor waits as long before it kills.",
    "log_format": "Set `json` when a collector reads the log.",
    "otlp_traces_endpoint": "Set it when you look for where a slow request spends its time.",
    "traces_share": "Raise it when you look for a rare fault. Lower it when the collector gets too much.",
    "events_endpoint": "Set it when a router is to credit every engine of the node for what one of them saved.",
    "events_replay_endpoint": "Set it with `events_endpoint`, unless your router asks for no replays.",
    "events_numbers": "Set `clock` when the router is Dynamo.",
    "events_node": "Set it when your router knows engines by other names ([routers.md](routers.md)).",
    "event_media": "Set it when your router weighs media by names of its own ([routers.md](routers.md)).",
    "idle_exit_s": "Set it when a script starts a service and no supervisor stops it.",
}
ENGINE_CHANGE_WHEN = {
    "url": "Change it when engines or nodes share pages.",
    "token_file": "Set it when the service asks for a token.",
    "tls_ca_file": "Set it when a private authority signed the service's certificate.",
    "tls_certificate_file": "Set it when the service has `tls_client_ca_file`.",
    "tls_key_file": "Set it when key and certificate are in two files.",
    "mode": "Set `load` when this engine's pages are not worth storing, `save` when it only fills the store.",
    "compression": "Set `none` when loads wait for decoding; on a GPU `planes` when storage is scarcer than time.",
    "weights_id": "Set it when digesting the weights delays the start, or when a registry names them.",
    "weights_may_change": "Set it when a trainer updates the weights of the running engine.",
    "weights_id_file": "Set it when a trainer updates the weights of the running engine.",
    "trust_mm_uuids": "Set it when only trusted code chooses the identifiers of images.",
    "pinned_bytes": "Raise it when `vllm:kvstore_saves_delayed` grows. Lower it when host or GPU memory is short.",
    "memory_bytes": "Raise it when `kvstore explain` says `node_memory`.",
    "disk_bytes": "Change it when the cache may use more, or less, of the disk.",
    "lookup_timeout_ms": "Raise it when `kvstore explain` says `lookup_timeout` on a busy machine.",
    "stall_timeout_ms": "Raise it with the service's own.",
    "max_wait_ms": "Raise it when `kvstore explain` says `deadline` and computing takes longer.",
    "whole_prompt_hits": "Set it when the same prompts return word for word.",
    "load_always": "Set it when you compare loading with computing.",
    "event_media": "Set it when your router weighs media by names of its own ([routers.md](routers.md)).",
    "name_blocks": "Set it when the service publishes cache events; `tokens` with a router that needs token ids.",
    "audit_rate": "Set it when you introduce a model or a vLLM release, and keep a small share in production.",
    "blend": "Set it when prompts share documents in any order, and approximate answers do for some requests.",
    "blend_recompute_ratio": "Raise it when audits find large differences. Lower it when first tokens take long.",
    "blend_audit_rate": "Raise it when you introduce a model or other documents.",
    "blend_kl_max": "Change it when you know by which difference your application's answers get worse.",
    "allow_untested_vllm": "Set it when you must run a vLLM release that this connector was not tested with.",
    "instance_id": "Set it when a router asks for engines (docs/routers.md) and several run on one host.",
    "instance_address": "Set it when a router should learn from the answer where to send the request.",
}
"""When a user should change a setting. A setting without such a situation is removed."""

INTRODUCTION = """\
# Settings

Generated from the code by `python tools/settings_reference.py --write`; a test fails when it is not current.

## A service

Each is a flag of `kvstore serve` (`--memory-bytes 8GiB`), an environment variable (`KVSTORE_MEMORY_BYTES`), and a key
of the TOML file that `--config` or `KVSTORE_CONFIG` names. Flags override variables, which override the file, which
overrides the defaults. An unknown key is refused, and the message suggests the nearest one. Sizes are numbers of bytes,
or text like `8GiB`, `500MB`; times have their unit in the name.

| setting | takes | default | what it is, and its trade-off | when to change it |
|---|---|---|---|---|
"""

ENGINE = """
## An engine

Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. Each is also an environment variable
(`KVSTORE_CONNECTOR_URL`), which overrides the key. Unknown keys are refused. How they work together:
[vllm.md](vllm.md).

| key | takes | default | what it is, and its trade-off | when to change it |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    told, when = attributes(Settings), SERVICE_CHANGE_WHEN
    rows = [_row(name, _takes(name, field.annotation), _default(name, field), told, when) for name, field in _fields()]
    told, when = attributes(ConnectorSettings), ENGINE_CHANGE_WHEN
    engine = [
        _row(field.name, _takes(field.name, field.type), _value(field.name, field.default), told, when)
        for field in fields(ConnectorSettings)
        if field.default is not MISSING
    ]
    return INTRODUCTION + "".join(rows) + ENGINE + "".join(engine)


def attributes(cls: type) -> Mapping[str, str]:
    """What a class's docstring says of each of its attributes, in one line."""
    told: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(cls) or "").partition("Attributes:")[2].splitlines():
        start = re.fullmatch(r" {4}(\w+): (.*)", line)
        if start is not None:
            name = start[1]
            told[name] = start[2]
        elif name and line.strip():
            told[name] += " " + line.strip()
    return told


def _fields() -> list[tuple[str, FieldInfo]]:
    return list(Settings.model_fields.items())


def _row(name: str, takes: str, default: str, told: Mapping[str, str], when: Mapping[str, str]) -> str:
    return f"| `{name}` | {takes} | {default} | {told[name].replace('|', '/')} | {when[name]} |\n"


def _takes(name: str, annotation: Any) -> str:
    options = [one for one in (annotation, *get_args(annotation)) if get_origin(one) is Literal]
    if options:
        return ", ".join(f"`{value}`" for value in get_args(options[0]))
    written = str(annotation)
    for ending, words in (("_bytes", "bytes"), ("_ms", "milliseconds"), ("_s", "seconds")):
        if name.endswith(ending):
            return words
    if name.endswith("_file"):
        return "a file"
    if name in ("listen", "admin_listen", "url"):
        return "an address"
    if name in ("hot", "cold", "otlp_traces_endpoint"):
        return "a URL"
    kinds = {"bool": "`true` or `false`", "int": "a whole number", "float": "a number", "Mapping": "a table"}
    return next((words for kind, words in kinds.items() if re.search(rf"\b{kind}\b", written)), "text")


def _default(name: str, field: FieldInfo) -> str:
    return MADE_DEFAULTS[name] if field.default_factory is not None else _value(name, field.default)


def _value(name: str, value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name == "admin_listen":
        return f"`{str(value).removeprefix('tcp://')}`"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"`{format_bytes(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
