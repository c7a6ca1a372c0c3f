"""The CPU copier, held to the contract of all copiers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from connector.device.cpu import CpuCopier
from tests.unit.connector.device_contract import BlockCopierContract


class TestCpuCopier(BlockCopierContract):
    """`CpuCopier` on tensors in host memory."""

    device = "cpu"

    def make(self, layers: Sequence[torch.Tensor], feeds: Sequence[int] | None = None) -> CpuCopier:
        return CpuCopier(layers, feeds)
