"""The secrets of a service's settings and environment, and texts without them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import quote, urlsplit

from kvstore.runtime.files import read_regular
from kvstore.settings import TOKEN_VARIABLE, Settings
from kvstore.tiers.locations import RedisLocation, S3Location

_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", TOKEN_VARIABLE)
_TOKEN_BYTES_MAX = 4096
HIDDEN = "***"


def secrets_of(settings: Settings) -> list[str]:
    """Passwords of the tiers, the token of the data port, and the keys of S3; the longest first, so that no secret is
    hidden only in part because another one is contained in it.
    """
    hot, cold = settings.hot, settings.cold
    found = [hot.password] if isinstance(hot, RedisLocation) else []
    if isinstance(cold, S3Location) and cold.endpoint_url is not None:
        found.append(urlsplit(cold.endpoint_url).password)
    if settings.token_file is not None:
        with suppress(OSError):  # reported where the token is needed
            found.append(read_regular(settings.token_file, _TOKEN_BYTES_MAX).decode(errors="replace").strip())
    found += [os.getenv(name) for name in _VARIABLES]
    spellings = {spelled for secret in found if secret for spelled in _spellings(secret)}
    return sorted(spellings, key=len, reverse=True)


def _spellings(secret: str) -> tuple[str, ...]:
    """A secret as it is, in a url, and quoted by Python and JSON."""
    return secret, quote(secret, safe=""), quote(secret), repr(secret)[1:-1], json.dumps(secret)[1:-1]


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """A text with each secret hidden."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text
