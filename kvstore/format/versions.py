"""Which stored bytes this release reads and writes. A migration starts from here; so does a refusal to start."""

from __future__ import annotations

import hashlib
import json

from kvstore.errors import UnsupportedFormat
from kvstore.format import header_v1, manifest, names
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId

__all__ = [
    "MANIFEST_VERSIONS_READ",
    "NAME_ROOTS_READ",
    "RECORD_VERSIONS_READ",
    "RECORD_VERSION_WRITTEN",
    "STORE_VERSION",
    "STORE_VERSION_PLACE",
    "check_store_version",
    "pack_store_version",
]

RECORD_VERSION_WRITTEN = header_v1.VERSION
RECORD_VERSIONS_READ = frozenset({header_v1.VERSION})
MANIFEST_VERSIONS_READ = frozenset({manifest.MANIFEST_VERSION})
NAME_ROOTS_READ = frozenset({names.ROOT})

STORE_VERSION = 1
"""Of what a tier holds as a whole. A step that older releases must not write beside notes a higher one in the tier."""

STORE_VERSION_PLACE = NamespaceId(hashlib.sha256(b"kvstore store version\0").digest()[:NAMESPACE_BYTES])
"""The note stands where the manifest of this namespace would; where there is none, the version is 1."""


def pack_store_version(version: int) -> bytes:
    """The note's bytes."""
    return json.dumps({"kvstore_store_version": version}).encode()


def check_store_version(note: bytes | None, tier: str) -> None:
    """Refuse a tier that a newer release has taken further than this one knows.

    Args:
        note: What stands at `STORE_VERSION_PLACE`.
        tier: Name of the tier.

    Raises:
        UnsupportedFormat: It is newer, or the note is nothing that this release knows.
    """
    if note is None:
        return
    try:
        version = json.loads(bytes(note))["kvstore_store_version"]
    except (ValueError, KeyError, TypeError):
        version = "unreadable"
    if not isinstance(version, int) or not 1 <= version <= STORE_VERSION:
        raise UnsupportedFormat(
            "the tier was migrated by a newer release, nothing is written to it: upgrade this one, or look at it by "
            "`kvstore migrate status`",
            tier=tier,
            expected=STORE_VERSION,
            seen=version,
        )
