"""Stage 1: what the machine does with plain copies, and what it takes to have memory that the GPU can read."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.gpu.kit import GB, Kit

__all__ = ["run", "to_device_gb_s"]

_READ_ONLY = 8
"""cudaHostRegisterReadOnly."""


def run(kit: Kit) -> None:
    """Copies first, then the memory they need."""
    num_bytes = kit.sized(1 << 30, 1 << 24)
    near, other = kit.streams.device_memory(num_bytes), kit.streams.device_memory(num_bytes)
    with kit.clock() as taken:
        pinned = kit.streams.host_memory(num_bytes)
    kit.tell("torch pins", seconds_per_gib=taken[0] * (1 << 30) / num_bytes)
    with kit.clock() as taken:
        arena = kit.streams.host_arena(num_bytes)
    kit.tell("one piece near the GPU is pinned", seconds_per_gib=taken[0] * (1 << 30) / num_bytes)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    up, down = kit.streams.side(), kit.streams.side()

    def to_device(source: torch.Tensor) -> None:
        up.run(lambda: near.copy_(source, non_blocking=True))

    def to_host() -> None:
        down.run(lambda: arena.copy_(other, non_blocking=True))

    def both() -> None:
        to_device(pinned)
        to_host()

    for name, work, moved in (
        ("pinned to GPU", lambda: to_device(pinned), num_bytes),
        ("one piece near the GPU to GPU", lambda: to_device(arena), num_bytes),
        ("GPU to pinned", to_host, num_bytes),
        ("both at once", both, 2 * num_bytes),
        ("pageable to GPU", lambda: to_device(pageable), num_bytes),
        ("memcpy on the host", lambda: arena.copy_(pageable), num_bytes),
    ):
        kit.tell(name, gb_s=moved / kit.seconds(work) / GB, bytes=moved)
    for sealed in (False, True):
        for flag in (0, _READ_ONLY):
            _register_file(kit, near, num_bytes, sealed=sealed, flag=flag)


def to_device_gb_s(kit: Kit, num_bytes: int) -> float:
    """The ceiling for a load: one copy of `num_bytes` pinned bytes to the GPU."""
    near, pinned = kit.streams.device_memory(num_bytes), kit.streams.host_memory(num_bytes)
    stream = kit.streams.side()
    return num_bytes / kit.seconds(lambda: stream.run(lambda: near.copy_(pinned, non_blocking=True))) / GB


def _register_file(kit: Kit, near: torch.Tensor, num_bytes: int, *, sealed: bool, flag: int) -> None:
    """Whether the GPU can read a file in memory that another process would share, and how fast."""
    name = f"a memory file, {'sealed and mapped read-only' if sealed else 'writable'}"
    name += ", registered as read-only" if flag else ""
    if not kit.is_gpu:
        kit.tell(name, skipped="no GPU")
        return
    answers: list[tuple[int, float]] = []

    def register(address: int) -> None:
        # on a thread of its own, since CUDA remembers a refusal for the thread that asked
        torch.cuda.set_device(kit.device)
        with kit.clock() as taken:
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, flag))
        answers.append((code, taken[0]))

    with _memory_file(num_bytes, sealed=sealed) as source:
        address = source.data_ptr()
        thread = threading.Thread(target=register, args=(address,))
        thread.start()
        thread.join()
        code, seconds = answers[0]
        if code:
            kit.tell(name, registered=False, cuda_error=code)
            return
        stream = kit.streams.side()
        taken_s = kit.seconds(lambda: stream.run(lambda: near.copy_(source, non_blocking=True)))
        is_equal = bool((near[:: num_bytes // 64].cpu() == source[:: num_bytes // 64]).all())
        torch.cuda.cudart().cudaHostUnregister(address)
        kit.tell(
            name,
            registered=True,
            seconds_per_gib=seconds * (1 << 30) / num_bytes,
            gb_s=num_bytes / taken_s / GB,
            equal=is_equal,
        )


@contextmanager
def _memory_file(num_bytes: int, *, sealed: bool) -> Iterator[torch.Tensor]:
    """A file in memory whose every page was touched, as this process maps it."""
    handle = os.memfd_create("gpu-kit", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, num_bytes)
        with mmap.mmap(handle, num_bytes) as writable:
            for start in range(0, num_bytes, mmap.PAGESIZE):
                writable[start : start + 8] = start.to_bytes(8, "little")
        if sealed:
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        protection = mmap.PROT_READ if sealed else mmap.PROT_READ | mmap.PROT_WRITE
        mapping = np.frombuffer(mmap.mmap(handle, num_bytes, prot=protection), np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a tensor over read-only memory, which is never written
            yield torch.from_numpy(mapping)
    finally:
        os.close(handle)
