"""The order that copies keep between the engine's kernels, the ring and host memory, on streams that run late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvstore.errors import Unavailable
from tests.unit.connector.simulated_streams import PAGE_BYTES, Engine, SimulatedEvent, SimulatedStreams, WrongBytes

SEEDS = range(150)
STEPS = 60


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_no_order_of_streams_shows_wrong_bytes(element_bytes: int) -> None:
    """Saves, loads and kernels on the same blocks: every page, every kernel and every block sees what it should."""
    engines = []
    for seed in SEEDS:
        engine = Engine(seed, element_bytes=element_bytes)
        assert engine.width == element_bytes
        engine.run(STEPS)
        engines.append(engine)
    # the runs were no easy ones: saves that found the ring full, and many that did not
    assert sum(engine.num_refused for engine in engines) > 50
    assert sum(engine.num_saved for engine in engines) > 500
    assert sum(engine.num_loaded for engine in engines) > 500


def test_the_engine_never_waits_for_the_device() -> None:
    """With a device that does nothing at all, gathers and fences return; saves are refused once the ring is full."""
    streams = SimulatedStreams(0)
    streams.eagerness = 0.0
    engine = Engine(0, streams)
    for _ in range(12):
        engine.write()
        engine.start_load()
        engine.save()
    assert engine.num_refused > 0 and len(engine.saves) > 1
    engine.run(0)


def test_a_load_waits_for_nothing_after_its_fence() -> None:
    """The forward of the step that gave out the blocks is ordered behind the fence and does not end: the load does."""
    streams = SimulatedStreams(0)
    engine = Engine(0, streams)
    engine.write()
    engine.start_load()
    streams.computing.wait(SimulatedEvent(streams))  # a forward that never ends
    engine.finish_load()
    assert engine.num_loaded == 1


def test_only_the_scatter_waits_for_the_fence() -> None:
    """While what the fence stands for still runs, the page's bytes have arrived on the device; no block has changed."""
    streams = SimulatedStreams(0)
    engine = Engine(0, streams)
    streams.computing.wait(SimulatedEvent(streams))
    engine.start_load()
    [load] = engine.loads
    lane = engine.device.placer.lanes[-1]  # the one that the load will take
    with pytest.raises(AssertionError, match="waits for itself"):
        engine.finish_load()
    assert lane.memory[:PAGE_BYTES].numpy().tobytes() == load.content
    assert [engine.seen(block) for block in load.blocks] == [engine.content[block] for block in load.blocks]


def test_after_an_error_nothing_is_written_later() -> None:
    """Two pages are ordered together, and ordering the second one's copy fails. When that is known, the first one's
    copy is done: its blocks may be given to others.
    """
    streams = SimulatedStreams(0)
    streams.eagerness = 0.0
    engine, stream = Engine(0, streams), streams.all[-1]
    order, num_orders = stream.run, 0

    def run(work: Callable[[], None]) -> None:
        nonlocal num_orders
        num_orders += 1
        if num_orders == 4:  # two copies to the GPU, then one to the blocks
            raise torch.OutOfMemoryError
        order(work)

    stream.run = run  # type: ignore[method-assign]
    content = torch.full((2, PAGE_BYTES), 7, dtype=torch.uint8)
    pages = [engine.placement([1, 2], content[0]), engine.placement([3, 4], content[1])]
    with pytest.raises(torch.OutOfMemoryError):
        engine.device.placer.lanes[-1].load(pages)
    written = [set(engine.seen(block)) for block in (1, 2, 3, 4)]
    assert written[:2] == [{7}, {7}] and {7} not in written[2:]
    streams.run_all()
    assert [set(engine.seen(block)) for block in (1, 2, 3, 4)] == written


def test_a_page_whose_check_fails_is_not_written() -> None:
    """Of two placements in one lane the one whose source has changed fails, and the other is placed."""
    streams = SimulatedStreams(0)
    streams.eagerness = 0.0
    engine = Engine(0, streams)
    before = [engine.seen(block) for block in (1, 2, 3, 4)]
    content = torch.full((2, PAGE_BYTES), 7, dtype=torch.uint8)

    def check() -> None:
        assert [engine.seen(block) for block in (1, 2, 3, 4)] == before
        raise Unavailable("reused")

    reused, other = engine.placement([1, 2], content[0], check), engine.placement([3, 4], content[1])
    engine.device.placer.lanes[-1].load([reused, other])
    assert isinstance(reused.error, Unavailable) and other.error is None
    assert [engine.seen(block) for block in (1, 2)] == before[:2]
    assert [set(engine.seen(block)) for block in (3, 4)] == [{7}, {7}]


def without_drain_order(streams: SimulatedStreams) -> None:
    drain = streams.all[1]
    drain.wait = lambda event: None  # type: ignore[method-assign]


def without_fence(streams: SimulatedStreams) -> None:
    for lane in streams.all[2:]:
        lane.wait = lambda event: None  # type: ignore[method-assign]


def without_slot_order(streams: SimulatedStreams) -> None:
    SimulatedEvent.is_done = lambda self: True  # type: ignore[method-assign]


def without_waiting_on_the_host(streams: SimulatedStreams) -> None:
    SimulatedEvent.wait = lambda self: None  # type: ignore[method-assign]


def with_the_gather_beside_the_compute_stream(streams: SimulatedStreams) -> None:
    aside = streams.side()
    streams.compute = lambda: aside  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "broken",
    [
        without_drain_order,
        without_fence,
        without_slot_order,
        without_waiting_on_the_host,
        with_the_gather_beside_the_compute_stream,
    ],
    ids=lambda broken: broken.__name__,
)
def test_every_order_is_needed(broken: Callable[[SimulatedStreams], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one order away, and the simulation finds wrong bytes: it would have found them in our code as well."""
    monkeypatch.setattr(SimulatedEvent, "is_done", SimulatedEvent.is_done)  # undone after the test
    monkeypatch.setattr(SimulatedEvent, "wait", SimulatedEvent.wait)
    found = 0
    for seed in SEEDS:
        engine = Engine(seed)
        broken(engine.streams)
        try:
            engine.run(STEPS)
        except WrongBytes:
            found += 1
    assert found > 0
