"""Manifests: a namespace's description, stored beside its records so that operators and migrations can explain them.

Layout v1 (docs/formats/record-v1.md): a 48-byte head, the tenant in UTF-8, the canonical description, nothing more.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping

import xxhash

from kvstore.errors import CorruptRecord, InvalidRequest, Unavailable, UnsupportedFormat
from kvstore.format.names import manifest_name
from kvstore.model.keys import NAMESPACE_BYTES, NamespaceId
from kvstore.model.namespace import NamespaceDescription

MANIFEST_MAGIC = b"KVM1"
MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 2 << 20
"""No manifest is larger; a length from outside is checked against this before memory is allocated."""

_HEAD = struct.Struct("<4sHH16s16sII")
_CHECKSUM_AT = slice(8, 24)
_ZERO_CHECKSUM = bytes(16)
_TENANT_BYTES_MAX = 1024


def pack_manifest(description: NamespaceDescription) -> bytes:
    """The manifest's bytes; equal descriptions make equal bytes.

    Raises:
        InvalidRequest: The tenant is over 1 KiB in UTF-8, or not valid Unicode.
    """
    try:
        tenant = description.tenant.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("a tenant must be valid unicode") from error
    if len(tenant) > _TENANT_BYTES_MAX:
        raise InvalidRequest(f"a tenant has at most {_TENANT_BYTES_MAX} bytes", seen=len(tenant))
    packed = bytearray(
        _HEAD.pack(
            MANIFEST_MAGIC, MANIFEST_VERSION, _HEAD.size, _ZERO_CHECKSUM, description.id,
            len(tenant), len(description.canonical),
        )
        + tenant
        + description.canonical
    )  # fmt: skip
    packed[_CHECKSUM_AT] = xxhash.xxh3_128_digest(packed)
    return bytes(packed)


def parse_manifest(data: bytes | bytearray | memoryview, expected: NamespaceId | None = None) -> NamespaceDescription:
    """The inverse of `pack_manifest`.

    Args:
        data: All bytes of the manifest.
        expected: The namespace under whose name it was stored.

    Raises:
        CorruptRecord: Truncated, too long, damaged, or the manifest of another namespace than expected.
        UnsupportedFormat: An intact manifest of another version.
    """
    if not _HEAD.size <= len(data) <= MAX_MANIFEST_BYTES:
        raise CorruptRecord("manifest has an impossible size", seen=len(data))
    packed = bytearray(data)
    magic, version, head_bytes, checksum, namespace, tenant_bytes, description_bytes = _HEAD.unpack_from(packed)
    if magic != MANIFEST_MAGIC:
        raise CorruptRecord("manifest does not start with its magic", expected=MANIFEST_MAGIC, seen=magic)
    packed[_CHECKSUM_AT] = _ZERO_CHECKSUM
    if xxhash.xxh3_128_digest(packed) != checksum:
        raise CorruptRecord("manifest checksum does not match", seen=checksum.hex())
    if version != MANIFEST_VERSION or head_bytes != _HEAD.size:
        raise UnsupportedFormat("manifest has an unknown version", expected=MANIFEST_VERSION, seen=version)
    if _HEAD.size + tenant_bytes + description_bytes != len(packed):
        raise CorruptRecord("manifest has the wrong size", seen=len(packed))
    tenant_stop = _HEAD.size + tenant_bytes
    try:
        tenant = packed[_HEAD.size : tenant_stop].decode()
        description = NamespaceDescription.from_canonical(bytes(packed[tenant_stop:]), tenant, is_stored=True)
    except (UnicodeDecodeError, InvalidRequest) as error:
        raise CorruptRecord("manifest does not hold a namespace description", error=error) from error
    if description.id != namespace or (expected is not None and expected != namespace):
        raise CorruptRecord("manifest of another namespace", expected=(expected or description.id).hex())
    return description


STORE_VERSION = 1
"""The version of a tier's content as a whole. A migration step that older releases must not write to afterwards stores
a higher one in the tier."""

STORE_VERSION_PLACE = NamespaceId(hashlib.sha256(b"kvstore store version\0").digest()[:NAMESPACE_BYTES])
"""The version is stored as the manifest of this namespace; a tier without it has version 1."""


def check_store_version(note: bytes | None, tier: str) -> None:
    """Refuse a tier that a newer release has migrated.

    Args:
        note: The note stored at `STORE_VERSION_PLACE`; `None`: there is none.

    Raises:
        UnsupportedFormat: Its version is newer, or the note has a form that this release does not know.
        Unavailable: The note is damaged, so it is not known whether this release may write there.
    """
    if note is None:
        return
    try:
        content = json.loads(bytes(note))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Unavailable(
            "the version of the tier cannot be read, so nothing is written to it: if no newer release has used it, "
            "remove the damaged note",
            tier=tier,
            note=manifest_name(STORE_VERSION_PLACE),
            seen=bytes(note[:40]),
        )
    version = content.get("kvstore_store_version", "unreadable")
    if not isinstance(version, int) or not 1 <= version <= STORE_VERSION:
        raise UnsupportedFormat(
            "the tier was migrated by a newer release, so nothing is written to it: upgrade this release, or run "
            "`kvstore migrate status`",
            tier=tier,
            expected=STORE_VERSION,
            seen=version,
        )


_FORMAT = 1
_ID = re.compile("[0-9]{1,10}")
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
    except (ValueError, RecursionError) as error:
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
        if not _ID.fullmatch(name) or not isinstance(check, str) or not _CHECK.fullmatch(check):
            raise CorruptRecord("the note of key ids has a wrong entry", seen=name[:32])
        checks[int(name)] = bytes.fromhex(check)
    return checks
