"""The bearer token, in a file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import InvalidRequest

__all__ = ["read_token"]

_TOKEN_BYTES_MAX = 4096


def read_token(path: Path) -> str:
    """The token in a file, without white space around it.

    Raises:
        InvalidRequest: It cannot be read, is empty, or others than its owner may read it.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise InvalidRequest("others may read the token: chmod 600 it", field="token_file", path=path)
            token = file.read(_TOKEN_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest("cannot read the token", field="token_file", path=path, error=reason) from error
    if not token:
        raise InvalidRequest("the token is empty", field="token_file", path=path)
    return token
