"""Imported in an engine before it starts: it computes as on a processor that has no AMX.

vLLM and oneDNN choose their kernels by what the processor has. With AMX a bfloat16 prompt is computed several times as
fast, so what a hit saves depends on it; this shows both on one machine.
"""

from __future__ import annotations

import torch

torch.cpu._is_amx_tile_supported = lambda: False
torch.cpu._init_amx = lambda: False
