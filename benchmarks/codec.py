"""Section `codec`: encode, decode and verify in one thread, beside a copy of the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.ceilings import memcpy
from benchmarks.measure import Listener, Plan, Row, Work, measure
from benchmarks.pages import RecordPages, bf16_page
from kvstore.codec import PLANES2, Encoded, decode_into, encode, max_payload_bytes
from kvstore.format.record import verify_payload

__all__ = ["codec_rows", "num_codec_rows"]


class _Calls(Work):
    """Plain calls, one after the other."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    async def run(self) -> None:
        self._call()


def num_codec_rows(plan: Plan) -> int:
    return 3


def codec_rows(plan: Plan, listener: Listener) -> list[Row]:
    """Pages of the plan's largest size.

    Raises:
        RuntimeError: What was decoded is not what was encoded.
    """
    return asyncio.run(_rows(max(plan.sizes), plan, listener))


async def _rows(size_bytes: int, plan: Plan, listener: Listener) -> list[Row]:
    listener.preparing("codec: making pages")
    num_pages = plan.num_pages(size_bytes)
    pages = [bytearray(bf16_page(size_bytes, seed=seed)) for seed in range(num_pages)]
    payloads = [memoryview(bytearray(b"\1") * max_payload_bytes(size_bytes)) for _ in range(num_pages)]
    decoded = [memoryview(bytearray(b"\1") * size_bytes) for _ in range(num_pages)]
    encodeds: list[Encoded] = []

    def encode_all() -> None:
        encodeds[:] = [encode(PLANES2, page, payload) for page, payload in zip(pages, payloads, strict=True)]

    def decode_all() -> None:
        for encoded, payload, target in zip(encodeds, payloads, decoded, strict=True):
            decode_into(encoded.chain, payload[: encoded.payload_bytes], target)

    async def row(what: str, call: Callable[[], None], ceiling_targets: list[memoryview]) -> Row:
        listener.measuring(f"codec: {what}")
        ceiling = memcpy(pages, ceiling_targets)
        num_bytes = size_bytes * num_pages
        return await measure(
            what,
            _Calls(call),
            ceiling,
            size_bytes=size_bytes,
            num_bytes=num_bytes,
            in_flight=1,
            repetitions=plan.repetitions,
        )

    rows = [await row("codec encode", encode_all, payloads)]
    copied = [memoryview(bytearray(b"\1") * size_bytes) for _ in range(num_pages)]
    rows.append(await row("codec decode", decode_all, copied))
    if any(target != page for target, page in zip(decoded, pages, strict=True)):
        raise RuntimeError("decoding did not give back what was encoded")
    return [*rows, await _verify_row(size_bytes, plan, listener)]


async def _verify_row(size_bytes: int, plan: Plan, listener: Listener) -> Row:
    listener.measuring("codec: verify")
    pages = RecordPages(size_bytes, plan.num_pages(size_bytes))
    records = pages.batch().records

    def verify_all() -> None:
        for record in records:
            verify_payload(record)

    return await measure(
        "verify",
        _Calls(verify_all),
        memcpy(pages.sources, pages.targets),
        size_bytes=pages.record_bytes,
        num_bytes=pages.num_bytes,
        in_flight=1,
        repetitions=plan.repetitions,
    )
