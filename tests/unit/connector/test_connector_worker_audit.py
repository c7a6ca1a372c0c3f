"""What a rank finds when it looks at its loads and at stored pages once more."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from connector.jobs import AuditJob, LoadPiece, RankReport, StepJobs
from kvstore.codec import decode_into, encode, max_payload_bytes
from kvstore.errors import Unavailable
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record, seal
from kvstore.testing.waiting import eventually
from tests.unit.connector.rank_harness import SOURCE, TARGET, Make, Rank
from tests.unit.connector.support import LoopBridge


def audit_of(rank: Rank) -> StepJobs:
    """Compare all records of the prompt with the blocks that it was saved from."""
    staged = rank.stage()
    assert staged.lease is not None
    pieces = tuple(
        LoadPiece(key, (stop - start) // 16, 0, (SOURCE[start // 16 : stop // 16],))
        for key, (start, stop) in zip(staged.keys, staged.spans, strict=True)
    )
    return StepJobs(audits=(AuditJob(7, staged.lease, pieces),))


def compare(rank: Rank, jobs: StepJobs) -> None:
    """Order the comparison, give the blocks away at once, and wait for the report."""
    rank.side.save(jobs)
    for layer in rank.layers:
        layer[list(SOURCE)] = 0
    reports: list[object] = []
    eventually(lambda: reports.append(rank.side.take_report()) or reports[-1] is not None)
    report = reports[-1]
    assert isinstance(report, RankReport)
    assert report.audits_done == {7: 1}


def resealed(record: Record, change: float) -> Record:
    """The record with other numbers, by a share of each, and a right seal."""
    page = np.empty(record.header.decoded_bytes, np.uint8)
    decode_into(record.header.codec_chain, record.payload, memoryview(page))
    with np.errstate(all="ignore"):  # blocks of random bytes: any number, and what is none
        page.view(np.float32)[:] *= np.float32(1 + change)
    data = bytearray(HEADER_BYTES + max_payload_bytes(page.size))
    encoded = encode(record.header.codec_chain, memoryview(page), memoryview(data)[HEADER_BYTES:])
    return seal(replace(record.header, codec_chain=encoded.chain), data[: HEADER_BYTES + encoded.payload_bytes])


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_right_pages_are_compared_and_found_equal(rank: Make, element_bytes: int) -> None:
    """Twelve slices of two pages and a tail differ from the blocks that they were saved from by nothing."""
    engine = rank(audit_rate=1.0, element_bytes=element_bytes)
    engine.save()
    compare(engine, audit_of(engine))
    assert engine.meters.get("connector_audited_pages") == 12
    assert engine.meters.get("connector_audit_max_difference") == 0.0
    assert engine.meters.get("connector_audit_mismatches") == 0


def test_a_wrong_page_with_a_right_seal_is_found(
    rank: Make, bridge: LoopBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers that no checksum can call wrong: the record is named, counted and never served again."""
    engine = rank(audit_rate=1.0)
    engine.save()
    jobs = audit_of(engine)
    wrong = jobs.audits[0].pieces[5].key
    bridge.store.on_load = lambda record: resealed(record, 0.01) if record.key == wrong else record
    with caplog.at_level(logging.ERROR):
        compare(engine, jobs)
    assert engine.meters.get("connector_audit_mismatches") == 1
    assert engine.meters.get("connector_audit_max_difference") > 1e-3
    assert str(wrong) in caplog.text and "difference=" in caplog.text
    assert bridge.store.calls["discard"] == 1
    assert wrong not in engine.stage().keys


def test_rounding_is_no_mismatch(rank: Make, bridge: LoopBridge) -> None:
    """Every record a little off, as another split of the prompt would leave it: nothing is discarded."""
    engine = rank(audit_rate=1.0)
    engine.save()
    bridge.store.on_load = lambda record: resealed(record, 1e-5)
    compare(engine, audit_of(engine))
    assert engine.meters.get("connector_audit_mismatches") == 0
    assert 0 < engine.meters.get("connector_audit_max_difference") < 1e-3
    assert bridge.store.calls["discard"] == 0


def test_records_that_cannot_be_read_are_skipped(rank: Make, bridge: LoopBridge) -> None:
    """The lease ended or the service is gone: reported, counted, and no buffer is lost."""
    engine = rank(audit_rate=1.0)
    engine.save()
    jobs = audit_of(engine)
    bridge.store.errors["load"] = Unavailable("told to")
    compare(engine, jobs)
    assert engine.meters.get("connector_audit_skipped") == 12
    assert engine.side.auditor is not None
    assert engine.side.auditor._pages.used_bytes == 0


def test_a_load_is_read_back(rank: Make) -> None:
    """Before it is reported: all pieces hold what was stored, and every buffer is free again."""
    source = rank()
    source.save()
    engine = rank(seed=2, audit_rate=1.0)
    load(engine)
    assert engine.result() == ({"r"}, set())
    assert engine.meters.get("connector_audit_read_back_pages") == 12
    assert engine.meters.get("connector_audit_mismatches") == 0
    assert engine.side.auditor is not None
    assert engine.side.auditor._pages.used_bytes == 0


def test_a_load_beyond_a_local_hit_is_read_back(rank: Make) -> None:
    """Only part of a page was scattered, and that part is compared."""
    source = rank()
    source.save()
    engine = rank(seed=2, audit_rate=1.0)
    load(engine, local_tokens=96)
    assert engine.result() == ({"r"}, set())
    assert engine.meters.get("connector_audit_read_back_pages") == 8
    assert engine.meters.get("connector_audit_mismatches") == 0


def test_blocks_that_do_not_hold_what_was_loaded(rank: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody wrote to a block between the load and its report: the load has failed and is recomputed."""
    source = rank()
    source.save()
    engine = rank(seed=2, audit_rate=1.0)
    load(engine)
    assert engine.side.loader is not None
    eventually(lambda: engine.side.loader._to_read_back)
    engine.layers[1][TARGET[3]] = 1
    with caplog.at_level(logging.ERROR):
        assert engine.result() == ({"r"}, {"r"})
    assert engine.meters.get("connector_audit_mismatches") == 4  # every head of the block
    assert "do not hold what was loaded" in caplog.text


def load(engine: Rank, local_tokens: int = 0) -> None:
    """Load the prompt and have it read back."""
    jobs = engine.load_job(engine.stage(local_tokens), local_tokens=local_tokens)
    (job,) = jobs.loads
    engine.side.start_loads(replace(jobs, loads=(replace(job, read_back=True),)))
