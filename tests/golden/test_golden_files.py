"""Golden files: what a release wrote once, every later one must read."""

from __future__ import annotations

import pytest
from make_golden import CASES, DESCRIPTION, ENCRYPTED, FOLDER, KEY, KEY_IDS, MANIFEST, Case

from kvstore.codec import RAW, decode_into
from kvstore.format.encrypted import ENCRYPTION_BYTES, decrypt_record
from kvstore.format.manifest import pack_key_ids, pack_manifest, parse_key_ids, parse_manifest
from kvstore.format.record import open_record
from kvstore.model.layout import Layout

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def kept(case: Case) -> bytes:
    return (FOLDER / f"{case.name}.kvr").read_bytes()


@EVERY_CASE
def test_golden_record_opens_and_decodes_to_the_known_bytes(case: Case) -> None:
    """A record written by the first release is opened under its name and decodes to the bytes it was made from."""
    record = open_record(kept(case), expected=case.key)
    header = record.header
    assert (header.kind, header.span, header.codec_chain) == (case.kind, case.span, case.chain)
    decoded = bytearray(header.decoded_bytes)
    decode_into(header.codec_chain, record.payload, decoded)
    assert decoded == case.decoded


@EVERY_CASE
def test_sealing_the_same_input_again_makes_the_same_record(case: Case) -> None:
    """The same input is sealed to the same bytes today; compressed ones may differ, what they hold may not."""
    again = case.seal()
    if case.chain == RAW:
        assert bytes(again.data) == kept(case)
    opened = open_record(again.data, expected=case.key)
    assert opened.header.codec_chain == case.chain
    assert opened.header.payload_bytes <= case.decoded_bytes
    decoded = bytearray(case.decoded_bytes)
    decode_into(opened.header.codec_chain, opened.payload, decoded)
    assert decoded == case.decoded


def test_golden_manifest_is_read_and_written_as_it_is() -> None:
    """The manifest of the first release explains its namespace, and today's release writes the same bytes."""
    data = (FOLDER / MANIFEST).read_bytes()
    description = parse_manifest(data, expected=CASES[0].key.namespace)
    assert description == DESCRIPTION
    assert isinstance(description.layout(), Layout)
    assert pack_manifest(DESCRIPTION) == data


def test_golden_encrypted_record_decrypts_to_the_plain_one() -> None:
    """A record that the first release with keys encrypted is found under its keyed name, opened without the key, and
    decrypted with it to the very bytes of the plain golden record.
    """
    plain = next(case for case in CASES if case.name == "page-planes2")
    stored = open_record((FOLDER / f"{ENCRYPTED}.kvr").read_bytes(), expected=KEY.named(plain.key))
    assert stored.header.key_id == KEY.key_id
    opened = decrypt_record(stored, KEY, bytearray(stored.num_bytes - ENCRYPTION_BYTES), plain.key.prefix)
    assert bytes(opened.data) == kept(plain)


def test_golden_note_of_key_ids_is_read_and_written_as_it_is() -> None:
    """What the first release with keys noted is understood, and noted in the same bytes today."""
    data = (FOLDER / KEY_IDS).read_bytes()
    assert parse_key_ids(data) == {KEY.key_id: KEY.check}
    assert pack_key_ids({KEY.key_id: KEY.check}) == data


def test_every_golden_file_is_tested() -> None:
    """No golden file lies about without a case, and every chain and kind has one."""
    assert {path.name for path in FOLDER.glob("*.kv*")} == {
        *(MANIFEST, KEY_IDS, f"{ENCRYPTED}.kvr"),
        *(f"{case.name}.kvr" for case in CASES),
    }
    assert {case.chain for case in CASES} == {0, 1, 2, 3, 4}
    assert {case.kind.name for case in CASES} == {"PAGE", "TAIL", "STATE"}
