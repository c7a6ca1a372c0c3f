"""Writes the golden files beside this script: records of every kind and chain, and a manifest, from fixed inputs.

Run it only to *add* files: a released file is never made anew, later releases must read it as it is.

    python tests/golden/make_golden.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.codec import PLANES2, PLANES4, RAW, TILES, ZSTD, encode, max_payload_bytes
from kvstore.format.encrypted import ENCRYPTION_BYTES, TenantKey, encrypt_record
from kvstore.format.header_v1 import HEADER_BYTES, HeaderV1
from kvstore.format.manifest import pack_key_ids, pack_manifest
from kvstore.format.record import Record, seal
from kvstore.model.keys import PrefixHash, RecordKey
from kvstore.model.kinds import FullAttention, RecordKind, Recurrent
from kvstore.model.layout import GroupLayout, Layout, Span
from kvstore.model.namespace import NamespaceDescription, describe_layout

FOLDER = Path(__file__).parent
MANIFEST = "manifest-v1.kvm"
CREATED_MS = 1_795_000_000_000
PAGE_TOKENS = 256

DESCRIPTION = NamespaceDescription.from_fields(
    {
        "format": 1,
        "model": "golden model, with a non-ascii letter: ü",
        "layout": describe_layout(
            Layout(PAGE_TOKENS, (GroupLayout(FullAttention(), 2), GroupLayout(Recurrent(), 1))),
            ({"layers": [0, 2], "dtype": "bfloat16"}, {"layers": [1], "dtype": "float32"}),
        ),
    },
    tenant="tenant-ü",
)


def noise(seed: str, num_bytes: int) -> bytes:
    """Bytes without any pattern, equal in every release of everything."""
    return hashlib.shake_256(seed.encode()).digest(num_bytes)


def elements(width: int) -> Callable[[str, int], bytes]:
    """Little-endian numbers of `width` bytes as activations are: few exponents, noise below."""

    def make(seed: str, num_bytes: int) -> bytes:
        data = bytearray(noise(seed, num_bytes))
        data[width - 1 :: width] = bytes(0x3C + (byte & 3) | byte & 0x80 for byte in data[width - 1 :: width])
        return bytes(data)

    return make


def tiled(seed: str, num_bytes: int) -> bytes:
    """Elements of two bytes of which one in a thousand has any exponent, with 8 KiB of noise behind the first tile."""
    data = bytearray(elements(2)(seed, num_bytes))
    data[1::2003] = noise(f"{seed}, odd", len(data[1::2003]))
    data[8192:16384] = noise(f"{seed}, a tile", 8192)
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Case:
    """One golden record.

    Attributes:
        name: Of its file, without `.kvr`.
        kind: Of the record.
        span: Of the record.
        group: Of the record's key; the slice is 1 for group 0, so that the two cannot be mixed up.
        chain: Asked for, and used.
        decoded_bytes: Size of the input.
        make: Makes the input from the name and the size.
    """

    name: str
    kind: RecordKind
    span: Span
    group: int
    chain: int
    decoded_bytes: int
    make: Callable[[str, int], bytes]

    @property
    def decoded(self) -> bytes:
        return self.make(self.name, self.decoded_bytes)

    @property
    def key(self) -> RecordKey:
        prefix = PrefixHash(hashlib.sha256(self.name.encode()).digest())
        return RecordKey(DESCRIPTION.id, prefix, self.group, 1 - self.group)

    def seal(self) -> Record:
        """The record, made by this release."""
        buffer = memoryview(bytearray(HEADER_BYTES + max_payload_bytes(self.decoded_bytes)))
        encoded = encode(self.chain, self.decoded, buffer[HEADER_BYTES:])
        header = HeaderV1.unsealed(
            key=self.key,
            kind=self.kind,
            span=self.span,
            codec_chain=encoded.chain,
            decoded_bytes=self.decoded_bytes,
            created_ms=CREATED_MS,
        )
        return seal(header, buffer[: HEADER_BYTES + encoded.payload_bytes])


PAGE = Span(PAGE_TOKENS, 2 * PAGE_TOKENS)
TAIL = Span(2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 128)
STATE = Span(PAGE_TOKENS, PAGE_TOKENS)
CASES = (
    Case("page-raw", RecordKind.PAGE, PAGE, 0, RAW, 1024, noise),
    Case("page-planes2", RecordKind.PAGE, PAGE, 0, PLANES2, 4096, elements(2)),
    Case("page-planes4", RecordKind.PAGE, PAGE, 0, PLANES4, 4096, elements(4)),
    Case("page-zstd", RecordKind.PAGE, PAGE, 0, ZSTD, 2048, elements(1)),
    Case("page-tiles2", RecordKind.PAGE, PAGE, 0, TILES, 65_536, tiled),
    Case("tail-raw", RecordKind.TAIL, TAIL, 0, RAW, 512, noise),
    Case("tail-planes2", RecordKind.TAIL, TAIL, 0, PLANES2, 2048, elements(2)),
    Case("tail-tiles2", RecordKind.TAIL, TAIL, 0, TILES, 36_867, tiled),
    Case("state-raw", RecordKind.STATE, STATE, 1, RAW, 1000, noise),
    Case("state-planes4", RecordKind.STATE, STATE, 1, PLANES4, 4000, elements(4)),
)


ENCRYPTED = "page-planes2-encrypted"
"""The case `page-planes2` under `KEY`."""
KEY = TenantKey(7, noise("golden secret", 32), DESCRIPTION.tenant)
KEY_IDS = "key-ids-v1.kvk"


def encrypted() -> Record:
    """The record of `ENCRYPTED`; of two equal inputs and nonces one record is made."""
    plain = next(case for case in CASES if case.name == "page-planes2").seal()
    target = bytearray(plain.num_bytes + ENCRYPTION_BYTES)
    return encrypt_record(plain, KEY, target, nonce=noise("golden nonce", 12))


def main() -> None:
    files = {f"{case.name}.kvr": bytes(case.seal().data) for case in CASES}
    files[MANIFEST] = pack_manifest(DESCRIPTION)
    files[f"{ENCRYPTED}.kvr"] = bytes(encrypted().data)
    files[KEY_IDS] = pack_key_ids({KEY.key_id: KEY.check})
    for name, data in files.items():
        path = FOLDER / name
        if path.exists():
            print(f"kept     {name}")
            continue
        path.write_bytes(data)
        print(f"written  {name}  {len(data)} bytes")


if __name__ == "__main__":
    main()
