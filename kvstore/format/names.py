"""Formats and parses names: `v1/<namespace>/<first 2 hex of prefix>/{<prefix>}.g<group>.s<slice>`.

The braces are the Redis Cluster hash tag: the records of one boundary share a slot, the boundaries are spread over all.
Indexes store a key in 52 bytes instead of its name: namespace, prefix, group, slice.
"""

from __future__ import annotations

import re
import struct

from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey

ROOT = "v1"
_NAME = re.compile(
    r"v1/(?P<namespace>[0-9a-f]{32})/(?P<fan>[0-9a-f]{2})/\{(?P<prefix>[0-9a-f]{64})\}"
    r"\.g(?P<group>0|[1-9][0-9]{0,4})\.s(?P<slice>0|[1-9][0-9]{0,4})"
)

_KEY = struct.Struct(f"<{NAMESPACE_BYTES}s{PREFIX_BYTES}sHH")
PACKED_KEY_BYTES = _KEY.size


def namespace_root(namespace: NamespaceId) -> str:
    """The start of all names of a namespace, including the slash."""
    return f"{ROOT}/{namespace.hex()}/"


def manifest_name(namespace: NamespaceId) -> str:
    """The name of a namespace's manifest."""
    return f"{namespace_root(namespace)}manifest"


def format_name(key: RecordKey) -> str:
    """The name of a record in every tier."""
    prefix = key.prefix.hex()
    return f"{namespace_root(key.namespace)}{prefix[:2]}/{{{prefix}}}.g{key.group}.s{key.slice}"


def stripe_name(key: RecordKey, payload_checksum: bytes, index: int) -> str:
    """The name of one stripe of a record's payload, in a tier that needs stripes; `parse_name` refuses it."""
    return f"{format_name(key)}.{payload_checksum.hex()}.{index}"


def parse_name(name: str) -> RecordKey:
    """The inverse of `format_name`.

    Raises:
        InvalidRequest: Not a name that `format_name` writes.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["fan"] != match["prefix"][:2]:
        raise InvalidRequest("not the name of a record", seen=name[:200])
    group, slice_ = int(match["group"]), int(match["slice"])
    if group > 0xFFFF or slice_ > 0xFFFF:
        raise InvalidRequest("group or slice of a name is out of range", seen=name)
    return RecordKey(
        NamespaceId(bytes.fromhex(match["namespace"])), PrefixHash(bytes.fromhex(match["prefix"])), group, slice_
    )


def record_key(name: str | bytes) -> RecordKey | None:
    """As `parse_name`, for names that a tier lists; `None`: a manifest, a stripe, or not ours."""
    try:
        return parse_name(name if isinstance(name, str) else name.decode())
    except (InvalidRequest, UnicodeDecodeError):
        return None


def pack_key(key: RecordKey) -> bytes:
    """A key in 52 bytes."""
    return _KEY.pack(key.namespace, key.prefix, key.group, key.slice)


def unpack_key(packed: bytes) -> RecordKey:
    """The inverse of `pack_key`.

    Raises:
        CorruptRecord: Not 52 bytes.
    """
    try:
        namespace, prefix, group, slice_ = _KEY.unpack(packed)
    except struct.error as error:
        raise CorruptRecord("a packed key has the wrong size", expected=_KEY.size, seen=len(packed)) from error
    return RecordKey(NamespaceId(namespace), PrefixHash(prefix), group, slice_)
