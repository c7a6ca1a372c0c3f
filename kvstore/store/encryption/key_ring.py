"""The keys of each tenant, from a key file or a command's output, which is read again when it changes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import re
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.format.encrypted import KEY_ID_MAX, SECRET_BYTES, TenantKey

__all__ = ["COMMAND_PREFIX", "EVERY_TENANT", "Generation", "KeyRing", "KeySource", "open_key_source", "parse_keys"]

_log = logging.getLogger(__name__)

EVERY_TENANT = "*"
"""Stands for all tenants that the file does not name."""

COMMAND_PREFIX = "command:"

_FIELD = "encryption_keys"
_FIELDS = ("tenant", "id", "secret")
_TENANT = re.compile(r"[!-~]{1,128}")
_GENERATIONS_MAX = 4
"""Keys of one tenant: a lookup that the earlier ones do not answer in full costs another one for each."""
_FILE_BYTES_MAX = 4 << 20
_COMMAND_S = 30.0
_FILE_LOOK_S = 2.0
_COMMAND_LOOK_S = 300.0
_GONE: tuple[int, ...] = (0,)
"""The signature of a file that does not exist."""

Generation = TenantKey | None
"""How some of a tenant's records are stored: under this key, or plain, which is `None`."""


@dataclass(frozen=True, slots=True)
class _Entry:
    key_id: int
    secret: bytes = field(repr=False)


class KeyRing:
    """The keys of all tenants, from one reading of the source. Safe from any thread."""

    def __init__(self, entries: Mapping[str, Sequence[_Entry]]) -> None:
        self._entries = entries
        self._generations: dict[str, tuple[Generation, ...]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

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


def parse_keys(text: str, where: str) -> KeyRing:
    """Read TOML of `[[key]]` tables, each with `tenant`, `id` and `secret`.

    Raises:
        InvalidRequest: Something is wrong; the message names entry and field, and never shows a secret.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # without the parser's message, which may quote a secret
        raise InvalidRequest("the keys are not TOML", field=_FIELD, source=where) from None
    listed = content.get("key")
    if set(content) != {"key"} or not isinstance(listed, list) or not listed:
        raise InvalidRequest("expected [[key]] tables and nothing else", field=_FIELD, source=where)
    entries: dict[str, list[_Entry]] = {}
    for number, given in enumerate(listed, 1):
        tenant, entry = _read_entry(given, f"key {number} of {where}")
        mine = entries.setdefault(tenant, [])
        if any(entry.key_id == other.key_id for other in mine):
            raise InvalidRequest(
                "one id cannot be two keys of a tenant", entry=f"key {number} of {where}", field="id", seen=entry.key_id
            )
        mine.append(entry)
        if len(mine) > _GENERATIONS_MAX:
            raise InvalidRequest(
                f"a tenant has at most {_GENERATIONS_MAX} keys: finish a migration first",
                entry=f"key {number} of {where}",
                field="tenant",
                seen=tenant,
            )
    return KeyRing(entries)


def _read_entry(given: Any, where: str) -> tuple[str, _Entry]:
    if not isinstance(given, dict):
        raise InvalidRequest("expected a table", entry=where)
    for name in given:
        if name not in _FIELDS:
            raise InvalidRequest(f"unknown field, known are {', '.join(_FIELDS)}", entry=where, field=name)
    tenant, key_id, secret = given.get("tenant"), given.get("id"), given.get("secret")
    if not isinstance(tenant, str) or (tenant and not _TENANT.fullmatch(tenant)):
        raise InvalidRequest(
            "expected a tenant, * for all that are not named, or an empty text for peers without credential",
            entry=where,
            field="tenant",
        )
    if not isinstance(key_id, int) or isinstance(key_id, bool) or not 0 <= key_id <= KEY_ID_MAX:
        raise InvalidRequest(
            f"expected a number from 1 to {KEY_ID_MAX}, or 0 for records that are not encrypted",
            entry=where,
            field="id",
        )
    if key_id == 0:
        if secret is not None:
            raise InvalidRequest("id 0 is for records that are not encrypted: it has no key", entry=where, field="id")
        return tenant, _Entry(0, b"")
    try:
        data = base64.b64decode(secret, validate=True) if isinstance(secret, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != SECRET_BYTES:
        raise InvalidRequest(
            f"expected {SECRET_BYTES} random bytes in base64, as `openssl rand -base64 {SECRET_BYTES}` prints them",
            entry=where,
            field="secret",
        )
    if not any(data):
        raise InvalidRequest("a key of zeros is no key", entry=where, field="secret")
    return tenant, _Entry(key_id, data)


class KeySource:
    """The current key ring. If the source becomes invalid, that is logged as an error and the last valid ring stays in
    use: a typing mistake costs no hit and stores nothing under a wrong key.

    Args:
        read: Given the signature last seen, returns the text (`None`: nothing new to parse) and its signature.
        where: What errors call the source.
        look_s: How often `refresh` should be called.

    Raises:
        InvalidRequest: It is wrong at the start.
    """

    def __init__(self, read: Callable[[object], tuple[str | None, object]], where: str, look_s: float) -> None:
        self.look_s = look_s
        self.where = where
        self._read = read
        self._lock = threading.Lock()
        text, self._seen = read(None)
        assert text is not None
        self._ring = parse_keys(text, where)

    @property
    def ring(self) -> KeyRing:
        return self._ring

    def refresh(self) -> bool:
        """Read the source again if it may have changed; true if the ring is new. Blocks: not for the event loop."""
        with self._lock:
            try:
                text, seen = self._read(self._seen)
                if seen == self._seen:
                    return False
                self._seen = seen
                if text is None:
                    return False
                self._ring = parse_keys(text, self.where)
            except InvalidRequest as error:
                _log.error("the encryption keys stay as they were, what is there now cannot be used: %s", error)
                return False
        _log.info("encryption keys read again source=%s keys=%d", self.where, len(self._ring))
        return True


def open_key_source(value: str) -> KeySource:
    """The keys that the setting `encryption_keys` names: a path, or `command:` and what to run.

    Raises:
        InvalidRequest: The file cannot be read, or others may read it; the command failed; or a key is wrong.
    """
    if value.startswith(COMMAND_PREFIX):
        argv = _split(value.removeprefix(COMMAND_PREFIX))
        return KeySource(lambda _: _run(argv), f"the command {argv[0]}", _COMMAND_LOOK_S)
    path = Path(value)
    return KeySource(_FileReader(path).read, str(path), _FILE_LOOK_S)


class _FileReader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, seen: object) -> tuple[str | None, object]:
        """The text if the file has changed since it was seen. A failure is logged once."""
        signature = self._signature()
        if seen is not None and (signature or _GONE) == seen:
            return None, seen
        if seen is not None and signature is None:
            _log.error("the encryption keys stay as they were, the file is gone field=%s path=%s", _FIELD, self._path)
            return None, _GONE
        try:
            return self._text(), signature
        except InvalidRequest as error:
            if seen is None:
                raise
            _log.error("the encryption keys stay as they were, the file cannot be used: %s", error)
            return None, signature

    def _signature(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_mode

    def _text(self) -> str:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise InvalidRequest("others may read the keys: chmod 600 them", field=_FIELD, path=self._path)
                return file.read(_FILE_BYTES_MAX).decode()
        except OSError as error:
            raise InvalidRequest("cannot read the keys", field=_FIELD, path=self._path, error=error.strerror) from error
        except UnicodeDecodeError:
            raise InvalidRequest("the keys are not TOML", field=_FIELD, path=self._path) from None


def _split(command: str) -> list[str]:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise InvalidRequest("the command for the keys cannot be split into words", field=_FIELD) from error
    if not argv:
        raise InvalidRequest("expected a path, or command: and what to run", field=_FIELD)
    return argv


def _run(argv: Sequence[str]) -> tuple[str | None, object]:
    """A command's output, which no error may quote."""
    where = f"the command {argv[0]}"
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False)
    except OSError as error:
        raise InvalidRequest("cannot run the command", field=_FIELD, source=where, error=error.strerror) from error
    except subprocess.TimeoutExpired:
        raise InvalidRequest(f"no keys within {_COMMAND_S:.0f} s", field=_FIELD, source=where) from None
    if done.returncode != 0:
        raise InvalidRequest("the command failed", field=_FIELD, source=where, status=done.returncode)
    try:
        text = done.stdout[:_FILE_BYTES_MAX].decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the keys are not TOML", field=_FIELD, source=where) from None
    return text, hashlib.sha256(done.stdout).digest()
