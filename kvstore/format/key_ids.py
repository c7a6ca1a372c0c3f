"""The list of key ids that a tenant's records were written with, kept beside the records: see docs/encryption.md."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from kvstore.errors import CorruptRecord, UnsupportedFormat
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId

__all__ = ["key_ids_place", "pack_key_ids", "parse_key_ids"]

_FORMAT = 1
_CHECK = re.compile("[0-9a-f]{16}")
_IDS_MAX = 4096


def key_ids_place(tenant: str) -> NamespaceId:
    """Where the list is stored: as the manifest of a namespace that has no records."""
    return NamespaceId(hashlib.sha256(b"kvstore key ids v1\0" + tenant.encode()).digest()[:NAMESPACE_BYTES])


def pack_key_ids(checks: Mapping[int, bytes]) -> bytes:
    """The list as bytes: JSON with the check value of each key id."""
    keys = {str(key_id): check.hex() for key_id, check in sorted(checks.items())}
    return json.dumps({"kvstore_key_ids": _FORMAT, "keys": keys}).encode()


def parse_key_ids(data: bytes) -> dict[int, bytes]:
    """The inverse of `pack_key_ids`.

    Raises:
        CorruptRecord: Not such a list.
        UnsupportedFormat: It was written by a newer release.
    """
    try:
        content = json.loads(data)
    except ValueError as error:
        raise CorruptRecord("the note of key ids is not JSON") from error
    if not isinstance(content, dict) or not isinstance(content.get("kvstore_key_ids"), int):
        raise CorruptRecord("not a note of key ids")
    if content["kvstore_key_ids"] != _FORMAT:
        raise UnsupportedFormat(
            "the note of key ids has an unknown version", expected=_FORMAT, seen=content["kvstore_key_ids"]
        )
    keys = content.get("keys")
    if not isinstance(keys, dict) or len(keys) > _IDS_MAX:
        raise CorruptRecord("the note of key ids has no keys")
    checks = {}
    for name, check in keys.items():
        if not name.isdecimal() or not isinstance(check, str) or not _CHECK.fullmatch(check):
            raise CorruptRecord("the note of key ids has a wrong entry", seen=name[:32])
        checks[int(name)] = bytes.fromhex(check)
    return checks
