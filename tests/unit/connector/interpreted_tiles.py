"""Runs the kernels of `connector.device.tiles` in a process of its own, in Triton's interpreter.

Triton decides when it is imported whether its functions are interpreted, and other tests import it too.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from kvstore.codec.tiles import TilesHead
from kvstore.errors import InternalError

_GUARD = 64
_GUARD_BYTE = 0xA5


class Kernels:
    """The kernels, with bytes in and out. Each call checks that nothing beside its targets was written."""

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process

    def decode(self, payloads: Sequence[bytes], heads: Sequence[TilesHead]) -> tuple[list[bytes], int]:
        """What payloads decode to with one launch, and how many tiles are wrong."""
        return self._process.submit(_decode, payloads, heads).result()

    def encode(self, sources: Sequence[bytes]) -> list[bytes]:
        """The payload of each page; empty: it is stored raw."""
        return self._process.submit(_encode, sources).result()

    def encode_together(self, sources: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """As `encode`, of pages of one size with the launches of one; with each payload all that was written there."""
        return self._process.submit(_encode_together, sources).result()

    def misuses(self) -> list[str]:
        """What is said of tensors of other sizes, types and places than the kernels take."""
        return self._process.submit(_misuses).result()


@contextmanager
def interpreted_kernels() -> Iterator[Kernels]:
    """The kernels in a process that lives as long as the context."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_interpret) as process:
        yield Kernels(process)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _memory(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Aligned memory, and the memory around it too, all of the guard's bytes."""
    around = torch.full((num_bytes + 3 * _GUARD,), _GUARD_BYTE, dtype=torch.uint8)
    start = _GUARD + -around.data_ptr() % _GUARD
    return around[start : start + num_bytes], around


def _holding(content: bytes) -> torch.Tensor:
    memory, _ = _memory(len(content))
    memory.numpy()[:] = np.frombuffer(content, np.uint8)
    return memory


def _is_untouched(memory: torch.Tensor, around: torch.Tensor) -> bool:
    start = memory.data_ptr() - around.data_ptr()
    beside = torch.cat([around[:start], around[start + memory.numel() :]])
    return bool((beside == _GUARD_BYTE).all())


def _decode(payloads: Sequence[bytes], heads: Sequence[TilesHead]) -> tuple[list[bytes], int]:
    from connector.device.tiles import decode

    targets = [_memory(head.decoded_bytes) for head in heads]
    verdict = torch.zeros(1, dtype=torch.int32)
    decode([_holding(payload) for payload in payloads], [memory for memory, _ in targets], heads, verdict)
    assert all(_is_untouched(*target) for target in targets), "a kernel wrote beside its target"
    return [memory.numpy().tobytes() for memory, _ in targets], int(verdict)


def _encode_together(sources: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    from connector.device.tiles import encode

    page_bytes = len(sources[0])
    memory, around = _memory(page_bytes * len(sources))
    result = torch.full((len(sources),), -1, dtype=torch.int32)
    encode(_holding(b"".join(sources)), memory, result)
    assert _is_untouched(memory, around), "a kernel wrote beside its target"
    targets = [page.numpy().tobytes() for page in memory.split(page_bytes)]
    return [(target[:size], target) for target, size in zip(targets, result.tolist(), strict=True)]


def _encode(sources: Sequence[bytes]) -> list[bytes]:
    from connector.device.tiles import encode

    payloads = []
    for source in sources:
        memory, around = _memory(len(source))
        result = torch.full((1,), -1, dtype=torch.int32)
        encode(_holding(source), memory, result)
        assert _is_untouched(memory, around), "a kernel wrote beside its target"
        payloads.append(memory[: int(result)].numpy().tobytes())
    return payloads


def _misuses() -> list[str]:
    from connector.device.tiles import encode

    page, _ = _memory(8193)
    result = torch.zeros(1, dtype=torch.int32)
    said = []
    for source, target in (
        (page[:8192], page[:8191]),
        (page[1:], page[:8192]),
        (page[:8192].view(torch.int16), page[:4096]),
        (page[:8192:2], page[:4096]),
        (page[:8192].to("meta"), page[:8192]),
    ):
        try:
            encode(source, target, result)
        except InternalError as error:
            said.append(str(error))
    return said
