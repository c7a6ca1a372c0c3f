"""The keys of each tenant, from a key file or a command's output, which is read again when it changes."""

from __future__ import annotations

import base64
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from kvstore.errors import InvalidRequest
from kvstore.format.encrypted import KEY_ID_MAX, SECRET_BYTES, TenantKey
from kvstore.runtime.toml_tables import TableEntry, parse_tables
from kvstore.runtime.watched_file import Watched, read_guarded, state_of

EVERY_TENANT = "*"
"""Stands for all tenants that the file does not name."""

COMMAND_PREFIX = "command:"

_FIELD = "encryption_keys"
_WHAT = "encryption key file"
_GENERATIONS_MAX = 4
"""Keys of one tenant: a lookup that the earlier ones do not answer in full costs another one for each."""
_FILE_BYTES_MAX = 4 << 20
_COMMAND_S = 30.0
_COMMAND_POLL_S = 300.0

Generation = TenantKey | None
"""How some of a tenant's records are stored: under this key, or plain, which is `None`."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key of the source, not yet made one tenant's; id 0 stands for plain records."""

    key_id: int
    secret: bytes = field(repr=False)


class KeyRing:
    """The keys of all tenants, from one reading of the source. Safe from any thread."""

    def __init__(self, entries: Mapping[str, Sequence[_Entry]]) -> None:
        self._entries = entries
        self._generations: dict[str, tuple[Generation, ...]] = {}

    def __len__(self) -> int:
        return sum(entry.key_id > 0 for entries in self._entries.values() for entry in entries)

    def generations(self, tenant: str) -> tuple[Generation, ...]:
        """A tenant's keys, the current one first: records are written with it, and read with any. Empty: the tenant has
        no key, and nothing of it can be stored.
        """
        found = self._generations.get(tenant)
        if found is None:
            entries = self._entries.get(tenant) or self._entries.get(EVERY_TENANT, ())
            found = tuple(TenantKey(entry.key_id, entry.secret, tenant) if entry.key_id else None for entry in entries)
            self._generations[tenant] = found
        return found


class _KeyTable(TableEntry):
    """A `[[key]]` table as it is written."""

    tenant: str = Field(
        pattern="^[!-~]{0,128}$",
        description="a tenant, * for all that are not named, or an empty text for peers without credential",
    )
    id: int = Field(
        ge=0, le=KEY_ID_MAX, description=f"a number from 1 to {KEY_ID_MAX}, or 0 for records that are not encrypted"
    )
    secret: str = Field(
        "",
        repr=False,
        description=f"{SECRET_BYTES} random bytes in base64, as `openssl rand -base64 {SECRET_BYTES}` prints them",
    )

    @field_validator("secret")
    @classmethod
    def _is_base64(cls, secret: str) -> str:
        if len(base64.b64decode(secret, validate=True)) != SECRET_BYTES:
            raise ValueError("wrong length")
        return secret

    @model_validator(mode="after")
    def _has_secret(self) -> Self:
        if self.id == 0 and self.secret:
            raise ValueError("id 0 is for records that are not encrypted: it has no secret")
        if self.id and not self.secret:
            raise ValueError(f"expected {type(self).model_fields['secret'].description} in secret, seen nothing")
        if self.id and not any(base64.b64decode(self.secret)):
            raise ValueError("a secret of zeros is no secret")
        return self


def parse_keys(content: bytes, source: str) -> KeyRing:
    """Read TOML of `[[key]]` tables, each with `tenant`, `id` and `secret`.

    Raises:
        InvalidRequest: Something is wrong; the message names entry and field, and never shows a secret.
    """
    tables = parse_tables(content, _KeyTable, table="key", what=_WHAT, source=source)
    if not tables:
        raise InvalidRequest(f"invalid {_WHAT}: expected [[key]] tables, seen none", field=_FIELD, source=source)
    entries: dict[str, list[_Entry]] = {}
    for number, table in enumerate(tables, 1):
        mine = entries.setdefault(table.tenant, [])
        where = f"key {number} of {source}"
        if any(table.id == other.key_id for other in mine):
            raise InvalidRequest(
                f"invalid {_WHAT}: one id cannot be two keys of a tenant", entry=where, field="id", seen=table.id
            )
        mine.append(_Entry(table.id, base64.b64decode(table.secret)))
        if len(mine) > _GENERATIONS_MAX:
            raise InvalidRequest(
                f"invalid {_WHAT}: a tenant has at most {_GENERATIONS_MAX} keys: finish a migration first",
                entry=where,
                field="tenant",
                seen=table.tenant,
            )
    return KeyRing(entries)


def no_keys() -> Watched[KeyRing]:
    """For a service without `encryption_keys`: the records of every tenant are plain."""
    return Watched("encryption keys", lambda: None, lambda: KeyRing({EVERY_TENANT: [_Entry(0, b"")]}), poll_s=60.0)


def watch_keys(value: str) -> Watched[KeyRing]:
    """The keys that the setting `encryption_keys` names: a path, or `command:` and what to run.

    Raises:
        InvalidRequest: The file cannot be read, or other users may read it; the command failed; or a key is wrong.
    """
    if value.startswith(COMMAND_PREFIX):
        command = _Command(_split(value.removeprefix(COMMAND_PREFIX)))
        return Watched("encryption keys", command.run, command.keys, poll_s=_COMMAND_POLL_S, settles=False)
    path = Path(value)
    return Watched("encryption keys", partial(state_of, path), partial(_read_keys, path))


def _read_keys(path: Path) -> KeyRing:
    content = read_guarded(path, what=_WHAT, field=_FIELD, mode_bits=0o077, bytes_max=_FILE_BYTES_MAX)
    return parse_keys(content, str(path))


class _Command:
    """A command that prints keys. No error shows its arguments or its output, which may hold a secret."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._source = f"the command {argv[0]}"
        self._failure: InvalidRequest | None = None
        self._output = b""

    def run(self) -> object:
        """Run the command; returns its output, or why there is none."""
        self._failure = None
        try:
            self._output = self._run()
        except InvalidRequest as error:
            self._failure = error
            return str(error)
        return self._output

    def keys(self) -> KeyRing:
        """The keys that the latest run printed.

        Raises:
            InvalidRequest: It failed, or what it printed is wrong.
        """
        if self._failure is not None:
            raise self._failure
        return parse_keys(self._output, self._source)

    def _run(self) -> bytes:
        named = {"field": _FIELD, "source": self._source}
        try:
            done = subprocess.run(
                self._argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
            )
        except OSError as error:
            raise InvalidRequest("cannot run the command", **named, error=error.strerror) from error
        except subprocess.TimeoutExpired:
            raise InvalidRequest(f"the command printed no keys within {_COMMAND_S:.0f} s", **named) from None
        if done.returncode != 0:
            raise InvalidRequest("the command failed", **named, status=done.returncode)
        return done.stdout[:_FILE_BYTES_MAX]


def _split(command: str) -> list[str]:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise InvalidRequest("the command for the keys cannot be split into words", field=_FIELD) from error
    if not argv:
        raise InvalidRequest("expected a path, or command: and what to run", field=_FIELD)
    return argv
