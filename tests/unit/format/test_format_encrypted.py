"""Encrypted records: what comes back, what cannot be read in them, and what is refused."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptRecord, InvalidRequest, UnsupportedFormat
from kvstore.format.encrypted import ENCRYPTION_BYTES, TenantKey, decrypt_record, encrypt_record
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.manifest import pack_key_ids, parse_key_ids
from kvstore.format.record import Record, open_record, seal
from kvstore.testing.keys import secret_of, tenant_key
from kvstore.testing.records import make_key, make_record

KEY = tenant_key(7, "tenant")


def encrypted(record: Record) -> Record:
    return encrypt_record(record, KEY, bytearray(record.num_bytes + ENCRYPTION_BYTES))


def decrypted(record: Record, key: TenantKey = KEY) -> Record:
    return decrypt_record(record, key, bytearray(max(0, record.num_bytes - ENCRYPTION_BYTES)))


@given(st.integers(0, 5000), st.integers(0, 1 << 30))
def test_what_was_encrypted_comes_back_bit_by_bit(payload_bytes: int, seed: int) -> None:
    """Header and payload of the plain record are what they were, and nothing of them stands in the encrypted one."""
    plain = make_record(seed, payload_bytes, seed=seed)
    stored = encrypted(plain)
    assert open_record(bytes(stored.data), expected=KEY.named(plain.key)).header == stored.header
    assert bytes(decrypted(stored).data) == bytes(plain.data)
    assert plain.key.prefix not in bytes(stored.data)
    if payload_bytes >= 16:
        assert bytes(plain.payload[:16]) not in bytes(stored.data)


@given(st.binary(min_size=32, max_size=32))
def test_names_are_hmac_sha256(prefix: bytes) -> None:
    """The quick spelling of HMAC is the standard one, asked for once or twice."""
    name_key = hmac.digest(secret_of(7), b"kvstore v1 name key\0tenant", "sha256")
    key = TenantKey(7, secret_of(7), "tenant")
    assert key.name_of(prefix) == key.name_of(prefix) == hmac.digest(name_key, prefix, "sha256")  # type: ignore[arg-type]


def resealed(record: Record, at: int, bit: int) -> Record | None:
    """The record with one bit changed and its checksums made right again, as an attacker would; `None` where the header
    cannot be what it was changed to.
    """
    data = bytearray(record.data)
    data[at] ^= 1 << bit
    if at >= HEADER_BYTES:
        return seal(record.header, data)
    header = record.header
    fields = {"created_ms": 120, "decoded_bytes": 104, "key_id": 128}
    changed = {name: getattr(header, name) ^ 1 << bit for name, start in fields.items() if at == start}
    if 132 <= at < 144:
        changed = {"nonce": bytes(data[132:144])}
    if 144 <= at < 160:
        changed = {"tag": bytes(data[144:160])}
    return seal(replace(header, **changed), data) if changed else None


@given(st.integers(120, HEADER_BYTES + ENCRYPTION_BYTES + 99), st.integers(0, 7))
def test_a_changed_bit_is_found_although_all_checksums_are_right(at: int, bit: int) -> None:
    """Payload, prefix, nonce, tag, key id and the header's other fields: the tag vouches for all of them."""
    forged = resealed(encrypted(make_record(1, 100)), at, bit)
    if forged is not None:
        open_record(bytes(forged.data))
        with pytest.raises(CorruptRecord):
            decrypted(forged)


def test_another_key_another_tenant_another_name_decrypt_nothing() -> None:
    """Same id with another secret, same secret of another tenant, another id, and a record moved to another name."""
    plain = make_record(1)
    stored = encrypted(plain)
    for wrong in (TenantKey(7, secret_of(8), "tenant"), tenant_key(7, "other"), TenantKey(8, secret_of(7), "tenant")):
        assert wrong.name_of(plain.key.prefix) != stored.key.prefix or wrong.key_id != 7
        with pytest.raises(CorruptRecord):
            decrypted(stored, wrong)
    with pytest.raises(CorruptRecord):
        decrypted(seal(replace(stored.header, key=KEY.named(make_key(2))), bytearray(stored.data)))
    with pytest.raises(CorruptRecord, match="another record"):
        decrypt_record(stored, KEY, bytearray(plain.num_bytes), make_key(2).prefix)


def test_equal_records_are_encrypted_differently_each_time() -> None:
    """A nonce is never used twice: two encryptions of one record have nothing in common but the header's plain part."""
    one, two = encrypted(make_record(1)), encrypted(make_record(1))
    assert one.header.nonce != two.header.nonce
    assert bytes(one.payload) != bytes(two.payload)


def test_misuse_is_refused() -> None:
    """Encrypting twice, ids and secrets out of range; and a plain or shortened record is not decrypted."""
    with pytest.raises(InvalidRequest, match="encrypted already"):
        encrypted(encrypted(make_record(1)))
    for key_id, secret in ((0, bytes(32)), (1 << 32, bytes(32)), (1, bytes(31))):
        with pytest.raises(InvalidRequest):
            TenantKey(key_id, secret, "")
    with pytest.raises(CorruptRecord):
        decrypted(make_record(1))
    short = seal(replace(encrypted(make_record(1)).header), bytearray(HEADER_BYTES + ENCRYPTION_BYTES - 1))
    with pytest.raises(CorruptRecord):
        decrypted(short)


def test_no_key_is_shown() -> None:
    """Neither the secret nor what is derived from it is in a key's text."""
    assert repr(KEY) == "TenantKey(7, tenant='tenant')"
    digest = hashlib.sha256(secret_of(7)).hexdigest()
    assert digest not in repr(vars(KEY))


@given(st.dictionaries(st.integers(1, (1 << 32) - 1), st.binary(min_size=8, max_size=8), max_size=8))
def test_notes_of_key_ids_round_trip(checks: dict[int, bytes]) -> None:
    """What was noted is read."""
    assert parse_key_ids(pack_key_ids(checks)) == checks


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"kvstore_key_ids": 1}',
        b'{"kvstore_key_ids": 1, "keys": {"x": "0011223344556677"}}',
        b'{"kvstore_key_ids": 1, "keys": {"1": "001122334455667"}}',
        b'{"kvstore_key_ids": 1, "keys": {"1": 5}}',
        pytest.param(b"[" * 2000 + b"]" * 2000, id="deep"),
        pytest.param(b'{"kvstore_key_ids": 1, "keys": {"%s": "0011223344556677"}}' % (b"9" * 5000), id="long"),
        pytest.param(secrets.token_bytes(40), id="random"),  # workers must agree on the names of tests
    ],
)
def test_what_is_no_note_is_corrupt_and_a_newer_one_is_not(data: bytes) -> None:
    """A damaged note is written again; that of a newer release is not changed."""
    with pytest.raises(CorruptRecord):
        parse_key_ids(data)
    with pytest.raises(UnsupportedFormat):
        parse_key_ids(b'{"kvstore_key_ids": 2, "keys": {}}')
