"""What a GPU does with records itself, in Triton's interpreter: digests equal xxhash's, and ranks load with it."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_128_digest

from benchmarks.gpu import contract
from benchmarks.gpu.kit import InlineStreams, Kit
from connector.canonical.runs import BlockRun
from connector.device.rows import CacheGeometry, RowIndexes, pack_indexes, plan_rows, scatter_rows
from kvstore.codec import RAW, TILES, Encoded, decode_into, encode
from kvstore.errors import InvalidRequest
from kvstore.format.record import open_record
from kvstore.model.keys import RecordKey
from tests.unit.connector.rank_harness import SOURCE, TARGET, fill, ranks_on
from tests.unit.connector.sharing_ranks import SharingBridge, load_prepared, pieces_of, use_streams

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Triton decides when it is imported whether it interprets, and other tests import it too."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_interpret) as process:
        yield process


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def test_each_way_is_tried(process: ProcessPoolExecutor) -> None:
    """What `kvstore doctor` shows: memory that may only be read is registered, and a way that fails says why."""
    works = {"pinned": "", "in_place": "", "kernels": "", "encoding": ""}
    assert process.submit(_problems, False).result() == works
    assert process.submit(_problems, True).result() == {
        **works,
        "in_place": "InvalidRequest: the GPU cannot read memory of the service",
    }


class _Refusing(InlineStreams):
    def register(self, address: int, num_bytes: int) -> None:
        raise InvalidRequest("the GPU cannot read memory of the service")


def _problems(refuses: bool) -> dict[str, str]:
    from connector.device.paths import try_paths

    return {path.name: path.problem for path in try_paths(_Refusing() if refuses else InlineStreams())}


@pytest.mark.parametrize("seed", range(3))
def test_digests_are_those_of_xxhash(process: ProcessPoolExecutor, seed: int) -> None:
    """Payloads of any size that fits: all right ones are right, and each with one flipped bit is wrong."""
    process.submit(_compare_digests, seed).result()


def _compare_digests(seed: int) -> None:
    from connector.device.kernels import DeviceKernels

    chance = random.Random(seed)
    assert not any(map(DeviceKernels.fits, (0, 248, 4088, 4100)))
    sizes = [4096, 4104, 5120, 17_408, 17_416, *(8 * chance.randrange(512, 2500) for _ in range(5))]
    memory = torch.frombuffer(bytearray(chance.randbytes(sum(sizes) + 512)), dtype=torch.uint8)
    start = 8 * chance.randrange(64)
    digests = []
    for size in sizes:
        assert DeviceKernels.fits(size)
        digests.append((start, size, xxh3_128_digest(memory[start : start + size].numpy())))
        start += size
    kernels = DeviceKernels(InlineStreams(), memory.numel())
    kernels.order(memory[: memory.numel() // 8 * 8], digests, [])
    assert kernels.num_wrong == 0
    for start, size, _ in digests[::2]:
        memory[start + chance.randrange(size)] ^= 1 << chance.randrange(8)
    kernels.order(memory[: memory.numel() // 8 * 8], digests, [])
    assert kernels.num_wrong == len(digests[::2])


def test_rows_are_copied_in_every_layout(process: ProcessPoolExecutor) -> None:
    """Pages are exactly their tokens, and no other byte of the cache changes."""
    assert process.submit(_wrong_layouts).result() == []


def _wrong_layouts() -> list[str]:
    from connector.device.kernels import DeviceKernels

    kit = Kit("contract")
    kit.__dict__["kernels"] = DeviceKernels
    shared = [layout for layout in contract.RECORDED if layout.name in contract.HYBRID]
    layouts = [[layout] for layout in contract.RECORDED if layout not in shared] + [shared]
    return [some[0].name for seed, some in enumerate(layouts) if not contract.check(kit, some, seed)]


def test_rows_are_those_of_the_tensor_operations(process: ProcessPoolExecutor) -> None:
    """Random runs of one or more shapes, several tables, and parts of pages; several programs copy a page."""
    num_shapes = [process.submit(_compare_rows, seed).result() for seed in range(12)]
    assert 1 in num_shapes and max(num_shapes) > 1


def _compare_rows(seed: int) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("connector.device.row_kernels.ROWS_INTERPRETED", 8)
        return _compared_shapes(seed)


def _compared_shapes(seed: int) -> int:
    from connector.device import row_kernels

    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    unit, num_blocks, num_layers = chance.choice([8, 24, 72, 520]), chance.randint(1, 3), chance.randint(1, 3)
    shapes = [(chance.randint(1, 3), chance.randint(1, 3), chance.randint(0, 1)) for _ in range(num_layers)]
    if seed % 2:
        shapes = shapes[:1] * num_layers
    page_block = sum(units * repeat for units, repeat, _ in shapes) * unit
    is_by_block, runs, start = chance.random() < 0.5, [], 0
    for layer, (units, repeat, gap) in enumerate(shapes):
        size = units * unit
        stride = page_block if is_by_block else size * repeat
        runs.append(BlockRun(layer, 0, size, start, stride, repeat, size + gap * unit, size))
        start += size * repeat if is_by_block else size * repeat * num_blocks
    cache_block = sum((units + gap) * repeat for units, repeat, gap in shapes) * unit
    starts = [
        sum((units + gap) * repeat for units, repeat, gap in shapes[:layer]) * unit for layer in range(num_layers)
    ]
    feeds = tuple(chance.randrange(2) for _ in shapes)
    geometry = CacheGeometry(tuple(starts), (cache_block,) * num_layers, feeds)
    plans = plan_rows(geometry, runs, page_block * num_blocks)
    first = chance.randrange(num_blocks)
    num_written = chance.randint(1, num_blocks - first)
    for first_block, some in ((first, num_written), (0, num_blocks)):
        tables = [chance.sample(range(20), 3 * some) for _ in range(2)]
        of_pages = [[table[page * some : (page + 1) * some] for table in tables] for page in range(3)]
        pages, cache = (
            torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            for size in (3 * page_block * num_blocks, 20 * cache_block + 3)
        )
        caches, read = [cache, cache.clone()], torch.zeros_like(pages)
        for plan in plans:
            indexes = pack_indexes(
                [plan] * 3,
                of_pages,
                first_block=first_block,
                is_alone=len(plans) == 1,
                allocate=InlineStreams().host_memory,
            )
            scatter_rows(caches[0], indexes, pages)
            row_kernels.copy_rows(caches[1], indexes, pages, to_cache=True)
            row_kernels.copy_rows(caches[1], indexes, read, to_cache=False)
        assert torch.equal(*caches)
    assert torch.equal(read, pages)  # the last time whole pages were written
    return len(plans)


def test_a_page_of_any_number_of_rows(process: ProcessPoolExecutor) -> None:
    """CUDA has at most 65,535 programs in all dimensions but the first; a page of 154 MiB may have more."""
    assert process.submit(_large_grid).result() > 65_535


def _large_grid() -> int:
    from connector.device import row_kernels

    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_kernels, "copy_rows_kernel", Kernel())
        data = torch.zeros(64, dtype=torch.uint8)
        indexes = RowIndexes(data.view(torch.int64), ((2, 1, 1),), 64, 100_000_000)
        row_kernels.copy_rows(data, indexes, data, to_cache=True)
    [(num_programs, *others)] = grids
    assert max(others, default=0) <= 65_535
    return num_programs


@pytest.mark.parametrize("compression", ["none", "tiles"])
def test_a_rank_loads_with_them(process: ProcessPoolExecutor, tmp_path: Path, compression: str) -> None:
    """All records of a prompt are read where they are; a damaged one is found, and its load fails."""
    process.submit(_load, tmp_path, compression).result()


def test_a_rank_whose_device_does_not_encode(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Processors encode its tiles, the log says why, and the device still reads and decodes them in place."""
    said, share = process.submit(_load_without_encoder, tmp_path, at_start=True).result()
    assert "the processor encodes tiles, not the GPU: RuntimeError: no encoder" in said
    assert share == 1.0


def test_a_rank_whose_device_stops_encoding(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Its kernels fail in the middle of a step, once: no page is lost, and processors encode from then on."""
    said, share = process.submit(_load_without_encoder, tmp_path, at_start=False).result()
    assert said == "kvstore: the GPU could not encode tiles, processors do it from now on"
    assert share == 1.0


def _load_without_encoder(folder: Path, *, at_start: bool) -> tuple[str, float]:
    from connector.device import kernels

    said: list[str] = []

    def refuse(*_: object) -> None:
        raise RuntimeError("no encoder")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("kvstore.tiers.memory.ARENA_BYTES_MIN", 1)
        if at_start:
            monkeypatch.setattr(kernels, "check_encoding", refuse)
        monkeypatch.setattr(
            logging.getLogger("vllm.kvstore"), "warning", lambda text, *values, **_: said.append(text % values)
        )
        use_streams(monkeypatch, kernels=kernels.DeviceKernels)
        bridge = SharingBridge(folder)
        try:
            with ranks_on(bridge) as make:
                shape = {"element_bytes": 2, "channels": 64, "compression": "tiles"}
                with torch.inference_mode():
                    source, target = fill(make(**shape)), make(seed=2, **shape)
                    if not at_start:
                        monkeypatch.setattr(kernels.DeviceKernels, "encode", staticmethod(refuse))
                    source.save()
                lease, pieces = pieces_of(target)
                assert {_check_written(bridge, piece.key) for piece in pieces} == {TILES}
                assert load_prepared(target, lease, pieces)
                assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
                in_place = target.meters.get("connector_loaded_in_place_bytes")
                return " ".join(said), in_place / target.meters.get("connector_loaded_bytes")
        finally:
            bridge.close()


def _encode_raw(chain: int, source: memoryview, target: memoryview, **changes: int) -> Encoded:
    assert chain == RAW, "a processor encodes what a device has"
    return encode(chain, source, target, **changes)


def _check_written(bridge: SharingBridge, key: RecordKey) -> int:
    """The chain of a record, whose payload is what numpy makes of its page."""
    record = open_record(bridge.record_bytes(key), key)
    page, payload = (bytearray(record.header.decoded_bytes) for _ in range(2))
    decode_into(record.header.codec_chain, record.payload, page)
    encoded = encode(TILES, page, payload)
    assert (encoded.chain, payload[: encoded.payload_bytes]) == (record.header.codec_chain, record.payload)
    return encoded.chain


def _load(folder: Path, compression: str) -> None:
    from connector.device.kernels import DeviceKernels

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("kvstore.tiers.memory.ARENA_BYTES_MIN", 1)  # the records of these tests are small
        use_streams(monkeypatch, kernels=DeviceKernels)
        bridge = SharingBridge(folder)
        try:
            with ranks_on(bridge) as make:
                shape = {"element_bytes": 2, "channels": 64, "compression": compression}
                with torch.inference_mode():  # as vLLM registers its caches; codec threads are not in it
                    source, target = make(**shape), make(seed=2, **shape)
                    fill(source)
                    for layer in source.layers:  # the first page gains nothing
                        layer[list(SOURCE[:4])] = (
                            torch.randint(-(1 << 15), 1 << 15, layer[:4].shape).short().view(layer.dtype)
                        )
                    monkeypatch.setattr("connector.worker.saver.encode", _encode_raw)
                    source.save()
                lease, pieces = pieces_of(target)
                if compression == "tiles":
                    assert {_check_written(bridge, piece.key) for piece in pieces} == {RAW, TILES}
                assert load_prepared(target, lease, pieces)
                assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
                loaded = target.meters.get("connector_loaded_bytes")
                assert target.meters.get("connector_loaded_in_place_bytes") == loaded > 0
                bridge.record_bytes(pieces[2].key)[3000] ^= 4
                assert not load_prepared(target, lease, pieces)
                assert target.meters.get("connector_corrupt_records") == 1
        finally:
            bridge.close()
