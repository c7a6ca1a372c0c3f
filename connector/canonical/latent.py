"""Multi-head latent attention: one vector per token, held by every rank, so one slice that the ranks write in turn."""

from __future__ import annotations

from collections.abc import Sequence

from connector.canonical.attention import AttentionPages
from connector.canonical.runs import LayerGeometry
from connector.canonical.slices import HeadGrid
from kvstore.errors import InvalidRequest

__all__ = ["LATENT_GRID", "latent_pages"]

LATENT_GRID = HeadGrid(num_heads=1, num_slices=1)


def latent_pages(layers: Sequence[LayerGeometry], *, held_slice: int = 0) -> AttentionPages:
    """The page plan of a latent group: layer, token, channels.

    Args:
        layers: Where the layers' bytes are.
        held_slice: The slice that they are.

    Raises:
        InvalidRequest: A layer has heads, so that it is not one vector per token.
    """
    if any(layer.heads != 1 for layer in layers):
        raise InvalidRequest("a latent cache has one vector per token", heads=max(layer.heads for layer in layers))
    return AttentionPages(grid=LATENT_GRID, first_slice=held_slice, layers=layers)
