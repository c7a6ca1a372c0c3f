"""Copies between cache tensors and host pages; the only folder that may touch `torch.cuda`. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from connector.device.base import Device
from connector.device.cpu import CpuDevice
from connector.device.gpu import StreamDevice
from connector.device.paths import try_path
from connector.device.streams import CudaStreams
from connector.logs import LOG
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:  # it needs Triton
    from connector.device.kernels import DeviceKernels


__all__ = ["open_device"]


def open_device(where: torch.device, *, ring_bytes: int, page_bytes_max: int) -> Device:
    """The device that the cache tensors are on.

    Args:
        ring_bytes: Host memory for saves. A GPU takes as much of its own memory for pages on their way there.
        page_bytes_max: Size of the largest page of one slice.

    Raises:
        InvalidRequest: The device is not supported, or has no room.
    """
    if where.type == "cpu":
        return CpuDevice()
    if where.type != "cuda":
        raise InvalidRequest("caches on this device are not supported", device=str(where))
    streams = CudaStreams(where)
    return StreamDevice(streams, ring_bytes=ring_bytes, page_bytes_max=page_bytes_max, kernels=_kernels(streams))


def _kernels(streams: CudaStreams) -> type[DeviceKernels] | None:
    if problem := try_path("kernels", streams).problem:
        LOG.warning("kvstore: the processor verifies records, not the GPU: %s", problem)
        return None
    from connector.device.kernels import DeviceKernels

    return DeviceKernels
