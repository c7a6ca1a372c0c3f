"""Stores that are wrong on purpose: the simulation must find each within a few seeds."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import pytest

from kvstore.api import Ack, LeaseId, Retention, SaveOutcome
from kvstore.catalog.redis.reconcile import Reconciler
from kvstore.errors import KVStoreError
from kvstore.format.record import Record, read_record, verify_payload
from kvstore.model.keys import RecordKey
from kvstore.runtime.deadline import Deadline
from kvstore.store.leases import LeaseTable
from kvstore.store.retention.cold_admission import ColdAdmission
from kvstore.store.saving import Saver
from kvstore.store.tiered import TieredStore
from kvstore.store.write_back.queue import WriteBack
from tests.simulation import tiers
from tests.simulation.cluster import simulate
from tests.simulation.oracle import Violation

# a world that ends in the middle leaves coroutines, which complain when they are collected
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_SEEDS_MAX = 12


class HastyStore(TieredStore):
    """Acknowledges first, and writes afterwards."""

    async def save(
        self,
        record: Record,
        *,
        ack: Ack = Ack.MEMORY,
        retention: Retention = Retention.NORMAL,
        deadline: Deadline,
    ) -> SaveOutcome:
        async def later() -> None:
            with suppress(KVStoreError):
                await super(HastyStore, self).save(record, ack=ack, retention=retention, deadline=deadline)

        verify_payload(record)
        self._context.background.spawn(later(), "a save")
        return SaveOutcome.STORED


def first_violation(store_class: type[TieredStore] = TieredStore) -> str:
    """What is found first."""
    try:
        for seed in range(_SEEDS_MAX):
            simulate(seed, store_class)
    except Violation as violation:
        return str(violation).splitlines()[0]
    finally:
        gc.collect()  # here, and not in the midst of another test
    pytest.fail(f"{_SEEDS_MAX} seeds found nothing")


def test_an_acknowledgement_before_the_write() -> None:
    """A save that returns before the record is where it must be."""
    assert "acknowledged" in first_violation(HastyStore)


def test_a_checksum_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that believes whatever its medium answers, as long as the header is fine."""

    async def believe(data: bytearray | memoryview, expected: RecordKey) -> Record | str:
        try:
            return read_record(data, expected)
        except KVStoreError as error:
            return str(error)

    monkeypatch.setattr(tiers, "open_off_loop", believe)
    assert "wrong bytes" in first_violation() or "nobody saved" in first_violation()


def test_a_lease_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for leases whose time has passed."""
    monkeypatch.setattr(LeaseTable, "sweep", lambda self: 0)
    assert "lease" in first_violation()


def test_a_lease_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder says that it is done, and nothing happens."""

    async def forget(self: TieredStore, lease: LeaseId) -> None:
        pass

    monkeypatch.setattr(TieredStore, "release", forget)
    assert "lease" in first_violation()


def test_a_queue_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write-back that takes whatever comes."""
    take: Any = WriteBack.offer_saved

    def offer_saved(self: WriteBack, record: Record, **how: bool) -> None:
        queued_bytes, self.queued_bytes = self.queued_bytes, 0
        try:
            take(self, record, **how)
        finally:
            self.queued_bytes += queued_bytes

    monkeypatch.setattr(WriteBack, "offer_saved", offer_saved)
    assert "budget" in first_violation()


def test_a_redis_that_nobody_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis evicts, and the catalog goes on telling of what it let go."""

    async def look(self: Reconciler) -> int:
        return 0

    monkeypatch.setattr(Reconciler, "check", look)
    assert "still tells of it" in first_violation()


def test_a_rule_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second sight is said, and everything is let in."""
    monkeypatch.setattr(ColdAdmission, "takes", lambda self, record: True)
    assert "nobody had seen before" in first_violation()


def test_what_is_seen_again_and_not_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was declined stays where it is, however often it is seen."""

    def copy_to_cold(self: Saver, *about: object) -> None:
        pass

    monkeypatch.setattr(Saver, "copy_to_cold", copy_to_cold)
    assert "seen again and again" in first_violation()
