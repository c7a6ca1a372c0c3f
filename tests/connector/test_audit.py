"""The audit in a live engine: a page of wrong numbers under a right seal is found by whoever computes it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.codec import decode_into, encode, max_payload_bytes
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import read_record, seal
from kvstore.testing.engine import EngineProcess, EngineSpec, Request, seeded_prompt
from tests.connector.support.service import DirectoryService

pytestmark = pytest.mark.engine

LENGTH, RESTORED = 2500, 2432


def test_a_wrong_page_with_a_right_seal(engine: Callable[..., EngineProcess], llama: Path, tmp_path: Path) -> None:
    """One stored page is replaced by other numbers, sealed as they should be, which no checksum can find.

    An engine that does not audit answers wrongly. One that does computes the prompt, answers rightly, names the page
    and has it discarded, so that no engine restores it any more.
    """
    prompt = seeded_prompt(71, LENGTH)
    with DirectoryService(tmp_path) as service:
        plain = EngineSpec(checkpoint=llama, connector={"url": service.url})
        audited = replace(plain, connector={"url": service.url, "audit_rate": 1.0})
        saving = engine(plain)
        (right,) = saving.generate([Request(prompt)])
        saving.stop()
        service.settle()
        service.stop()
        replace_one_page(service.records)
        service.start()

        trusting = engine(plain)
        (wrong,) = trusting.generate([Request(prompt)])
        trusting.stop()
        assert wrong.num_cached_tokens == RESTORED
        assert wrong.tokens != right.tokens

        auditing = engine(audited)
        (answer,) = auditing.generate([Request(prompt)])
        assert (answer.tokens, answer.num_cached_tokens) == (right.tokens, 0)
        assert auditing.reset_prefix_cache()
        (again,) = auditing.generate([Request(prompt)])
        assert again.tokens == right.tokens
        assert again.num_cached_tokens < RESTORED
        counters = auditing.connector_counters()
        assert counters["connector_audit_mismatches"] == 1
        assert counters["connector_audited_pages"] > 1
        assert counters["connector_audit_max_difference"] > 0.1
        assert "kvstore: audit: a stored page is wrong and is discarded" in auditing.log_text()
        auditing.stop()
        assert service.leases_end()


def replace_one_page(folder: Path) -> None:
    """Give the first page of the prompt, one slice of it, other numbers and a right seal."""
    for file in sorted(folder.rglob("*.g*.s*")):
        record = read_record(file.read_bytes())
        if record.header.span.start == 0:
            break
    page = np.empty(record.header.decoded_bytes, np.uint8)
    decode_into(record.header.codec_chain, record.payload, memoryview(page))
    page.view(np.float32)[:] *= np.float32(-1.5)
    data = bytearray(HEADER_BYTES + max_payload_bytes(page.size))
    encoded = encode(record.header.codec_chain, memoryview(page), memoryview(data)[HEADER_BYTES:])
    sealed = seal(replace(record.header, codec_chain=encoded.chain), data[: HEADER_BYTES + encoded.payload_bytes])
    file.write_bytes(sealed.data)
