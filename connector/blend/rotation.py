"""Rotary position embedding: keys that were rotated for one position, rotated for another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Angles:
    """The cosines and sines by which a model rotates keys at some positions.

    Attributes:
        cos: [num_tokens, rotated / 2], float32, as the model multiplies with them: a scaled rope has its factor in it.
        sin: As `cos`.
        is_neox: Pairs are the two halves of the rotated part of a head; else they are neighbours.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox: bool = True


def rerotate(keys: torch.Tensor, seen: Angles, wanted: Angles) -> torch.Tensor:
    """Keys as the model would have rotated them for other positions.

    Computed in float32 from the model's own cosines and sines, not from the difference of the positions: an angle of
    100,000 radians in float32 is off by .004. So the result equals a fresh rotation within float32's rounding, and for
    narrower types within one more rounding to that type.

    Args:
        keys: [num_tokens, num_heads, head_dim], of any float type. What lies beyond the rotated part of a head is kept.
        seen: The angles for which they were rotated.
        wanted: The angles for which they are rotated now.

    Returns:
        A new tensor like `keys`.
    """
    # Not a rotation by a difference of angles alone: tables in bfloat16 have cos^2 + sin^2 unequal to one
    scale = 1.0 / (seen.cos * seen.cos + seen.sin * seen.sin)
    cos = ((wanted.cos * seen.cos + wanted.sin * seen.sin) * scale)[:, None, :]
    sin = ((wanted.sin * seen.cos - wanted.cos * seen.sin) * scale)[:, None, :]
    half = seen.cos.shape[-1]
    wide = keys.to(torch.float32)
    rotated, kept = wide[..., : 2 * half], wide[..., 2 * half :]
    if seen.is_neox:
        first, second = rotated[..., :half], rotated[..., half:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((turned, kept), -1).to(keys.dtype)
