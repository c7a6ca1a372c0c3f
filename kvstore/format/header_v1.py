"""The 192-byte header of record format v1.

Frozen: specified in docs/formats/record-v1.md; golden files are in tests/golden/.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import xxhash

from kvstore.errors import CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.model.keys import NAMESPACE_BYTES, PREFIX_BYTES, NamespaceId, PrefixHash, RecordKey
from kvstore.model.kinds import RecordKind
from kvstore.model.layout import Span

MAGIC = b"KVR1"
VERSION = 1
HEADER_BYTES = 192
CHECKSUM_BYTES = 16

_FIELDS = struct.Struct("<4sHH16s16s16s32sHHBBHIIQQQI12s16s32s")
_PROLOGUE = struct.Struct("<4sHH16s")  # the same in every version, as is the rule for its checksum
_CHECKSUM_AT = slice(8, 24)
_ZERO_CHECKSUM = bytes(CHECKSUM_BYTES)
_ZERO_NONCE = bytes(12)
_RESERVED = bytes(32)
assert _FIELDS.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class HeaderV1:
    """The fields of a record's header.

    Attributes:
        key: The record's key, so that a misdirected read is detected.
        kind: Page, tail or state.
        span: Its tokens.
        codec_chain: Id of the codec chain that made the payload (`kvstore.codec`).
        decoded_bytes: Size of the decoded payload; checked before decoding.
        payload_bytes: Size of the stored payload.
        payload_checksum: xxh3-128 over the stored payload, big-endian digest.
        created_ms: Wall clock at sealing, milliseconds since the Unix epoch.
        key_id: Encryption key; 0 means not encrypted. Nonce and tag are zero then.
        nonce: 12 bytes.
        tag: 16 bytes.
    """

    key: RecordKey
    kind: RecordKind
    span: Span
    codec_chain: int
    decoded_bytes: int
    payload_bytes: int
    payload_checksum: bytes
    created_ms: int
    key_id: int = 0
    nonce: bytes = bytes(12)
    tag: bytes = bytes(16)

    @classmethod
    def unsealed(
        cls, key: RecordKey, kind: RecordKind, span: Span, *, codec_chain: int, decoded_bytes: int, created_ms: int
    ) -> HeaderV1:
        """A header for `seal`, which sets the size and checksum of the payload: until then both are zero."""
        return cls(
            key=key,
            kind=kind,
            span=span,
            codec_chain=codec_chain,
            decoded_bytes=decoded_bytes,
            payload_bytes=0,
            payload_checksum=bytes(CHECKSUM_BYTES),
            created_ms=created_ms,
        )

    def pack(self) -> bytes:
        """The 192 bytes, checksum included.

        Raises:
            InvalidRequest: A field does not fit its width, or the span does not fit the kind.
        """
        key = self.key
        if not _fits(self.kind, self.span):
            raise InvalidRequest("span does not fit the kind of record", key=key, kind=self.kind.name, span=self.span)
        if len(key.namespace) != NAMESPACE_BYTES or len(key.prefix) != PREFIX_BYTES or len(self.payload_checksum) != 16:
            raise InvalidRequest("namespace, prefix or checksum has the wrong length", key=key)
        if len(self.nonce) != 12 or len(self.tag) != 16:
            raise InvalidRequest("nonce or tag has the wrong length", key=key)
        try:
            packed = bytearray(
                _FIELDS.pack(
                    MAGIC, VERSION, HEADER_BYTES, _ZERO_CHECKSUM, self.payload_checksum, key.namespace, key.prefix,
                    key.group, key.slice, self.kind, 0, self.codec_chain, self.span.start, self.span.stop,
                    self.decoded_bytes, self.payload_bytes, self.created_ms, self.key_id, self.nonce, self.tag,
                    _RESERVED,
                )
            )  # fmt: skip
        except struct.error as error:
            raise InvalidRequest("a header field is out of range", key=key, error=error) from error
        packed[_CHECKSUM_AT] = xxhash.xxh3_128_digest(packed)
        return bytes(packed)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> HeaderV1:
        """Read and verify the header that `data` starts with.

        Raises:
            CorruptRecord: Too short, wrong magic, wrong checksum, or a field that no writer of v1 produces.
            UnsupportedFormat: An intact header of another version.
        """
        head = _intact_head(data)
        (
            _, _, _, _, payload_checksum, namespace, prefix, group, slice_, kind, flags, codec_chain,
            start, stop, decoded_bytes, payload_bytes, created_ms, key_id, nonce, tag, reserved,
        ) = _FIELDS.unpack(head)  # fmt: skip
        if key_id == 0 and (nonce != _ZERO_NONCE or tag != _ZERO_CHECKSUM):
            raise CorruptRecord("nonce or tag of a record that is not encrypted is not zero")
        if reserved != _RESERVED or flags != 0:
            raise CorruptRecord("reserved bytes of the header are not zero", flags=flags)
        try:
            record_kind = RecordKind(kind)
        except ValueError as error:
            raise CorruptRecord("unknown kind of record", seen=kind) from error
        span = Span(start, stop)
        if not _fits(record_kind, span):
            raise CorruptRecord("span does not fit the kind of record", kind=record_kind.name, start=start, stop=stop)
        return cls(
            key=RecordKey(NamespaceId(namespace), PrefixHash(prefix), group, slice_),
            kind=record_kind,
            span=span,
            codec_chain=codec_chain,
            decoded_bytes=decoded_bytes,
            payload_bytes=payload_bytes,
            payload_checksum=payload_checksum,
            created_ms=created_ms,
            key_id=key_id,
            nonce=nonce,
            tag=tag,
        )

    def with_payload(self, payload: bytes | bytearray | memoryview, checksum: bytes | None = None) -> HeaderV1:
        """This header with the size and checksum of `payload`; its `checksum` is computed unless it is given."""
        if checksum is None:
            checksum = xxhash.xxh3_128_digest(payload)
        return replace(self, payload_bytes=len(payload), payload_checksum=checksum)


def _intact_head(data: bytes | bytearray | memoryview) -> bytearray:
    """The header's bytes with a verified checksum, which is set to zero. Verifies other versions too, so that they are
    reported as such and not as damage.
    """
    if len(data) < HEADER_BYTES:
        raise CorruptRecord("record is shorter than its header", expected=HEADER_BYTES, seen=len(data))
    magic, version, header_bytes, checksum = _PROLOGUE.unpack_from(data)
    if magic != MAGIC:
        raise CorruptRecord("record does not start with its magic", expected=MAGIC, seen=magic)
    if not _PROLOGUE.size <= header_bytes <= len(data):
        raise CorruptRecord("header is longer than the record", header_bytes=header_bytes, seen=len(data))
    head = bytearray(data[:header_bytes])
    head[_CHECKSUM_AT] = _ZERO_CHECKSUM
    if xxhash.xxh3_128_digest(head) != checksum:
        raise CorruptRecord("header checksum does not match", seen=checksum.hex())
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise UnsupportedFormat("record has an unknown version", expected=VERSION, seen=version)
    return head


def _fits(kind: RecordKind, span: Span) -> bool:
    return span.start == span.stop if kind is RecordKind.STATE else span.start < span.stop
