"""What a GPU does with records itself, in Triton's interpreter: digests equal xxhash's, and ranks load with it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_128_digest

from benchmarks.gpu import contract
from benchmarks.gpu.kit import InlineStreams, Kit
from kvstore.errors import InvalidRequest
from tests.unit.connector.rank_harness import SOURCE, TARGET, ranks_on
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
    assert process.submit(_problems, False).result() == {"pinned": "", "in_place": "", "kernels": ""}
    assert process.submit(_problems, True).result() == {
        "pinned": "",
        "in_place": "InvalidRequest: the GPU cannot read memory of the service",
        "kernels": "",
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


@pytest.mark.parametrize("compression", ["none", "tiles"])
def test_a_rank_loads_with_them(process: ProcessPoolExecutor, tmp_path: Path, compression: str) -> None:
    """All records of a prompt are read where they are; a damaged one is found, and its load fails."""
    process.submit(_load, tmp_path, compression).result()


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
                    source.save()
                lease, pieces = pieces_of(target)
                assert load_prepared(target, lease, pieces)
                assert torch.equal(target.blocks(TARGET), source.blocks(SOURCE))
                loaded = target.meters.get("connector_loaded_bytes")
                assert target.meters.get("connector_loaded_in_place_bytes") == loaded > 0
                bridge.record_bytes(pieces[2].key)[3000] ^= 4
                assert not load_prepared(target, lease, pieces)
                assert target.meters.get("connector_corrupt_records") == 1
        finally:
            bridge.close()
