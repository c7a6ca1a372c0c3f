"""Encrypts and decrypts records and their names with a tenant's key: docs/formats/record-v1.md, *Encryption*.

A record is encrypted once; every tier stores the same ciphertext. It reveals nothing of the page or the prefix hash.
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

SECRET_BYTES = 32
ENCRYPTION_BYTES = PREFIX_BYTES
"""How much longer an encrypted payload is: the plaintext is preceded by the prefix hash, which is encrypted too."""

NONCE_BYTES = 12
CHECK_BYTES = 8
KEY_ID_MAX = 0xFFFF_FFFF
_NAMES_KEPT = 1 << 15
"""Cached names per key: a prompt's prefixes are needed by its lookup, its stage, and again by the next turn."""
_BLOCK_BYTES = 64  # of SHA-256
_CHECKSUM_AT = slice(8, 24)
_ZEROS = bytes(16)
_PREFIX_AT = HEADER_BYTES - PREFIX_BYTES


class TenantKey:
    """One key of one tenant: the payload key, the name key and the check value, all derived from the secret.

    Safe from any thread. Its `repr` contains neither the secret nor anything derived from it.

    Args:
        key_id: Its id in headers, from 1.
        secret: 32 random bytes. Several tenants may share one: the derived keys differ.
        tenant: Its tenant.

    Attributes:
        check: 8 bytes that differ for two secrets under one id, and reveal nothing of them.
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
        # HMAC-SHA-256 from two precomputed states, which the one-shot call would compute for each name
        block = _derive(secret, "name", tenant).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
        self._names: dict[PrefixHash, PrefixHash] = {}

    def __repr__(self) -> str:
        return f"TenantKey({self.key_id}, tenant={self.tenant!r})"

    def name_of(self, prefix: PrefixHash) -> PrefixHash:
        """The pseudonym of a prefix hash in names and headers: its HMAC-SHA-256 under the tenant's name key."""
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
        """A record's key with the pseudonym of its prefix, as tiers know it."""
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
                "encryption needs a package that is not installed: pip install 'kvstore-vllm[encryption]'",
                missing=error.name,
            ) from error
        cipher = Cipher(algorithms.AES(self._payload_key), modes.GCM(nonce, tag))
        return cipher.encryptor() if tag is None else cipher.decryptor()


def _derive(secret: bytes, purpose: str, tenant: str) -> bytes:
    """A key for one purpose of one tenant. HMAC suffices as the derivation, since the secret is uniformly random."""
    return hmac.digest(secret, f"kvstore v1 {purpose} key\0{tenant}".encode(), "sha256")


def encrypt_record(
    record: Record, key: TenantKey, target: bytearray | memoryview, nonce: bytes | None = None
) -> Record:
    """Encrypt a plain record and its name. The GIL is released while the payload is encrypted.

    Args:
        record: Verified by the caller.
        key: A key of its tenant.
        target: A writable buffer of `record.num_bytes + ENCRYPTION_BYTES`; the result takes it over.
        nonce: 12 bytes that were never used with this key; by default random ones, which are safe for 2^32 records of a
            key.

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
    """The inverse of `encrypt_record`: authenticates and decrypts a record, and seals the plaintext.

    Args:
        record: As a tier returned it.
        key: The key with the id in the header.
        target: A writable buffer of `record.num_bytes - ENCRYPTION_BYTES`; the result takes it over.
        prefix: The expected prefix hash, where the caller knows it.

    Raises:
        CorruptRecord: It was not encrypted with this key, a byte of payload or header was changed, or it is the record
            of another prefix.
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
    """The header as additional authenticated data: checksums and tag, which are not known yet, are zero."""
    packed = bytearray(replace(header, payload_checksum=_ZEROS, tag=_ZEROS).pack())
    packed[_CHECKSUM_AT] = _ZEROS
    return bytes(packed)
