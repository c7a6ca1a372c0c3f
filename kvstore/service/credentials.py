"""Whose token is whose: the credentials file, which holds digests of tokens and never a token."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest

__all__ = ["Credentials", "read_credentials"]

_SHA256_HEX = re.compile("[0-9a-f]{64}")
_TENANT = re.compile(r"[!-~]{1,128}")
_FIELDS = ("tenant", "token_sha256")
_FILE_BYTES_MAX = 16 << 20


class Credentials:
    """Tells tenants by their tokens.

    Args:
        tenants: By the SHA-256 of a token, in hex, the tenant that shows it. A tenant may have several tokens.
    """

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        self._tenants = dict(tenants or {})

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, token: str) -> str | None:
        """The tenant of a token, or `None` for a token that is nobody's.

        Takes as long for a token that is nearly right as for any other: digests are compared, not tokens.
        """
        return self._tenants.get(hashlib.sha256(token.encode()).hexdigest())


def read_credentials(path: Path) -> Credentials:
    """Read a TOML file of `[[credential]]` tables, each with `tenant` and `token_sha256`.

    Raises:
        InvalidRequest: It cannot be read, others than its owner may write it, or an entry is wrong; the message names
            the entry and the field.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o022:
                raise InvalidRequest(
                    "others may write the credentials: chmod go-w them", field="credentials_file", path=path
                )
            content = tomllib.loads(file.read(_FILE_BYTES_MAX).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest("cannot read the credentials", field="credentials_file", path=path, error=error) from error
    unknown = [name for name in content if name != "credential"]
    entries = content.get("credential", [])
    if unknown or not isinstance(entries, list):
        seen = ", ".join(unknown) or type(entries).__name__
        raise InvalidRequest("expected [[credential]] tables and nothing else", path=path, seen=seen)
    tenants: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        digest, tenant = _read_entry(entry, f"credential {number} of {path}")
        if tenants.setdefault(digest, tenant) != tenant:
            raise InvalidRequest("one token cannot be two tenants", entry=f"credential {number} of {path}")
    return Credentials(tenants)


def _read_entry(entry: Any, where: str) -> tuple[str, str]:
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
    return digest, tenant
