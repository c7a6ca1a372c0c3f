"""Recurrent state (Mamba, Gated DeltaNet, short convolution): one state at a boundary, in bands of layers.

State, in order: layer of the band, content as the kernels hold it. Its inner structure is unknown, so a rank's share is
valid for exactly this tensor-parallel size, which is part of the namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

from connector.canonical.runs import BlockRun, LayerGeometry
from kvstore.errors import InvalidRequest

_RECORD_BYTES = 4 << 20


def layer_bands(stage_layers: Sequence[int], layer_bytes: int) -> int:
    """Number of bands that the layers of each pipeline stage are divided into, equal in each, so that one band's state
    stays near 4 MiB."""
    bands_max = gcd(*stage_layers)
    fitting = [
        bands
        for bands in range(1, bands_max + 1)
        if bands_max % bands == 0 and max(stage_layers) // bands * layer_bytes <= _RECORD_BYTES
    ]
    return min(fitting, default=bands_max)


class StatePages:
    """The plan of one recurrent group on one rank.

    Args:
        num_bands: Slices of one rank.
        first_slice: The rank's first slice.
        layers: Where the layers' bytes are.

    Raises:
        InvalidRequest: A layer's state is not contiguous, or layers differ in size.
    """

    def __init__(self, *, num_bands: int, first_slice: int, layers: Sequence[LayerGeometry]) -> None:
        self._band_layers = len(layers) // num_bands
        self._first_slice = first_slice
        self._layer_bytes = layers[0].content_bytes
        for layer in layers:
            if layer.parts * layer.heads * layer.tokens != 1 or layer.content_bytes != self._layer_bytes:
                raise InvalidRequest("a layer's state is not one stretch of bytes", seen=layer)
        self.runs = lru_cache(maxsize=256)(self._runs)

    def decoded_bytes(self, num_blocks: int) -> int:
        return self._band_layers * self._layer_bytes

    def _runs(self, slice_index: int, num_blocks: int) -> tuple[BlockRun, ...]:
        first = (slice_index - self._first_slice) * self._band_layers
        return tuple(
            BlockRun(first + index, 0, self._layer_bytes, index * self._layer_bytes, self._layer_bytes)
            for index in range(self._band_layers)
        )
