"""`python -m benchmarks.ordering`: what a load to a GPU takes of the interpreter, without a GPU. See README.md.

A rank loads from a real service, on a device whose copies and kernels do nothing once the prompt is saved. What is left
is Python: requests, headers, plans, lists of addresses. It must take less time than the link needs for the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.kit import InlineStreams, Kit
from benchmarks.gpu.service import Model, Rank, hybrid, rank_on
from benchmarks.node import Node, temporary_folder
from benchmarks.node_plan import rate
from benchmarks.program import Column, count, names_of, run_rows
from connector.device.gpu import StreamDevice
from connector.device.rows import RowIndexes
from connector.device.streams import Piece
from connector.worker import side

__all__ = ["main"]

_MEMORY_BYTES = 256 << 20
_MODELS = ("8B", "hybrid")


@dataclass(frozen=True, slots=True)
class Row:
    """Loads of one prompt.

    Attributes:
        model: Whose cache.
        records: That a load reads.
        num_bytes: Of all of them.
        stage_ms: To have the prompt staged, all of it in the service's memory, and to plan its load, median.
        interpreter_ms: Processor time of all threads of this process for one load, median.
        load_ms: From its order to its report, median.
        link_ms: That the link needs for the bytes.
        ratio: `link_ms / interpreter_ms`. Below 1 the link waits for the interpreter.
    """

    model: str
    records: int
    num_bytes: int
    stage_ms: float
    interpreter_ms: float
    load_ms: float
    link_ms: float
    ratio: float


_TITLE = "loads to a device that copies nothing, beside the time of a link"
_COLUMNS: tuple[Column[Row], ...] = (
    ("model", lambda row: row.model),
    ("records", lambda row: f"{row.records:,}"),
    ("MB", lambda row: f"{row.num_bytes / 1e6:,.0f}"),
    ("stage, ms", lambda row: f"{row.stage_ms:.1f}"),
    ("interpreter, ms", lambda row: f"{row.interpreter_ms:.1f}"),
    ("us a record", lambda row: f"{row.interpreter_ms * 1e3 / row.records:.0f}"),
    ("load, ms", lambda row: f"{row.load_ms:.1f}"),
    ("link, ms", lambda row: f"{row.link_ms:.1f}"),
    ("ratio", lambda row: f"{row.ratio:.2f}"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status: 0, 1 after a failure, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ordering", description=__doc__)
    parser.add_argument("--models", type=names_of(_MODELS), default=_MODELS, metavar="NAME,...", help="by default both")
    parser.add_argument("--tokens", type=count, default=8192, metavar="COUNT", help="of the 8B model's prompt")
    parser.add_argument("--gpu-link", type=rate, default=55.0, metavar="RATE", help="by default 55GB/s")
    parser.add_argument("--repetitions", type=count, default=15, metavar="COUNT")
    return run_rows(parser, arguments, _measure, _TITLE, _COLUMNS)


def _measure(chosen: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    kit = _IdleKit()
    models = {"8B": Model("8B", max(chosen.tokens // 256, 1) * 256, 16, (32, 8, 256)), "hybrid": hybrid(kit)}
    return [_row(kit, models[name], chosen, say) for name in chosen.models]


def _row(kit: _IdleKit, model: Model, chosen: argparse.Namespace, say: Callable[[str], None]) -> Row:
    say(f"{model.name}: saving {model.num_bytes / 1e6:,.0f} MB")
    kit.streams.is_idle = False
    with (
        patch.object(side, "open_device", kit.open_device),
        temporary_folder() as folder,
        Node(folder, "service", memory_bytes=2 * model.num_bytes + _MEMORY_BYTES) as node,
        rank_on(kit, model, node.url, compression="none") as rank,
    ):
        rank.fill()
        rank.save()
        rank.wait_registered()
        rank.load_once(rank.prepare("compared"))
        rank.check()
        kit.streams.is_idle = True
        say(f"{model.name}: loading it {chosen.repetitions} times")
        times = [_load(rank, number) for number in range(chosen.repetitions)]
        records = len(rank.prepare("counted").loads[0].pieces)
    stage_ms, interpreter_ms, load_ms = (statistics.median(each) * 1e3 for each in zip(*times, strict=True))
    link_ms = model.num_bytes / (chosen.gpu_link * 1e6)
    return Row(
        model.name, records, model.num_bytes, stage_ms, interpreter_ms, load_ms, link_ms, link_ms / interpreter_ms
    )


def _load(rank: Rank, number: int) -> tuple[float, float, float]:
    """Seconds of the stage, of this process' processors for the load, and of the load."""
    began_s = time.perf_counter()
    jobs = rank.prepare(f"request {number}")
    stage_s = time.perf_counter() - began_s
    began_s = time.process_time()
    load_s = rank.load_once(jobs)
    return stage_s, time.process_time() - began_s, load_s


class _IdleStreams(InlineStreams):
    """Streams in host memory.

    Attributes:
        is_idle: Whether copies are only ordered.
    """

    is_idle = False

    def copy_in(self, memory: torch.Tensor, pieces: Sequence[Piece]) -> None:
        if not self.is_idle:
            super().copy_in(memory, pieces)
            return
        address = memory.data_ptr()  # the lists that CUDA is given
        [address + start for start, _ in pieces]
        [(source.data_ptr(), source.nbytes) for _, source in pieces]


class _IdleKit(Kit):
    """Sizes of a GPU, in host memory."""

    streams: _IdleStreams

    def __init__(self) -> None:
        super().__init__("ordering")
        self.is_gpu, self.streams = False, _IdleStreams()

    def sized(self, gpu: Any, host: Any) -> Any:
        return gpu

    def tell(self, name: str, **values: Any) -> None:
        pass

    def open_device(self, _: torch.device, *, ring_bytes: int, page_bytes_max: int) -> StreamDevice:
        """A device whose kernels copy no row while the streams are idle, and find every record right."""
        streams = self.streams

        class Kernels:
            device_bytes = num_wrong = 0

            def __init__(self, *_: object) -> None: ...

            @staticmethod
            def fits(_: int) -> bool:
                return True

            @staticmethod
            def copies(_: int) -> bool:
                return streams.is_idle

            @staticmethod
            def copy_rows(cache: torch.Tensor, indexes: RowIndexes, pages: torch.Tensor, *, to_cache: bool) -> None: ...

            def order(self, *_: object) -> None: ...

        kernels: Any = Kernels
        return StreamDevice(streams, ring_bytes=ring_bytes, page_bytes_max=page_bytes_max, kernels=kernels)


if __name__ == "__main__":
    sys.exit(main())
