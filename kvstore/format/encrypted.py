"""Encrypted records: what a tenant's key makes of a record and of its name. docs/formats/record-v1.md, *Encryption*.

They stand in every tier as they are made here, once; nothing of the page or of the prefix hash can be read in them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace
from typing import Any

from kvstore.errors import CorruptRecord, InvalidRequest
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.record import Record, seal
from kvstore.model.keys import PREFIX_BYTES, PrefixHash, RecordKey

__all__ = ["ENCRYPTION_BYTES", "SECRET_BYTES", "TenantKey", "decrypt_record", "encrypt_record"]

SECRET_BYTES = 32
ENCRYPTION_BYTES = PREFIX_BYTES
"""So much longer is an encrypted payload: the prefix hash stands in front of the plain one, inside the encryption."""

NONCE_BYTES = 12
CHECK_BYTES = 8
KEY_ID_MAX = 0xFFFF_FFFF
_NAMES_KEPT = 1 << 15
"""Of each key, some 8 MiB: a prompt is looked up and then staged, and comes again with a turn more."""
_BLOCK_BYTES = 64  # of SHA-256
_CHECKSUM_AT = slice(8, 24)
_ZEROS = bytes(16)
_PREFIX_AT = HEADER_BYTES - PREFIX_BYTES


class TenantKey:
    """One key of one tenant: the payload key, the name key and the check value, all derived from the secret.

    Safe from any thread. Neither the secret nor what is derived from it can be read from its text.

    Args:
        key_id: What headers call it, from 1.
        secret: 32 random bytes; several tenants may share them, what is derived differs.
        tenant: Whose it is.

    Attributes:
        check: 8 bytes that tell two secrets under one id apart, and are of no use to whoever reads them.
    """

    def __init__(self, key_id: int, secret: bytes, tenant: str) -> None:
        if not 1 <= key_id <= KEY_ID_MAX:
            raise InvalidRequest(f"the id of a key is from 1 to {KEY_ID_MAX}", field="id", seen=key_id)
        if len(secret) != SECRET_BYTES:
            raise InvalidRequest(f"a key has {SECRET_BYTES} bytes", field="secret", seen_bytes=len(secret))
        self.key_id = key_id
        self.tenant = tenant
        self.check = _derive(secret, "check", tenant)[:CHECK_BYTES]
        self._payload_key = _derive(secret, "payload", tenant)
        # HMAC-SHA-256 in two copied states: the one-shot call makes both anew for each name
        block = _derive(secret, "name", tenant).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
        self._names: dict[PrefixHash, PrefixHash] = {}

    def __repr__(self) -> str:
        return f"TenantKey({self.key_id}, tenant={self.tenant!r})"

    def name_of(self, prefix: PrefixHash) -> PrefixHash:
        """What stands in names and headers for a prefix hash: HMAC-SHA-256 of it under the tenant's name key."""
        name = self._names.get(prefix)
        if name is None:
            inner, outer = self._inner.copy(), self._outer.copy()
            inner.update(prefix)
            outer.update(inner.digest())
            name = PrefixHash(outer.digest())
            if len(self._names) >= _NAMES_KEPT:
                self._names.clear()
            self._names[prefix] = name
        return name

    def named(self, key: RecordKey) -> RecordKey:
        """A record's key as tiers know it."""
        return RecordKey(key.namespace, self.name_of(key.prefix), key.group, key.slice)

    def cipher(self, nonce: bytes, tag: bytes | None = None) -> Any:
        """AES-256-GCM for one record: to encrypt, or with a tag to decrypt.

        Raises:
            InvalidRequest: The package for it is not installed.
        """
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise InvalidRequest(
                "encryption needs a package that is not installed: pip install 'kvstore[encryption]'",
                missing=error.name,
            ) from error
        cipher = Cipher(algorithms.AES(self._payload_key), modes.GCM(nonce, tag))
        return cipher.encryptor() if tag is None else cipher.decryptor()


def _derive(secret: bytes, purpose: str, tenant: str) -> bytes:
    """A key for one purpose of one tenant: HMAC is a pseudo-random function, and the secret is uniformly random."""
    return hmac.digest(secret, f"kvstore v1 {purpose} key\0{tenant}".encode(), "sha256")


def encrypt_record(
    record: Record, key: TenantKey, target: bytearray | memoryview, nonce: bytes | None = None
) -> Record:
    """Encrypt a plain record, whole, under its new name. The GIL is released while the payload is.

    Args:
        record: Verified by the caller.
        key: Of its tenant.
        target: A writable buffer of `record.num_bytes + ENCRYPTION_BYTES`; the result takes it over.
        nonce: 12 bytes that this key has never been used with; by default random ones, which stay apart for 2^32
            records of a key.

    Raises:
        InvalidRequest: The record is encrypted already, or the package for it is not installed.
    """
    if record.header.key_id:
        raise InvalidRequest("the record is encrypted already", key_id=record.header.key_id)
    nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
    view = memoryview(target).cast("B")
    header = replace(
        record.header,
        key=key.named(record.key),
        payload_bytes=record.header.payload_bytes + ENCRYPTION_BYTES,
        key_id=key.key_id,
        nonce=nonce,
    )
    encryptor = key.cipher(nonce)
    encryptor.authenticate_additional_data(_authenticated(header))
    payload_at = HEADER_BYTES + ENCRYPTION_BYTES
    encryptor.update_into(record.key.prefix, view[HEADER_BYTES:payload_at])
    encryptor.update_into(record.payload, view[payload_at:])
    encryptor.finalize()
    return seal(replace(header, tag=encryptor.tag), view)


def decrypt_record(
    record: Record, key: TenantKey, target: bytearray | memoryview, prefix: PrefixHash | None = None
) -> Record:
    """The plain record that `encrypt_record` was given, its checksum summed anew over the authenticated bytes.

    Args:
        record: As a tier returned it.
        key: Whose id the header tells.
        target: A writable buffer of `record.num_bytes - ENCRYPTION_BYTES`; the result takes it over.
        prefix: What the record's prefix hash must be, where the caller knows.

    Raises:
        CorruptRecord: Not what this key made: a byte of payload or header was changed, or it is another key's.
    """
    from cryptography.exceptions import InvalidTag

    header = record.header
    if header.key_id != key.key_id or header.payload_bytes < ENCRYPTION_BYTES:
        raise CorruptRecord(
            "the record is not encrypted with this key", key=header.key, expected=key.key_id, seen=header.key_id
        )
    view = memoryview(target).cast("B")
    decryptor = key.cipher(header.nonce, header.tag)
    decryptor.authenticate_additional_data(_authenticated(header))
    payload_at = HEADER_BYTES + ENCRYPTION_BYTES
    decryptor.update_into(record.data[HEADER_BYTES:payload_at], view[_PREFIX_AT:HEADER_BYTES])
    decryptor.update_into(record.data[payload_at:], view[HEADER_BYTES:])
    try:
        decryptor.finalize()
    except InvalidTag as error:
        raise CorruptRecord("the record is not what was encrypted: its tag does not match", key=header.key) from error
    found = PrefixHash(bytes(view[_PREFIX_AT:HEADER_BYTES]))
    if key.name_of(found) != header.key.prefix or (prefix is not None and prefix != found):
        raise CorruptRecord("another record was encrypted under this name", key=header.key)
    plain = replace(
        header,
        key=RecordKey(header.key.namespace, found, header.key.group, header.key.slice),
        key_id=0,
        nonce=bytes(12),
        tag=bytes(16),
    )
    return seal(plain, view)


def _authenticated(header: HeaderV1) -> bytes:
    """The header as the tag vouches for it: checksums and tag, which come after, are zero."""
    packed = bytearray(replace(header, payload_checksum=_ZEROS, tag=_ZEROS).pack())
    packed[_CHECKSUM_AT] = _ZEROS
    return bytes(packed)
