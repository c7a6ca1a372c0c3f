"""The version of a store, and the check that this release may write to it."""

from __future__ import annotations

import hashlib
import json

from kvstore.errors import Unavailable, UnsupportedFormat
from kvstore.format.names import manifest_name
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId

__all__ = ["STORE_VERSION", "STORE_VERSION_PLACE", "check_store_version", "pack_store_version"]

STORE_VERSION = 1
"""The version of a tier's content as a whole. A migration step that older releases must not write to afterwards stores
a higher one in the tier."""

STORE_VERSION_PLACE = NamespaceId(hashlib.sha256(b"kvstore store version\0").digest()[:NAMESPACE_BYTES])
"""The version is stored as the manifest of this namespace; a tier without it has version 1."""


def pack_store_version(version: int) -> bytes:
    """The version as bytes to store."""
    return json.dumps({"kvstore_store_version": version}).encode()


def check_store_version(note: bytes | None, tier: str) -> None:
    """Refuse a tier that a newer release has migrated.

    Args:
        note: What is stored at `STORE_VERSION_PLACE`; `None`: nothing.
        tier: Name of the tier.

    Raises:
        UnsupportedFormat: Its version is newer, or is told in a form that this release does not know.
        Unavailable: It is damaged, so that nobody can tell whether this release may write there.
    """
    if note is None:
        return
    try:
        told = json.loads(bytes(note))
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise Unavailable(
            "the version of the tier cannot be read, so nothing is written to it: if no newer release has used it, "
            "remove the damaged note",
            tier=tier,
            note=manifest_name(STORE_VERSION_PLACE),
            seen=bytes(note[:40]),
        )
    version = told.get("kvstore_store_version", "unreadable")
    if not isinstance(version, int) or not 1 <= version <= STORE_VERSION:
        raise UnsupportedFormat(
            "the tier was migrated by a newer release, nothing is written to it: upgrade this one, or look at it by "
            "`kvstore migrate status`",
            tier=tier,
            expected=STORE_VERSION,
            seen=version,
        )
