"""Lossless encoding of canonical bytes to stored payloads, and a pool of threads for it. No torch. See README.md."""

from kvstore.codec.chains import (
    CHAINS,
    PLANES2,
    PLANES4,
    RAW,
    TILES,
    ZSTD,
    Encoded,
    chain_for_element_bytes,
    decode_into,
    encode,
    max_payload_bytes,
)
from kvstore.codec.pool import CodecPool

__all__ = [
    "CHAINS",
    "PLANES2",
    "PLANES4",
    "RAW",
    "TILES",
    "ZSTD",
    "CodecPool",
    "Encoded",
    "chain_for_element_bytes",
    "decode_into",
    "encode",
    "max_payload_bytes",
]
