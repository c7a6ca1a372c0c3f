"""The credentials file: whose each token is and what it may do. It holds digests of tokens, never a token."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest

__all__ = ["ALL_TENANTS", "Credentials", "CredentialsFile", "Grant", "Scope", "read_credentials"]

ALL_TENANTS = "*"
"""The tenant of an operator's token, as the file spells it."""

_log = logging.getLogger(__name__)

_SHA256_HEX = re.compile("[0-9a-f]{64}")
_TENANT = re.compile(r"[!-~]{1,128}")
_FIELDS = ("tenant", "token_sha256", "scopes")
_FILE_BYTES_MAX = 16 << 20


class Scope(Enum):
    """What a token may be used for. `save` and `admin` include `read`, neither includes the other."""

    READ = "read"
    """Look up and load; on the admin port: view."""
    SAVE = "save"
    """Save and discard."""
    ADMIN = "admin"
    """Pin and delete, on the admin port."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token is good for.

    Attributes:
        tenant: Whose it is; `None`: an operator's, for all tenants.
        scopes: What it may do; `READ` is always among them.
        name: What logs call its holder; of no help in guessing the token.
        token_sha256: Of the token, in hex; empty: the grant stands in no credentials file.
    """

    tenant: str | None
    scopes: frozenset[Scope] = frozenset({Scope.READ, Scope.SAVE})
    name: str = ""
    token_sha256: str = field(default="", repr=False)

    def sees(self, tenant: str) -> bool:
        """Whether it may see what belongs to a tenant."""
        return self.tenant is None or self.tenant == tenant


class Credentials:
    """Maps tokens to grants. Without any entry it admits nobody. `None` says that there are no credentials at all;
    so that the two cannot be confused, this has no length and is never false.

    The file holds the SHA-256 of the tokens, without salt and stretching: these protect passwords that people make up,
    whereas a token is 32 random bytes, which no search will find.

    Args:
        grants: By the SHA-256 of a token, in hex, its grant, or just its tenant. A tenant may have several.
    """

    def __init__(self, grants: Mapping[str, Grant | str] | None = None) -> None:
        # keyed with a secret, so that the time of a look-up reveals nothing about a digest
        self._key = secrets.token_bytes(32)  # not a seeded generator: with its seed look-ups could be timed again
        self._grants: dict[bytes, Grant] = {}
        for digest, given in (grants or {}).items():
            grant = given if isinstance(given, Grant) else Grant(given, name=_name_of(digest, given))
            self._grants[self._name(digest)] = replace(grant, token_sha256=digest)

    @property
    def num_tokens(self) -> int:
        """How many tokens are good for something."""
        return len(self._grants)

    def holds(self, grant: Grant) -> bool:
        """Whether a grant that was given earlier is still in force, unchanged. One from no file always is."""
        return not grant.token_sha256 or self._grants.get(self._name(grant.token_sha256)) == grant

    def grant_of(self, token: str) -> Grant | None:
        """The grant of a token; `None`: the token is unknown.

        Takes as long for a token that is nearly right as for any other.
        """
        return self._grants.get(self._name(hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()))

    def _name(self, digest: str) -> bytes:
        return hmac.digest(self._key, digest.encode(), "sha256")


class CredentialsFile(Credentials):
    """The credentials of a file, looked at again and again: tokens come and go without a restart.

    A change takes effect once two looks in a row, which the owner makes a second apart, have found the file unchanged
    since. A file that is rewritten in place is for an instant empty or half written, and what stands in it then would
    end every peer. A file that stays empty admits nobody.

    If the file becomes invalid or disappears, that is logged as an error, once, and what was read before stays in
    force: a typing mistake locks nobody out. A token revoked in an invalid file is revoked once the file is valid
    again. Safe from any thread.

    Attributes:
        num_read: How often the file was read and accepted.
        num_refused: How often it was invalid.

    Raises:
        InvalidRequest: It is invalid at the start.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._lock = threading.Lock()
        self._seen = _signature(path)
        self._pending: tuple[int, ...] | str = ""
        self._current = read_credentials(path)
        self.num_read, self.num_refused = 1, 0
        self._warn_if_empty()

    @property
    def num_tokens(self) -> int:
        return self._current.num_tokens

    def grant_of(self, token: str) -> Grant | None:
        """As `Credentials.grant_of`, with the content in force."""
        return self._current.grant_of(token)

    def holds(self, grant: Grant) -> bool:
        return self._current.holds(grant)

    def look(self) -> bool:
        """Look whether the file has changed; returns whether other credentials are in force from now on.

        Reads the file: call it in a thread. It takes milliseconds for some hundred tokens, seconds for 16 MiB.
        """
        with self._lock:
            signature = _signature(self._path)
            if signature == self._seen or signature != self._pending:
                self._pending = signature
                return False
            content = _content(self._path)
            if _signature(self._path) != signature:
                return False
            self._seen = signature
            return self._take(content)

    def _take(self, content: _Content) -> bool:
        try:
            self._current = _parse(content, self._path)
        except InvalidRequest as error:
            self.num_refused += 1
            _log.error(
                "the credentials file cannot be used, those read before stay in force: correct it, it is read again "
                "when it changes: %s",
                error,
            )
            return False
        self.num_read += 1
        _log.info("credentials read again path=%s tokens=%d", self._path, self._current.num_tokens)
        self._warn_if_empty()
        return True

    def _warn_if_empty(self) -> None:
        if not self._current.num_tokens:
            _log.warning(
                "the credentials file has no entry, so nobody is admitted by a token: add a [[credential]] path=%s",
                self._path,
            )


def _signature(path: Path) -> tuple[int, ...] | str:
    """What changes with the file; a text: why it cannot be looked at."""
    try:
        stat = path.stat()
    except OSError as error:
        return error.strerror or str(error)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_mode


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file held when it was read.

    Attributes:
        data: Its bytes.
        mode: Its permission bits.
        error: Why it could not be read; empty: it could.
    """

    data: bytes = b""
    mode: int = 0
    error: str = ""


def _content(path: Path) -> _Content:
    try:
        with path.open("rb") as file:
            return _Content(file.read(_FILE_BYTES_MAX), os.fstat(file.fileno()).st_mode & 0o777)
    except OSError as error:
        return _Content(error=error.strerror or str(error))


def read_credentials(path: Path) -> Credentials:
    """Read a TOML file of `[[credential]]` tables, each with `tenant`, `token_sha256` and optionally `scopes`.

    Raises:
        InvalidRequest: It cannot be read, others than its owner may write it, or an entry is wrong; the message names
            the entry and the field.
    """
    return _parse(_content(path), path)


def _parse(content: _Content, path: Path) -> Credentials:
    if content.error:
        raise InvalidRequest("cannot read the credentials", field="credentials_file", path=path, error=content.error)
    if content.mode & 0o022:
        raise InvalidRequest("others may write the credentials: chmod go-w them", field="credentials_file", path=path)
    try:
        parsed = tomllib.loads(content.data.decode())
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise InvalidRequest("cannot read the credentials", field="credentials_file", path=path, error=error) from error
    unknown = [name for name in parsed if name != "credential"]
    entries = parsed.get("credential", [])
    if unknown or not isinstance(entries, list):
        seen = ", ".join(unknown) or type(entries).__name__
        raise InvalidRequest("expected [[credential]] tables and nothing else", path=path, seen=seen)
    grants: dict[str, Grant] = {}
    for number, entry in enumerate(entries, 1):
        digest, grant = _read_entry(entry, f"credential {number} of {path}")
        if grants.setdefault(digest, grant) != grant:
            raise InvalidRequest(
                "one token cannot be two tenants, or have two lists of scopes", entry=f"credential {number} of {path}"
            )
    return Credentials(grants)


def _read_entry(entry: Any, where: str) -> tuple[str, Grant]:
    if not isinstance(entry, dict):
        raise InvalidRequest("expected a table", entry=where)
    for name in entry:
        if name not in _FIELDS:
            raise InvalidRequest(f"unknown field, known are {', '.join(_FIELDS)}", entry=where, field=name)
    digest, tenant = entry.get("token_sha256"), entry.get("tenant")
    if not isinstance(digest, str) or not _SHA256_HEX.fullmatch(digest):
        # without what was seen: it might be the token itself
        raise InvalidRequest("expected 64 lower-case hex digits", entry=where, field="token_sha256")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise InvalidRequest("expected 1 to 128 printable ASCII characters, no space", entry=where, field="tenant")
    scopes = _read_scopes(entry.get("scopes", [Scope.READ.value, Scope.SAVE.value]), where)
    return digest, Grant(None if tenant == ALL_TENANTS else tenant, scopes, _name_of(digest, tenant))


def _read_scopes(given: Any, where: str) -> frozenset[Scope]:
    known = [scope.value for scope in Scope]
    if not isinstance(given, list) or not given or not all(one in known for one in given):
        raise InvalidRequest(f"expected a list of {', '.join(known)}", entry=where, field="scopes", seen=given)
    return frozenset({Scope.READ, *map(Scope, given)})


def _name_of(digest: str, tenant: str) -> str:
    """The first digits tell a tenant's tokens apart, and are of no use to a reader of the log."""
    return f"{tenant}/{digest[:8]}"
