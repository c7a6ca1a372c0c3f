"""Key files for tests: secrets that depend on a number alone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from kvstore.format.encrypted import TenantKey


def secret_of(number: int) -> bytes:
    """32 bytes."""
    return hashlib.sha256(f"secret {number}".encode()).digest()


def tenant_key(number: int, tenant: str = "") -> TenantKey:
    """The key with this id whose secret has this number."""
    return TenantKey(number, secret_of(number), tenant)


def write_keys(path: Path, keys: Sequence[tuple[str, int, int]]) -> Path:
    """A key file with an entry for each (tenant, id, number of the secret); of id 0 the number is ignored."""
    text = ""
    for tenant, key_id, number in keys:
        text += f'[[key]]\ntenant = "{tenant}"\nid = {key_id}\n'
        if key_id:
            text += f'secret = "{base64.b64encode(secret_of(number)).decode()}"\n'
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)
    return path
