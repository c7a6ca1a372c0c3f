"""Which stored bytes this release reads and writes. A migration starts from here; so does a refusal to start."""

from __future__ import annotations

from kvstore.format import header_v1, manifest, names

__all__ = ["MANIFEST_VERSIONS_READ", "NAME_ROOTS_READ", "RECORD_VERSIONS_READ", "RECORD_VERSION_WRITTEN"]

RECORD_VERSION_WRITTEN = header_v1.VERSION
RECORD_VERSIONS_READ = frozenset({header_v1.VERSION})
MANIFEST_VERSIONS_READ = frozenset({manifest.MANIFEST_VERSION})
NAME_ROOTS_READ = frozenset({names.ROOT})
