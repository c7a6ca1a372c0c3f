"""Loads whose records a device reads where they are in the service's memory: right bytes, or no byte in a block."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.gpu.kit import InlineStream, InlineStreams
from connector.device.registered import RegisteredMemory
from connector.device.streams import Stream
from connector.jobs import StepJobs
from connector.worker import loader
from kvstore.client import sharing
from kvstore.client.sharing import read_plain
from kvstore.errors import InvalidRequest
from kvstore.format.header_v1 import HEADER_BYTES
from kvstore.format.record import Record
from kvstore.runtime.arena import ArenaView
from kvstore.testing.waiting import eventually
from tests.unit.connector.device_contract import storage
from tests.unit.connector.rank_harness import SOURCE, TARGET, Make, Rank, ranks_on
from tests.unit.connector.sharing_ranks import SharingBridge, load_prepared, pieces_of, sharing_bridge, use_streams
from tests.unit.connector.support import MIB


class WatchedStreams(InlineStreams):
    """Streams that do work at once, and a moment before a lane's thread waits for what it has ordered.

    Attributes:
        before_settling: Called then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_settling: Callable[[], None] = lambda: None

    def side(self) -> Stream:
        return WatchedStream(self)


class WatchedStream(InlineStream):
    def __init__(self, streams: WatchedStreams) -> None:
        self._streams = streams

    def settle(self) -> None:
        self._streams.before_settling()


class Kernels:
    """A device that verifies digests, and finds as many wrong ones as it is told.

    Attributes:
        seen: Digests that it was given.
    """

    num_wrong = 0
    seen: ClassVar[list[bytes]] = []
    device_bytes = 0

    def __init__(self, *_: object) -> None:
        type(self).seen = []

    @staticmethod
    def fits(_: int) -> bool:
        return True

    @staticmethod
    def copies(_: int) -> bool:
        return False

    def order(self, _: torch.Tensor, digests: Sequence[tuple[int, int, bytes]], encoded: Sequence[object]) -> None:
        assert not encoded
        self.seen.extend(digest for _, _, digest in digests)


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharingBridge]:
    with sharing_bridge(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> WatchedStreams:
    made = WatchedStreams()
    use_streams(monkeypatch, made)
    return made


@pytest.fixture
def rank(bridge: SharingBridge, streams: WatchedStreams) -> Iterator[Make]:
    with ranks_on(bridge) as make:
        yield lambda **changes: make(**{"compression": "none", **changes})


def in_place(rank: Rank) -> int:
    return int(rank.meters.get("connector_loaded_in_place_bytes"))


def loaded(rank: Rank) -> int:
    return int(rank.meters.get("connector_loaded_bytes"))


def test_a_device_reads_whole_records_where_they_are(rank: Make) -> None:
    """The bytes are right, and no codec thread decodes any; compressed ones it does."""
    source, target = rank(), rank(seed=2)
    source.save()
    lease, pieces = pieces_of(target)
    assert load_prepared(target, lease, pieces)
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
    assert in_place(target) == loaded(target) > 0


def test_the_first_records_are_asked_for_by_themselves(
    rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long load asks for ever more at a time, and each piece is loaded once."""
    monkeypatch.setattr(loader, "FIRST_PIECES", 1)
    source, target = rank(), rank(seed=2)
    source.save()
    lease, pieces = pieces_of(target)
    assert 1 + 4 < len(pieces) <= 1 + 4 + 16
    assert load_prepared(target, lease, pieces)
    assert bridge.store.calls["load_many"] == 3
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
    assert in_place(target) == loaded(target) > 0


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_compressed_records_are_decoded_by_threads(rank: Make, element_bytes: int) -> None:
    """A fleet may mix both: records of an engine that compresses are loaded too."""
    shape = {"element_bytes": element_bytes}
    source, target = rank(compression="planes", **shape), rank(seed=2, **shape)
    source.layers[0].fill_(1)  # so that compressing gains something
    source.save()
    lease, pieces = pieces_of(target)
    assert load_prepared(target, lease, pieces)
    assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
    assert in_place(target) < loaded(target)


def test_memory_that_is_reused_before_its_check_reaches_no_block(
    rank: Make, bridge: SharingBridge, streams: WatchedStreams
) -> None:
    """The device has read a record, and its lease ends before the check: no byte is written, no record is blamed."""
    source, target = rank(), rank(seed=2)
    bridge.overwrite()  # so that all of the memory was used, and is registered
    before = [storage(layer) for layer in target.layers]
    overwrites: list[Callable[[], None]] = []

    def overwrite() -> None:
        if overwrites:
            overwrites.pop()()

    streams.before_settling = overwrite
    for index in range(12):
        source.save()
        lease, pieces = pieces_of(target)
        overwrites.append(bridge.overwrite)
        assert not load_prepared(target, lease, pieces[index : index + 1])
        assert not overwrites
        assert all(map(torch.equal, map(storage, target.layers), before))
    assert bridge.store.calls["discard"] == 0
    assert target.meters.get("connector_corrupt_records") == 0


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_damaged_header_is_the_records_fault_if_its_memory_was_not_reused(
    rank: Make, bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch, is_reused: bool
) -> None:
    """What a thread reads of a record that the device will copy is a header, whose damage costs the record alone; a
    record whose memory holds something else is not blamed.
    """
    source, target = rank(), rank(seed=2)
    source.save()
    lease, pieces = pieces_of(target)
    overwrites = [bridge.overwrite]

    def read_reused(*given: Any) -> Record:
        if overwrites:
            overwrites.pop()()
        return read_plain(*given)

    if is_reused:
        monkeypatch.setattr(sharing, "read_plain", read_reused)
    else:
        bridge.record_bytes(pieces[3].key)[30] ^= 1
    assert not load_prepared(target, lease, pieces[3:4])
    assert target.meters.get("connector_corrupt_records") == bridge.store.calls["discard"] == int(not is_reused)
    assert is_reused or pieces[3].key not in bridge.memory


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_device_finds_wrong_a_thread_verifies(
    bridge: SharingBridge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_damaged: bool,
) -> None:
    """The device says that something of a batch is wrong: the damaged record is found and discarded, and if there is
    none the load succeeds, with a warning.
    """
    monkeypatch.setattr(Kernels, "num_wrong", 1)
    use_streams(monkeypatch, kernels=Kernels)
    caplog.set_level(logging.WARNING, "vllm.kvstore")
    with ranks_on(bridge) as make:
        source, target = make(compression="none"), make(seed=2, compression="none")
        source.save()
        lease, pieces = pieces_of(target)
        if is_damaged:
            bridge.record_bytes(pieces[3].key)[HEADER_BYTES] ^= 1
        assert load_prepared(target, lease, pieces) != is_damaged
        assert (pieces[3].key in bridge.memory) != is_damaged
        assert target.meters.get("connector_corrupt_records") == int(is_damaged)
        assert in_place(target) == 0
        assert "the GPU found a damaged record" in caplog.text


def test_a_device_that_fails_at_this_is_no_longer_asked(
    bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ordering the verification raises: each load succeeds by way of host memory, and after some it is not tried."""

    class Failing(Kernels):
        num_orders = 0

        def order(self, *_: object) -> None:
            type(self).num_orders += 1
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    use_streams(monkeypatch, kernels=Failing)
    caplog.set_level(logging.WARNING, "vllm.kvstore")
    with ranks_on(bridge) as make:
        source, target = make(compression="none"), make(seed=2, compression="none")
        source.save()
        for _ in range(3):
            lease, pieces = pieces_of(target)
            assert load_prepared(target, lease, pieces)
            assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
            for layer in target.layers:
                layer.zero_()
        assert in_place(target) == 0
        assert "it is not tried again" in caplog.text
        tried = Failing.num_orders
        assert load_prepared(target, *pieces_of(target))
        assert Failing.num_orders == tried


def test_a_thread_verifies_nothing_that_the_device_verifies(
    bridge: SharingBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record's digest is given to the device, and no thread computes one."""
    use_streams(monkeypatch, kernels=Kernels)
    monkeypatch.setattr(loader, "verify_payload", lambda *_: pytest.fail("a thread verifies"))
    with ranks_on(bridge) as make:
        source, target = make(compression="none"), make(seed=2, compression="none")
        source.save()
        lease, pieces = pieces_of(target)
        assert load_prepared(target, lease, pieces)
        assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
        assert len(Kernels.seen) == len(pieces)


def test_loads_that_are_read_back_are_decoded_by_threads(rank: Make) -> None:
    """A read back compares blocks with pages in host memory."""
    source, target = rank(), rank(seed=2, audit_rate=1.0)
    source.save()
    (job,) = target.load_job(target.stage()).loads
    target.side.start_loads(StepJobs(loads=(replace(job, read_back=True),)))
    assert target.result() == ({"r"}, set())
    assert in_place(target) == 0


def test_memory_is_registered_once_the_engine_serves(rank: Make) -> None:
    """Not before, since it captures graphs then; and not by an engine that only saves."""
    source, saver = rank(), rank(mode="save")
    source.save()
    assert source.side.loader is not None and saver.side.loader is not None
    devices: list[Any] = [one.side.loader.device for one in (source, saver)]
    saver.side.begin_step(StepJobs())
    time.sleep(0.1)
    assert [device.registered.num_bytes for device in devices] == [0, 0]
    source.side.begin_step(StepJobs())
    eventually(lambda: devices[0].registered.num_bytes)
    assert devices[1].registered.num_bytes == 0


class CountedStreams(InlineStreams):
    """Streams that know what is registered.

    Attributes:
        registered: Sizes by address.
        refused_after: How many pieces can be registered.
        releases: Whether any can be released.
    """

    def __init__(self, refused_after: int = 1000) -> None:
        super().__init__()
        self.registered: dict[int, int] = {}
        self.refused_after = refused_after
        self.releases = True

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) >= self.refused_after:
            raise InvalidRequest("the GPU cannot read memory of the service", reason="error 1 of CUDA")
        self.registered[address] = num_bytes

    def release(self, address: int) -> None:
        if not self.releases:
            raise InvalidRequest("the GPU does not release memory")
        del self.registered[address]


def memory_of(num_bytes: int, name: str = "test") -> tuple[int, ArenaView]:
    """The descriptor of a memory file of which nothing has memory, and a view of it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor, ArenaView(descriptor, num_bytes)


def touch(descriptor: int, start: int, num_bytes: int) -> None:
    os.pwrite(descriptor, b"\1" * num_bytes, start)


def test_what_has_memory_is_registered_and_released() -> None:
    """Untouched memory is not, and nothing shorter than it may be; what gets memory later is, when it is adopted again.
    A record may be in two pieces. When another service's memory is adopted, that of the first stays registered as long
    as a tensor of it is there.
    """
    streams = CountedStreams()
    registered = RegisteredMemory(streams, least_bytes=32 << 10, most_bytes=MIB)
    file, first = memory_of(8 * MIB)
    touch(file, 0, MIB + MIB // 2)
    touch(file, 4 * MIB, 16 << 10)  # too short
    for _ in range(2):
        registered.adopt(first)
        assert registered.wait(10)
    assert sorted(streams.registered.values()) == [MIB // 2, MIB]
    for start, sizes in ((0, [100]), (MIB - 60, [60, 40]), (MIB, [100])):
        found = registered.at(first, start, 100)
        assert found is not None and [part.numel() for part in found] == sizes
        assert found[0].data_ptr() - min(streams.registered) == start
    for start, stop in ((MIB + MIB // 2 - 50, MIB + MIB // 2 + 50), (4 * MIB, 4 * MIB + 100), (7 * MIB, 7 * MIB + 1)):
        assert registered.at(first, start, stop - start) is None
    assert registered.at(first, 0, 0) is None
    touch(file, 4 * MIB, MIB)
    registered.adopt(first)
    assert registered.wait(10)
    assert registered.at(first, 4 * MIB, 100) is not None
    assert registered.num_bytes == 2 * MIB + MIB // 2
    assert first.resident(6 * MIB) is None
    other, second = memory_of(MIB)
    touch(other, 0, MIB)
    registered.adopt(second)
    assert registered.wait(10)
    assert registered.at(first, 0, 100) is None
    assert registered.at(second, 0, 100) is not None

    def is_registered(num_pieces: int) -> bool:
        registered.adopt(second)  # as it is called each second
        return len(streams.registered) == num_pieces

    eventually(lambda: is_registered(2))  # the piece that `found` is in, and the new one
    del found
    eventually(lambda: is_registered(1))


def test_nothing_is_shared_any_more() -> None:
    """The service's memory is released though no other is adopted, and after `close` nothing is registered."""
    streams = CountedStreams()
    registered = RegisteredMemory(streams, least_bytes=1, most_bytes=MIB)
    file, view = memory_of(2 * MIB, "ended-service")
    touch(file, 0, 2 * MIB)
    registered.adopt(view)
    assert registered.wait(10)
    assert len(streams.registered) == 2

    def is_released() -> bool:
        registered.adopt(None)  # as it is called each second
        return not streams.registered

    eventually(is_released)
    mapped = weakref.ref(view)
    del view
    gc.collect()
    assert mapped() is None
    assert not any("memfd:ended-service" in line for line in Path("/proc/self/maps").read_text().splitlines())
    registered.close()
    other, second = memory_of(MIB)
    touch(other, 0, MIB)
    registered.adopt(second)
    assert registered.at(second, 0, 100) is None
    assert not streams.registered


def test_small_holes_are_registered_too() -> None:
    """A record rarely ends where its memory does, and each one by itself may be too short."""
    streams = CountedStreams()
    registered = RegisteredMemory(streams, least_bytes=MIB, most_bytes=4 * MIB)
    file, view = memory_of(12 * MIB)
    for start in range(0, 6 * MIB, MIB // 2):
        touch(file, start, MIB // 2 - (8 << 10))
    touch(file, 9 * MIB, MIB // 2)
    registered.adopt(view)
    assert registered.wait(10)
    assert sorted(streams.registered.values()) == [2 * MIB - (8 << 10), 4 * MIB]
    assert registered.at(view, 5 * MIB, MIB - (8 << 10)) is not None


def test_memory_stays_mapped_while_it_is_registered() -> None:
    """What a load refers to is neither released by `close` nor unmapped when all else is gone: what would be mapped
    there next could not be used by CUDA. The rest is released.
    """
    streams = CountedStreams()
    registered = RegisteredMemory(streams, least_bytes=1, most_bytes=MIB)
    file, view = memory_of(2 * MIB, "still-registered")
    touch(file, 0, 2 * MIB)
    registered.adopt(view)
    assert registered.wait(10)
    first = min(streams.registered)
    of_a_load = registered.at(view, 0, 100)
    assert of_a_load is not None
    registered.close()
    assert list(streams.registered) == [first]
    del registered, view, of_a_load
    gc.collect()
    assert "memfd:still-registered" in Path("/proc/self/maps").read_text()


def test_memory_that_is_not_released_stays_mapped() -> None:
    """CUDA refuses to release it, once: it stays mapped for good, and later memory is registered and released."""
    streams = CountedStreams()
    registered = RegisteredMemory(streams, least_bytes=1, most_bytes=MIB)
    file, view = memory_of(MIB, "never-released")
    touch(file, 0, MIB)
    registered.adopt(view)
    assert registered.wait(10)
    streams.releases = False
    del view
    registered.adopt(None)
    eventually(lambda: registered.wait(1) and not registered.num_bytes)
    registered.adopt(None)
    assert registered.wait(10)
    assert "memfd:never-released" in Path("/proc/self/maps").read_text()
    streams.releases = True
    other, second = memory_of(MIB)
    touch(other, 0, MIB)
    registered.adopt(second)
    assert registered.wait(10)
    assert registered.num_bytes == MIB
    registered.close()
    assert len(streams.registered) == 1


def test_two_devices_of_one_process_register_the_same_memory() -> None:
    """Each releases what it has registered, and both go on."""
    streams = [CountedStreams(), CountedStreams()]
    both = [RegisteredMemory(one, least_bytes=1, most_bytes=MIB) for one in streams]
    file, view = memory_of(MIB)
    touch(file, 0, MIB)
    for _ in range(2):
        for registered in both:
            registered.adopt(view)
            assert registered.wait(10)
        assert [registered.num_bytes for registered in both] == [MIB, MIB]

        def are_released() -> bool:
            for registered in both:
                registered.adopt(None)
            return not any(one.registered for one in streams)

        eventually(are_released)
    for registered in both:
        registered.close()


def test_a_process_that_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be closed, or registers when it is adopted the next time."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closed, later = (RegisteredMemory(CountedStreams(), least_bytes=1, most_bytes=MIB) for _ in range(2))
    file, view = memory_of(MIB)
    touch(file, 0, MIB)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for registered in (closed, later):
            with pytest.raises(RuntimeError, match="can't start"):
                registered.adopt(view)
    closed.close()
    later.adopt(view)
    assert later.wait(10)
    assert later.num_bytes == MIB


def test_a_refusal_is_of_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one memory is refused another is adopted, and registered; the same one is tried again later."""
    monkeypatch.setattr("connector.device.registered.RETRY_S", 0.2)
    streams = CountedStreams(refused_after=0)
    registered = RegisteredMemory(streams, least_bytes=1, most_bytes=MIB)
    file, view = memory_of(MIB)
    touch(file, 0, MIB)
    registered.adopt(view)
    assert registered.wait(10)
    assert registered.num_bytes == 0
    streams.refused_after = 1000
    other, second = memory_of(MIB)
    touch(other, 0, MIB)
    registered.adopt(second)
    assert registered.wait(10)
    assert registered.num_bytes == MIB
    streams.refused_after = 0
    registered.adopt(view)
    assert registered.wait(10)
    streams.refused_after = 1000

    def is_registered() -> bool:
        registered.adopt(view)
        return registered.num_bytes == MIB

    eventually(is_registered)


def test_a_failed_load_keeps_no_memory(rank: Make, bridge: SharingBridge, streams: WatchedStreams) -> None:
    """When the lease of a load ends early nothing refers to the service's memory, without a run of the collector."""
    source, target = rank(), rank(seed=2)
    source.save()
    lease, pieces = pieces_of(target)
    assert target.side.loader is not None
    device: Any = target.side.loader.device
    counted = CountedStreams()
    device.registered = registered = RegisteredMemory(counted, least_bytes=1, most_bytes=100 << 10)
    overwrites = [bridge.overwrite]
    streams.before_settling = lambda: overwrites.pop()() if overwrites else None
    gc.collect()
    gc.disable()
    try:
        assert not load_prepared(target, lease, pieces[:1])
        assert counted.registered
        device.registered = RegisteredMemory(InlineStreams())  # from now on the loader's

        def is_released() -> bool:
            registered.adopt(None)
            return not counted.registered

        eventually(is_released)
    finally:
        gc.enable()


def test_memory_that_cannot_be_registered(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, with what follows; what was registered until then is read."""
    caplog.set_level(logging.WARNING, "vllm.kvstore")
    registered = RegisteredMemory(CountedStreams(refused_after=1), least_bytes=1, most_bytes=MIB)
    file, view = memory_of(2 * MIB)
    touch(file, 0, 2 * MIB)
    for _ in range(2):
        registered.adopt(view)
        assert registered.wait(10)
    assert registered.at(view, 0, 100) is not None
    assert registered.at(view, MIB, 100) is None
    [record] = caplog.records
    assert record.getMessage() == (
        "kvstore: the GPU cannot read memory of the service reason=error 1 of CUDA: "
        "records are copied in host memory first"
    )
