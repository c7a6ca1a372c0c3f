"""What the copiers are made of: folded runs, rows, the ring, planes, and what each of them refuses."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.kit import InlineStreams
from connector.canonical.attention import AttentionPages
from connector.canonical.runs import BlockRun, LayerGeometry
from connector.canonical.slices import HeadGrid
from connector.device import gpu, open_device
from connector.device.base import PageGather, PageScatter
from connector.device.cpu import CpuDevice, LayerPlace, Strip, fold_runs
from connector.device.gpu import Ring, StreamDevice
from connector.device.rows import CacheGeometry, join_planes, plan_rows, split_planes
from connector.device.streams import DONE, Event, Stream
from connector.worker.side import num_codec_threads
from kvstore.errors import InternalError, InvalidRequest
from kvstore.testing.waiting import eventually
from tests.unit.connector.simulated_streams import PAGE_BYTES, Engine, SimulatedEvent, SimulatedStreams
from tests.unit.connector.support import make_facts

LAYERS = [LayerPlace(0, 1000 * layer, 96, 0) for layer in range(5)]


def pieces(strip: Strip) -> list[tuple[int, int, int]]:
    """(byte in the cache, byte in the page, bytes) of every piece of block 0."""
    found = []
    for index in product(*map(range, strip.counts)):
        here = strip.layer.start + strip.offset + sum(i * s for i, s in zip(index, strip.strides, strict=True))
        there = strip.page_offset + sum(i * s for i, s in zip(index, strip.page_strides, strict=True))
        found.append((here, there, strip.num_bytes))
    return found


@given(
    st.lists(
        st.builds(
            BlockRun,
            layer=st.integers(0, 4),
            block_offset=st.sampled_from([0, 8, 16]),
            num_bytes=st.sampled_from([8, 16]),
            page_offset=st.sampled_from([0, 8, 16, 64]),
            page_block_stride=st.just(32),
            repeat=st.integers(1, 3),
            block_stride=st.sampled_from([0, 24]),
            page_stride=st.sampled_from([0, 24]),
        ),
        max_size=12,
    )
)
def test_folding_changes_no_copy(runs: list[BlockRun]) -> None:
    """However runs follow each other, their strips mean the same pieces in the same order."""
    wanted = [
        (LAYERS[run.layer].start + run.block_offset + r * run.block_stride, run.page_offset + r * run.page_stride)
        for run in runs
        for r in range(run.repeat)
    ]
    assert [piece[:2] for strip in fold_runs(runs, LAYERS) for piece in pieces(strip)] == wanted


@pytest.mark.parametrize("heads_per_slice", [1, 2])
@pytest.mark.parametrize("token_stride", [32, 128])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_slice_is_one_strip(heads_per_slice: int, token_stride: int, parts: int) -> None:
    """In every layout of a model's cache a slice folds into one view, so that its copy costs what its bytes cost."""
    geometry = LayerGeometry(parts, 4096, 4, 1024 if token_stride == 32 else 32, 16, token_stride, 32)
    grid = HeadGrid(4, 4 // heads_per_slice)
    runs = AttentionPages(grid=grid, first_slice=0, layers=[geometry] * 5).runs(1, 3)
    assert len(runs) == 5 * heads_per_slice * parts
    assert len(fold_runs(runs, LAYERS)) == 1


def test_layers_elsewhere_do_not_fold() -> None:
    """Layers of other tables or allocations, or at uneven distances, stay apart."""
    runs = [BlockRun(layer, 0, 8, 8 * layer, 32) for layer in range(3)]
    assert len(fold_runs(runs, LAYERS)) == 1
    for odd in (LayerPlace(0, 1000, 96, 1), LayerPlace(1, 1000, 96, 0), LayerPlace(0, 1000, 64, 0)):
        assert len(fold_runs(runs, [LAYERS[0], odd, LAYERS[2]])) == 3
    assert len(fold_runs(runs, [LAYERS[0], LayerPlace(0, 1001, 96, 0), LAYERS[2]])) == 2


def test_runs_that_do_not_fill_the_page() -> None:
    """Runs with a gap, an overlap or half a block are refused before the device is told a row that is none."""
    geometry = CacheGeometry((0,), (64,), (0,))
    whole = [BlockRun(0, 0, 16, 0, 32), BlockRun(0, 16, 16, 16, 32)]
    assert plan_rows(geometry, whole, 96)[0].num_blocks == 3
    for runs, page_bytes in (
        (whole, 80),
        (whole, 0),
        ([whole[0], BlockRun(0, 16, 16, 0, 32)], 96),
        ([whole[0], BlockRun(0, 16, 16, 32, 32)], 64),
    ):
        with pytest.raises(InternalError):
            plan_rows(geometry, runs, page_bytes)


class Later:
    """An event that a test lets happen."""

    def __init__(self) -> None:
        self.happened = False

    def is_done(self) -> bool:
        return self.happened

    def wait(self) -> None:
        raise AssertionError("nobody waits for a slot")


@given(st.lists(st.integers(0, 1535), max_size=80))
def test_slots_never_overlap(steps: list[int]) -> None:
    """Slots in use share no byte; as long as they sum up to no more than the ring less one slot, there is room."""
    budget_bytes, slot_bytes_max = 4096, 1536
    ring, in_use = Ring(budget_bytes + slot_bytes_max), []
    for step in steps:
        if step < 500 and in_use:
            in_use.pop(0)[2].happened = True  # they end in the order they began
            continue
        num_bytes = step + 1
        start = ring.take(num_bytes)
        if start is None:
            assert sum(map(in_ring, [num_bytes, *(n for _, n, _ in in_use)])) > budget_bytes
            continue
        assert start % 512 == 0 and start + num_bytes <= ring.num_bytes
        assert all(start + num_bytes <= s or s + n <= start for s, n, _ in in_use)
        in_use.append((start, num_bytes, Later()))
        ring.fill(*in_use[-1])
    for _, _, event in in_use:
        event.happened = True
    assert ring.take(ring.num_bytes) == 0
    assert ring.take(ring.num_bytes + 1) is None


def in_ring(num_bytes: int) -> int:
    """Slots begin on multiples of 512."""
    return -(-num_bytes // 512) * 512


@given(st.integers(1, 3), st.integers(0, 20), st.sampled_from([2, 4]))
def test_planes(num_pages: int, num_elements: int, width: int) -> None:
    """Each page's bytes by their place in the element, the highest first; joining is the inverse."""
    size = num_elements * width
    source = torch.randint(0, 256, (num_pages * size,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    split_planes(source, num_pages, width, target)
    for page, planes in zip(source.view(num_pages, -1), target.view(num_pages, -1), strict=True):
        assert planes.tolist() == [byte for plane in reversed(range(width)) for byte in page[plane::width].tolist()]
    joined = torch.zeros_like(source)
    join_planes(target, num_pages, width, joined)
    assert torch.equal(joined, source)


def test_caches_of_inference_mode() -> None:
    """vLLM makes its caches in inference mode; a codec thread, which is not in it, writes to them all the same."""
    with torch.inference_mode():
        cache = torch.randint(0, 256, (4, 6, 32), dtype=torch.uint8)
        layers = list(cache[:2])
        device = StreamDevice(InlineStreams(), ring_bytes=1024, page_bytes_max=256, unit_bytes_min=1)
    copier = device.copier(layers, [0, 0], 2)
    runs = [BlockRun(layer, 0, 32, 64 * layer, 32) for layer in range(2)]
    page = device.host_memory(128)
    [ticket] = copier.gather_all([PageGather(runs, [[3, 5]], page)])
    assert ticket is not None
    ticket.wait()
    copier.scatter_all([PageScatter(runs, [[2, 1]], page)], device.fence())
    assert torch.equal(cache[:2, 2], cache[:2, 3])
    assert torch.equal(cache[:2, 1], cache[:2, 5])


def test_pages_that_do_not_fit_the_device() -> None:
    """A page larger than the device was told, tables of another length, and layers of two allocations are errors."""
    memory = torch.zeros(2, 9, 512, dtype=torch.uint8)
    device = StreamDevice(InlineStreams(), ring_bytes=512, page_bytes_max=512, unit_bytes_min=1)
    copier = device.copier(list(memory), [0, 0], 1)
    runs = [BlockRun(layer, 0, 512, 1024 * layer, 512) for layer in range(2)]
    with pytest.raises(InternalError):
        copier.gather_all([PageGather(runs, [[1, 2]], device.host_memory(2048))])
    with pytest.raises(InternalError):
        copier.gather_all([PageGather(runs, [[1, 2, 3]], device.host_memory(2048))])
    with pytest.raises(InternalError):
        copier.scatter_all([PageScatter(runs, [[1, 2]], device.host_memory(2048))], device.fence())
    with pytest.raises(InternalError):
        copier.scatter_all([PageScatter(runs, [[1, 2]], device.host_memory(2048), 1)], device.fence())
    with pytest.raises(InvalidRequest):
        device.copier([memory[0], torch.zeros(9, 512, dtype=torch.uint8)], [0, 0], 1)


def test_small_rows_are_refused_before_they_are_counted() -> None:
    """A layout in pieces of under 64 bytes is refused at its first copy, before an index of the page's size is made."""
    device = StreamDevice(InlineStreams(), ring_bytes=1 << 20, page_bytes_max=1 << 20)
    for piece, is_copied in ((64, True), (96, True), (48, False), (2, False)):
        layer = torch.zeros(9, 192 * 128, dtype=torch.uint8)
        copier = device.copier([layer], [0], 2)
        repeat = layer.shape[1] // (2 * piece)
        # every other piece, then the rest, as if heads lay between each other's tokens
        runs = [
            BlockRun(0, half * piece, piece, half * piece * repeat, layer.shape[1], repeat, 2 * piece, piece)
            for half in range(2)
        ]
        pages = [PageGather(runs, [[3]], device.host_memory(layer.shape[1]))]
        tracemalloc.start()
        try:
            if is_copied:
                assert copier.gather_all(pages) != [None]
            else:
                with pytest.raises(InvalidRequest, match=f"larger pieces unit_bytes={piece} "):
                    copier.gather_all(pages)
                assert tracemalloc.get_traced_memory()[1] < layer.shape[1]
        finally:
            tracemalloc.stop()


class Counted(InlineStreams):
    """Counts what is taken of the device's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        self.num_bytes += num_bytes
        return super().device_memory(num_bytes)


@pytest.mark.parametrize(("ring_mib", "page_mib"), [(256, 1), (256, 51), (308, 154), (2, 2)])
def test_memory_that_is_taken_of_a_gpu(ring_mib: int, page_mib: int) -> None:
    """As `docs/vllm.md` says: half of `pinned_bytes`, twice 32 MiB or the largest page, and three times 48 pages, but
    no more than 96 MiB each; or four pages if two need more than that."""
    streams, mib = Counted(), 1 << 20
    device = StreamDevice(streams, ring_bytes=ring_mib * mib, page_bytes_max=page_mib * mib)
    assert device.device_bytes == streams.num_bytes
    loads_mib = 3 * min(96, 48 * page_mib) if 2 * page_mib <= 96 else 4 * page_mib
    said = ring_mib + 2 * max(32, page_mib) + loads_mib
    assert streams.num_bytes <= said * mib
    if ring_mib >= 32:  # of a smaller ring it takes no more than it can use
        assert streams.num_bytes == said * mib


def test_the_device_of_a_cache() -> None:
    """Host memory has its copier, a GPU the one with streams; whatever else there may be is refused by name."""
    assert isinstance(open_device(torch.device("cpu"), ring_bytes=1, page_bytes_max=1), CpuDevice)
    with pytest.raises(InvalidRequest, match="meta"):
        open_device(torch.device("meta"), ring_bytes=1, page_bytes_max=1)


class HeldStreams(InlineStreams):
    """Streams on which nothing ends before `goes_on` is set.

    Attributes:
        runs: For each time that a thread waited for a stream how much was ordered on it since the time before.
        fails: Whether waiting for one raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.runs: list[int] = []
        self.fails = False

    def side(self) -> Stream:
        return HeldStream(self)


class HeldStream:
    def __init__(self, streams: HeldStreams) -> None:
        self._streams = streams
        self._num_runs = 0

    def run(self, work: Callable[[], None]) -> None:
        self._num_runs += 1
        work()

    def record(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return

    def settle(self) -> None:
        self._streams.runs.append(self._num_runs)
        self._num_runs = 0
        assert self._streams.goes_on.wait(10)
        if self._streams.fails:
            raise RuntimeError("CUDA error")


@pytest.mark.parametrize("fails", [False, True])
def test_one_thread_orders_what_waits(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads have the lanes. What ten others call with meanwhile is ordered together, as far as a lane has room:
    for four of the largest pages in planes, of two groups and several sizes. Each thread returns once its page is
    placed. Where copies fail, each thread has an error of its own. After that the lanes are free.
    """
    monkeypatch.setattr(gpu, "LANE_PAGES", 8)
    streams = HeldStreams()
    streams.fails = fails
    device = StreamDevice(streams, ring_bytes=512, page_bytes_max=512, unit_bytes_min=1)
    wide, narrow = torch.zeros(32, 512, dtype=torch.uint8), torch.zeros(32, 96, dtype=torch.uint8)
    copiers = [
        (device.copier([layer], [0], 2), [BlockRun(0, 0, layer.shape[1], 0, layer.shape[1])])
        for layer in (wide, narrow)
    ]
    pages = [torch.full((96 if number % 3 == 0 else 512,), number, dtype=torch.uint8) for number in range(16)]

    def place(number: int) -> None:
        copier, runs = copiers[number % 3 == 0]
        copier.scatter_all([PageScatter(runs, [[number]], pages[number])], device.fence())

    with ThreadPoolExecutor(13) as threads:
        having = [threads.submit(place, number) for number in (1, 2, 13)]
        eventually(lambda: len(streams.runs) == 3)
        waiting = [threads.submit(place, number) for number in range(3, 13)]
        eventually(lambda: len(vars(device.placer)["_waiting"]) == 10)
        streams.goes_on.set()
        errors = [each.exception(10) for each in (*having, *waiting)]
    if fails:
        assert {type(error) for error in errors} == {RuntimeError, InternalError}
        assert len(set(map(id, errors))) == 13
    else:
        assert errors == [None] * 13
    assert sum(streams.runs) == 2 * 13  # a copy and a scatter each
    assert max(streams.runs) == 2 * 4 and len(streams.runs) <= 3 + 4
    streams.fails = False
    place(14)
    for number in range(1, 15):
        assert (narrow if number % 3 == 0 else wide)[number].tolist() == pages[number].tolist()
    assert len(vars(device.placer)["_free"]) == 3


def test_a_page_behind_another_fence_waits_for_its_own_lane() -> None:
    """A page whose fence is done is not ordered together with one whose fence is not: it would wait for that too."""
    streams = SimulatedStreams(0)
    streams.eagerness = 0.0
    done, open_ = SimulatedEvent(streams, happened=True), SimulatedEvent(streams)
    source = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    engine = Engine(0, streams)
    lane = engine.device.placer.lanes[0]
    page, of_the_same_step, of_another = (
        engine.placement([1, 2], source, after=after) for after in (open_, open_, done)
    )
    assert lane.has_room([page], of_the_same_step)
    assert not lane.has_room([page], of_another)
    assert not lane.has_room([of_another], page)
    assert lane.has_room([of_another], of_another)


def test_pages_that_do_not_fit_a_lane_are_not_copied() -> None:
    """CUDA is given addresses: what does not fit would be written behind the lane's memory, wherever that is."""
    streams = SimulatedStreams(0)
    engine = Engine(0, streams)
    lane = engine.device.placer.lanes[0]
    before = lane.memory.clone()
    page = engine.placement([1, 2], torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    with pytest.raises(InternalError, match="pages must fit a lane"):
        lane.load([page] * (lane.memory.numel() // page.room_bytes + 1))
    streams.run_all()
    assert torch.equal(lane.memory, before)


@pytest.mark.parametrize(
    ("device", "ranks", "page_mib", "cores", "threads"),
    [
        ("cpu", 1, 4, 64, 4),
        ("cpu", 1, 4, 2, 2),
        ("cuda", 1, 4, 16, 8),
        ("cuda", 1, 4, 64, 8),
        ("cuda", 8, 4, 64, 4),
        ("cuda", 8, 4, 192, 8),
        ("cuda", 1, 24, 64, 5),
        ("cuda", 1, 154, 64, 4),
        ("cuda", 1, 4, 2, 2),
    ],
)
def test_threads_that_decode(device: str, ranks: int, page_mib: int, cores: int, threads: int) -> None:
    """Four, or on a GPU up to eight: half a core's share of each rank, and as memory for their pages allows."""
    facts = replace(make_facts(), device=device, machine_ranks=ranks)
    assert num_codec_threads(facts, page_mib << 20, cores) == threads
