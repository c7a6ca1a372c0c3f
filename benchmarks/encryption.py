"""`python -m benchmarks.encryption`: what encryption adds to sealing and opening a record, beside raw AES-GCM.

All in this process, in one thread, on one set of buffers, by turns; each figure is the best of its turns, the ratios
are of the same run.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.table import Table

from kvstore.format.encrypted import ENCRYPTION_BYTES, TenantKey, decrypt_record, encrypt_record
from kvstore.format.record import open_record, seal
from kvstore.model.keys import PrefixHash
from kvstore.runtime.sizes import parse_bytes
from kvstore.testing.records import make_record

__all__ = ["main", "measure"]

_NUM_NAMES = 8192


def measure(payload_bytes: int, repetitions: int) -> dict[str, float]:
    """GB/s of payload, by what is done with it."""
    key, raw = TenantKey(1, secrets.token_bytes(32), "tenant"), AESGCM(secrets.token_bytes(32))
    plain = make_record(1, payload_bytes)
    buffer, target = bytearray(plain.data), bytearray(plain.num_bytes + ENCRYPTION_BYTES)
    payload, nonce, out = bytes(plain.payload), bytes(12), bytearray(payload_bytes + 16)
    stored = encrypt_record(plain, key, bytearray(target))
    back = bytearray(plain.num_bytes)

    calls: dict[str, Callable[[], object]] = {
        "raw": lambda: raw.encrypt_into(nonce, payload, None, out),
        "seal": lambda: seal(plain.header, buffer),
        "seal_encrypt": lambda: encrypt_record(seal(plain.header, buffer), key, target),
        "open": lambda: open_record(plain.data),
        "open_decrypt": lambda: decrypt_record(open_record(stored.data), key, back),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repetitions):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: payload_bytes / seconds / 1e9 for name, seconds in best.items()}


def name_rate() -> float:
    """Names keyed in a second, none seen before."""
    prefixes, best_s = [PrefixHash(secrets.token_bytes(32)) for _ in range(_NUM_NAMES)], float("inf")
    for _ in range(10):
        key = TenantKey(1, secrets.token_bytes(32), "tenant")
        began = time.perf_counter()
        for prefix in prefixes:
            key.name_of(prefix)
        best_s = min(best_s, time.perf_counter() - began)
    return _NUM_NAMES / best_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encryption", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bytes", type=parse_bytes, default=2 << 20, metavar="BYTES", help="of a payload, like 2MiB")
    parser.add_argument("--repetitions", type=int, default=200, metavar="COUNT", help="turns")
    parser.add_argument("--json", action="store_true", help="print the BENCH line alone")
    chosen = parser.parse_args(arguments)
    rates = measure(chosen.bytes, chosen.repetitions)
    names = name_rate()
    if not chosen.json:
        table = Table("what", "GB/s", "of raw AES-GCM", title=f"records of {chosen.bytes:,} bytes, one thread")
        for name, rate in rates.items():
            table.add_row(name.replace("_", " + "), f"{rate:.2f}", f"{rate / rates['raw']:.2f}")
        Console().print(table)
        print(f"names keyed: {names:,.0f} in a second")
    line = {f"{name}_gbps": round(rate, 3) for name, rate in rates.items()}
    line["seal_encrypt_of_raw"] = round(rates["seal_encrypt"] / rates["raw"], 3)
    line["open_decrypt_of_raw"] = round(rates["open_decrypt"] / rates["raw"], 3)
    line["names_per_s"] = round(names)
    print(f"BENCH {json.dumps({'encryption': line})}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
