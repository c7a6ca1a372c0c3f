"""Who a peer is and what it may do: by its token, and on a Unix socket also by its user."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.clock import SYSTEM_CLOCK, Clock
from kvstore.runtime.toml_tables import TableEntry, parse_tables
from kvstore.runtime.watched_file import Watched, read_guarded, state_of
from kvstore.service.limits import source_of
from kvstore.wire.protocol import FrameConnection

ALL_TENANTS = "*"
"""The tenant of an operator's token, as the file spells it."""

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 16 << 20
_TOKEN_BYTES_MAX = 4096
_FAILURES_MAX = 10
_WINDOW_S = 60.0
"""Begins with the first failure."""

NO_TENANT = ""
"""The tenant of peers that are admitted without a token of a tenant."""


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
    """What the holder of a token may do.

    Attributes:
        tenant: The holder's tenant; `None`: an operator, for all tenants.
        scopes: What the holder may do; `READ` is always among them.
        name: What logs call the holder; it does not help to guess the token.
        token_sha256: Of the token, in hex; empty: the grant is in no credentials file.
    """

    tenant: str | None
    scopes: frozenset[Scope] = frozenset({Scope.READ, Scope.SAVE})
    name: str = ""
    token_sha256: str = field(default="", repr=False)

    def sees(self, tenant: str) -> bool:
        """Whether it may see what belongs to a tenant."""
        return self.tenant is None or self.tenant == tenant


class Credentials:
    """Maps tokens to grants. Without an entry it admits no token. `None` instead means that there are no credentials at
    all; so that the two cannot be confused, this has no length and is never false.

    A file holds the SHA-256 of each token, without salt and stretching: these protect passwords that people make up,
    but a token is 32 random bytes, which no search finds.

    Args:
        grants: By the SHA-256 of a token, in hex. A tenant may have several.
    """

    def __init__(self, grants: Mapping[str, Grant]) -> None:
        # keyed with a secret, so that the time of a look-up reveals nothing about a digest
        self._key = secrets.token_bytes(32)  # not a seeded generator: with its seed look-ups could be timed again
        self._grants = {self._name(digest): replace(grant, token_sha256=digest) for digest, grant in grants.items()}

    @property
    def num_tokens(self) -> int:
        """How many tokens are valid."""
        return len(self._grants)

    def has_tenant(self, tenant: str) -> bool:
        """Whether a token is of this tenant."""
        return any(grant.tenant == tenant for grant in self._grants.values())

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


class _Entry(TableEntry):
    """A `[[credential]]` table as it is written."""

    tenant: str = Field(pattern=r"^[!-~]{1,128}$", description="1 to 128 printable ASCII characters without a space")
    # the value is not shown: an operator may have written the token itself
    token_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False, description="64 lower-case hex digits")
    scopes: list[Literal["read", "save", "admin"]] = Field(
        ["read", "save"], min_length=1, description="a list of read, save, admin"
    )


def read_credentials(path: Path) -> Credentials:
    """Read a TOML file of `[[credential]]` tables, each with `tenant`, `token_sha256` and optionally `scopes`.

    Raises:
        InvalidRequest: The file cannot be read, other users may write it, or an entry is wrong; the message names the
            entry and the field.
    """
    what = "credentials file"
    content = read_guarded(path, what=what, field="credentials_file", mode_bits=0o022, bytes_max=_FILE_BYTES_MAX)
    grants: dict[str, Grant] = {}
    entries = parse_tables(content, _Entry, table="credential", what=what, source=path)
    for number, entry in enumerate(entries, 1):
        tenant = None if entry.tenant == ALL_TENANTS else entry.tenant
        scopes = frozenset({Scope.READ, *map(Scope, entry.scopes)})
        # the first digits tell a tenant's tokens apart, and do not help a reader of the log to guess a token
        grant = Grant(tenant, scopes, f"{entry.tenant}/{entry.token_sha256[:8]}")
        if grants.setdefault(entry.token_sha256, grant) != grant:
            raise InvalidRequest(
                f"invalid {what}: one token cannot have two tenants or two lists of scopes",
                entry=f"credential {number} of {path}",
            )
    return Credentials(grants)


def watch_credentials(path: Path) -> Watched[Credentials]:
    """The credentials of a file that is read again when it changes: tokens come and go without a restart.

    See `Watched` for when a change counts. The server polls it every second.

    Raises:
        InvalidRequest: The file is invalid at the start.
    """
    return Watched("credentials", partial(state_of, path), partial(_load, path))


def _load(path: Path) -> Credentials:
    credentials = read_credentials(path)
    if not credentials.num_tokens:
        _log.warning(
            "the credentials file has no entry, so no token is accepted: add a [[credential]] table path=%s", path
        )
    return credentials


def read_token(path: Path) -> str:
    """The token in a file, without white space around it.

    Raises:
        InvalidRequest: It cannot be read, is empty, or other users may read it.
    """
    given = {"field": "token_file", "path": path}
    content = read_guarded(path, what="token", field="token_file", mode_bits=0o077, bytes_max=_TOKEN_BYTES_MAX)
    try:
        token = content.decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidRequest("the token is not UTF-8", **given) from error
    if not token:
        raise InvalidRequest("the token file is empty", **given)
    return token


class FailureLimit:
    """Counts wrong tokens by address, of IPv6 by network of 64 bits. After too many in a window, further ones of that
    address are refused until the window ends. A right token is always admitted.

    This bounds the log. It does not stop guessing, and need not: a token is 32 random bytes, so 10^9 guesses a second
    need 10^60 years. If it refused right tokens too, one client could lock out all others at its address or proxy.

    Args:
        addresses_max: Addresses to remember; beyond, those that failed least recently are forgotten.
    """

    def __init__(self, *, addresses_max: int = 4096, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._counts = Latest[str, tuple[float, int]](addresses_max)

    def wait_s(self, address: str) -> int:
        """Whole seconds that an address has to wait; 0: it need not."""
        started_s, count = self._counts.get(source_of(address), (float("-inf"), 0))
        left_s = started_s + _WINDOW_S - self._clock.monotonic_s()
        return math.ceil(left_s) if count >= _FAILURES_MAX and left_s > 0 else 0

    def failed(self, address: str) -> None:
        """Count a wrong token of an address."""
        source, now_s = source_of(address), self._clock.monotonic_s()
        started_s, count = self._counts.get(source, (float("-inf"), 0))
        if now_s - started_s >= _WINDOW_S:
            started_s, count = now_s, 0
        self._counts[source] = (started_s, count + 1)


_WITHOUT_TENANT = Grant(NO_TENANT)
_PEER_CREDENTIALS = struct.Struct("3i")


class Authenticator:
    """Checks a peer once, at its hello.

    Args:
        token: Admits a TCP peer without a tenant.
        credentials: Tokens of tenants; without an entry they admit no peer. `None`: there are none. With neither these
            nor a token, every TCP peer is admitted: `serve_settings` refuses to start like that.
    """

    def __init__(self, token: str = "", credentials: Watched[Credentials] | None = None) -> None:
        self._token = token.encode()
        self._credentials = credentials
        self._failures = FailureLimit()

    def check(self, connection: FrameConnection, token: str) -> Grant:
        """The peer's tenant, and what it may do.

        Raises:
            InvalidRequest: Another user's process on the Unix socket, or an unknown token; on TCP also a missing one.
            Unavailable: Too many wrong tokens came from this address within a minute.
        """
        sock = connection.extra("socket")
        is_local = getattr(sock, "family", None) == socket.AF_UNIX
        if is_local:
            _, user, _ = _PEER_CREDENTIALS.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)  # type: ignore[attr-defined]
            )
            if user not in (0, os.geteuid()):
                raise InvalidRequest("this Unix socket serves its own user only", expected=os.geteuid(), seen=user)
        grant = self._grant_of(token)
        if grant is None and self._needs_none(token, is_local=is_local):
            return _WITHOUT_TENANT
        if not is_local:
            self._limit(_host(connection.extra("peername")), token, grant)
        if grant is None:
            what = "wrong" if token else "missing"
            raise InvalidRequest(f"the token is {what}: name a token of this service in token_file", field="token")
        return grant

    def still_admits(self, grant: Grant) -> bool:
        """Whether a peer that was admitted with a grant may stay."""
        return self._credentials is None or self._credentials.value.holds(grant)

    def _needs_none(self, token: str, *, is_local: bool) -> bool:
        """Whether a peer is admitted without the token of a tenant."""
        if self._credentials is not None:
            return is_local and not token
        return is_local or not self._token

    def _grant_of(self, token: str) -> Grant | None:
        if not token:
            return None
        if self._credentials is not None and (grant := self._credentials.value.grant_of(token)) is not None:
            return grant
        is_shared = bool(self._token) and hmac.compare_digest(self._token, token.encode())
        return _WITHOUT_TENANT if is_shared else None

    def _limit(self, address: str, token: str, grant: Grant | None) -> None:
        """Count wrong tokens, and refuse what comes without a right one after too many."""
        if grant is not None:  # also while the address waits: see `FailureLimit`
            return
        if wait_s := self._failures.wait_s(address):
            raise Unavailable("too many wrong tokens from this address: wait", seconds=wait_s)
        if token:
            self._failures.failed(address)
            _log.warning("a peer sent a wrong token to the data port peer=%s", address)


def _host(peer: object) -> str:
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
