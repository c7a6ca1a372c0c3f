"""Manifests: a namespace's description, kept beside its records so that people and migrations can explain them.

Layout v1 (docs/formats/record-v1.md): a 48-byte head, the tenant in UTF-8, the canonical description, nothing more.
"""

from __future__ import annotations

import struct

import xxhash

from kvstore.errors import CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.model.keys import NamespaceId
from kvstore.model.namespace import NamespaceDescription

__all__ = ["MANIFEST_MAGIC", "MANIFEST_VERSION", "MAX_MANIFEST_BYTES", "pack_manifest", "parse_manifest"]

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
        description = NamespaceDescription.from_canonical(bytes(packed[tenant_stop:]), tenant)
    except (UnicodeDecodeError, InvalidRequest) as error:
        raise CorruptRecord("manifest does not hold a namespace description", error=error) from error
    if description.id != namespace or (expected is not None and expected != namespace):
        raise CorruptRecord("manifest of another namespace", expected=(expected or description.id).hex())
    return description
