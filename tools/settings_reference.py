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
    "memory_bytes": "a tenth of the RAM",
    "cold": "`file://` and `kvstore/records` under `$XDG_CACHE_HOME`",
    "quotas": "none",
}
"""In words, where a function makes the default."""

INTRODUCTION = """\
# Settings

Generated from the code by `python tools/settings_reference.py --write`; a test fails when it is not current.

## A service

Each is a flag of `kvstore serve` (`--memory-bytes 8GiB`), an environment variable (`KVSTORE_MEMORY_BYTES`), and a key
of the TOML file that `--config` or `KVSTORE_CONFIG` names. Flags override variables, which override the file, which
overrides the defaults. An unknown key is refused, and the message suggests the nearest one. Sizes are numbers of bytes,
or text like `8GiB`, `500MB`; times have their unit in the name.

| setting | takes | default | what it is, and its trade-off |
|---|---|---|---|
"""

ENGINE = """
## An engine

Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. Each is also an environment variable
(`KVSTORE_CONNECTOR_URL`), which overrides the key. Unknown keys are refused. How they work together:
[vllm.md](vllm.md).

| key | takes | default | what it is, and its trade-off |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    told = attributes(Settings)
    rows = [_row(name, _takes(name, field.annotation), _default(name, field), told) for name, field in _fields()]
    told = attributes(ConnectorSettings)
    engine = [
        _row(field.name, _takes(field.name, field.type), _value(field.name, field.default), told)
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


def _row(name: str, takes: str, default: str, told: Mapping[str, str]) -> str:
    return f"| `{name}` | {takes} | {default} | {told[name].replace('|', '/')} |\n"


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
