"""What an engine reports of records that it computed and did not save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import connector.losses
from connector.logs import LOG
from connector.losses import LossReason, LossReporter
from kvstore.api import Outcome
from kvstore.model.keys import Boundary, PrefixHash
from kvstore.runtime.meters import Meters
from kvstore.store.explain.reasons import REASONS
from kvstore.testing.prompts import HYBRID, Prompt
from kvstore.testing.waiting import eventually
from tests.unit.connector.support import LoopBridge, bridge_to_memory
from tests.virtual_time import ManualClock

PROMPT = Prompt(HYBRID, "a", 256)


class Told(LoopBridge):
    """A bridge that keeps its store's reports."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []
        self.store.report = self.outcomes.append  # type: ignore[method-assign]


@pytest.fixture
def bridge() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def lose(
    losses: LossReporter, request_id: str, tokens: int, reason: LossReason = LossReason.BUSY, **more: object
) -> None:
    boundary = PROMPT.boundary(tokens)
    losses.report(
        request_id=request_id, namespace=PROMPT.namespace, boundary=boundary, group=1, reason=reason, **more  # type: ignore[arg-type]
    )  # fmt: skip


def test_every_word_is_known_to_the_service() -> None:
    """Each reason has a sentence there, and each such sentence a reason here."""
    assert set(LossReason) == {word for word in REASONS if word.startswith("save_")}


def test_a_loss_names_its_record(bridge: Told) -> None:
    """The boundary, the bit of the group, and how many slices; counted by its reason."""
    meters = Meters()
    lose(LossReporter(bridge, meters), "r", 64, LossReason.NO_ROOM, records=3, detail={"room_bytes": 5})
    [told] = eventually(lambda: bridge.outcomes)
    assert told.is_loss and told.num_lost == 3
    assert (told.request, told.namespace, told.stop, told.groups) == ("r", PROMPT.namespace, PROMPT.boundary(64), 0b10)
    assert (told.reason, told.detail["room_bytes"]) == ("save_no_room", 5)
    assert meters.get("connector_saves_lost", reason="save_no_room") == 3


def test_a_flood_is_summed_up(bridge: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred a second are reported one by one, the rest as one message for each reason. No record is left uncounted,
    and the next second has its own hundred.
    """
    monkeypatch.setattr(connector.losses, "_WINDOW_S", 0.2)
    clock = ManualClock()
    losses = LossReporter(bridge, Meters(), clock=clock)
    for number in range(1000):
        lose(losses, f"r {number}", 64, LossReason.BUSY if number % 2 else LossReason.FAILED)
    eventually(lambda: sum(told.num_lost for told in bridge.outcomes) == 1000)
    assert len(bridge.outcomes) == 102
    assert sorted(told.num_lost for told in bridge.outcomes)[-2:] == [450, 450]
    assert {told.request for told in bridge.outcomes[-2:]} == {"r 998", "r 999"}
    clock.now_s += 1.0
    lose(losses, "later", 64)
    eventually(lambda: bridge.outcomes[-1].request == "later")


def test_the_end_sends_what_is_summed_up(bridge: Told) -> None:
    """An engine that stops reports its last losses at once."""
    losses = LossReporter(bridge, Meters())
    for number in range(500):
        lose(losses, f"r {number}", 64, LossReason.STOPPED)
    losses.close()
    eventually(lambda: sum(told.num_lost for told in bridge.outcomes) == 500)
    losses.close()


def test_a_closed_store_and_one_that_stands_still(bridge: Told) -> None:
    """Neither slows nor fails a caller: a thousand losses are noted in a moment."""
    losses = LossReporter(bridge, Meters())
    with bridge.stopped():
        started_s = time.monotonic()
        for number in range(1000):
            lose(losses, f"r {number}", 64)
        assert time.monotonic() - started_s < 1.0
    bridge.refuse_further_work()
    for number in range(1000):
        lose(losses, f"r {number}", 64)
    losses.report_too_large(namespace=PROMPT.namespace, group=1, pinned_bytes=1, needs_bytes=2)
    losses.close()


def test_what_never_fits_is_repeated_and_logged_once(
    bridge: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted service learns of it too; a new namespace takes the place of the old one; the log names the value
    that would do.
    """
    monkeypatch.setattr(connector.losses, "_REPEAT_S", 0.01)
    monkeypatch.setattr(LOG, "propagate", True)
    losses = LossReporter(bridge, Meters())
    sizes = {"pinned_bytes": 128 << 20, "needs_bytes": (308 << 20) + 1}
    losses.report_too_large(namespace=PROMPT.namespace, group=1, **sizes)
    eventually(lambda: len(bridge.outcomes) > 3)
    told = bridge.outcomes[0]
    assert told.is_loss and (told.stop, told.num_lost, told.groups) == (None, 0, 0b10)
    assert [record.message for record in caplog.records if "never saved" in record.message] == [
        "kvstore: records of group 1 are never saved: one is larger than half of pinned_bytes, which is 134,217,728 "
        'bytes: set "pinned_bytes":"309MiB" or more in kv_connector_extra_config'
    ]
    other = replace(PROMPT, model="other").namespace
    losses.report_too_large(namespace=other, group=1, **sizes)
    eventually(lambda: bridge.outcomes[-1].namespace == other)
    num_told = len(bridge.outcomes)
    eventually(lambda: len(bridge.outcomes) > num_told + 3)
    assert {told.namespace for told in bridge.outcomes[num_told:]} == {other}
    losses.close()
    bridge.run(_nothing)
    num_told = len(bridge.outcomes)
    time.sleep(0.1)
    assert len(bridge.outcomes) == num_told


async def _nothing(store: object) -> None:
    pass


def test_a_real_store_counts_them() -> None:
    """Beside the requests, not among them."""
    with bridge_to_memory() as bridge:
        losses = LossReporter(bridge, Meters())
        losses.report(
            request_id="r",
            namespace=PROMPT.namespace,
            boundary=Boundary(64, PrefixHash(bytes(32))),
            group=0,
            reason=LossReason.BUSY,
            records=2,
        )
        meters = bridge.store.inner.meters
        eventually(lambda: meters.get("saves_lost", reason="save_busy") == 2)
        assert not any(name.startswith("requests") for name in meters.snapshot())
