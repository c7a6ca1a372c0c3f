"""The credentials file: whose each token is and what it may do. It holds digests of tokens, never a token."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from kvstore.errors import InvalidRequest
from kvstore.runtime.toml_tables import TableEntry, parse_tables
from kvstore.runtime.watched_file import Watched, read_guarded, state_of

__all__ = ["ALL_TENANTS", "Credentials", "CredentialsFile", "Grant", "Scope", "read_credentials"]

ALL_TENANTS = "*"
"""The tenant of an operator's token, as the file spells it."""

_log = logging.getLogger(__name__)

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
    """The credentials of a file that is read again when it changes: tokens come and go without a restart.

    See `Watched` for when a change counts. The server polls `file` every second.

    Attributes:
        file: The file and the credentials in force.

    Raises:
        InvalidRequest: The file is invalid at the start.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = Watched("credentials", partial(state_of, path), partial(_load, path))

    @property
    def num_tokens(self) -> int:
        return self.file.value.num_tokens

    def grant_of(self, token: str) -> Grant | None:
        """As `Credentials.grant_of`, with the content in force."""
        return self.file.value.grant_of(token)

    def holds(self, grant: Grant) -> bool:
        return self.file.value.holds(grant)


class _Entry(TableEntry):
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
        grant = Grant(tenant, scopes, _name_of(entry.token_sha256, entry.tenant))
        if grants.setdefault(entry.token_sha256, grant) != grant:
            raise InvalidRequest(
                f"invalid {what}: one token cannot have two tenants or two lists of scopes",
                entry=f"credential {number} of {path}",
            )
    return Credentials(grants)


def _load(path: Path) -> Credentials:
    credentials = read_credentials(path)
    if not credentials.num_tokens:
        _log.warning(
            "the credentials file has no entry, so no token is accepted: add a [[credential]] table path=%s", path
        )
    return credentials


def _name_of(digest: str, tenant: str) -> str:
    """The first digits tell a tenant's tokens apart, and do not help a reader of the log to guess a token."""
    return f"{tenant}/{digest[:8]}"
