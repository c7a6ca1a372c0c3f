"""Tokens of tenants that stay the same while a service runs."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from kvstore.runtime.watched_file import Watched
from kvstore.service.authentication import Credentials, Grant


def credentials_of(grants: Mapping[str, Grant]) -> Watched[Credentials]:
    """Credentials that never change.

    Args:
        grants: By token.
    """
    credentials = Credentials({sha256(token.encode()).hexdigest(): grant for token, grant in grants.items()})
    return Watched("credentials", lambda: None, lambda: credentials)
