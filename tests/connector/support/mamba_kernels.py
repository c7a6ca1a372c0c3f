"""Lets a recurrent model speculate on a CPU: vLLM's V1 runner moves its states with Triton kernels then, and only then.

Named as a worker's extension, since vLLM imports that in every worker. Only these kernels go through Triton's
interpreter (`TRITON_INTERPRET=1`); with Triton switched on as a whole the V1 runner does not start.
"""

from __future__ import annotations

import triton
import triton.language
from vllm.v1.worker import mamba_utils

__all__ = ["WorkerExtension"]

_KERNELS = (
    "_memcpy_u64_tiled",
    "_copy_mamba_state_block",
    "precopy_mamba_align_fused_kernel",
    "postprocess_mamba_fused_kernel",
)

mamba_utils.tl = triton.language
for _name in _KERNELS:
    setattr(mamba_utils, _name, triton.jit(getattr(mamba_utils, _name)))


# Programs that copy a state together. In the interpreter they run one after the other, and most find nothing to copy.
vars(mamba_utils)["_TEMPORAL_TILES"] = 1


class WorkerExtension:
    """Adds nothing to a worker."""
