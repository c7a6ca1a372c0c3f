"""The copiers, held to the contract: in host memory, with streams, on a simulated device, on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu.kit import InlineStreams
from connector.device.base import Fence
from connector.device.cpu import CpuCopier
from connector.device.gpu import StreamCopier, StreamDevice
from connector.device.streams import CudaStreams
from tests.unit.connector.device_contract import BlockCopierContract
from tests.unit.connector.simulated_streams import SimulatedStreams


class TestCpuCopier(BlockCopierContract):
    """`CpuCopier` on tensors in host memory."""

    device = "cpu"

    def make(self, layers: Sequence[torch.Tensor], feeds: Sequence[int] | None = None) -> CpuCopier:
        return CpuCopier(layers, feeds or [0] * len(layers))


class StreamCopierContract(BlockCopierContract):
    """What the three have in common."""

    def streams(self) -> Any:
        raise NotImplementedError

    def make(self, layers: Sequence[torch.Tensor], feeds: Sequence[int] | None = None) -> StreamCopier:
        self._device = StreamDevice(self.streams(), ring_bytes=8192, page_bytes_max=8192, unit_bytes_min=1)
        return self._device.copier(layers, feeds or [0] * len(layers), layers[0].element_size())

    def fence(self) -> Fence:
        return self._device.fence()


class TestInline(StreamCopierContract):
    """Work is done when it is ordered."""

    device = "cpu"

    def streams(self) -> InlineStreams:
        return InlineStreams()


class TestSimulated(StreamCopierContract):
    """Work is done some time later."""

    device = "cpu"

    def streams(self) -> SimulatedStreams:
        return SimulatedStreams(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestCuda(StreamCopierContract):
    """A real GPU."""

    device = "cuda"

    def streams(self) -> CudaStreams:
        return CudaStreams(torch.device("cuda"))
