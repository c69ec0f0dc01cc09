"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [N, H, D] by the angles of each row's position (Su et al. 2021).

    `cos` and `sin` are [N, D].
    """
    left, right = x.chunk(2, dim=-1)
    rotated = torch.cat((-right, left), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]


def sign_sin(sin: Tensor) -> Tensor:
    """The [N, D] sines with the rotation's minus folded into the left half, for `rotate`."""
    signed = sin.clone()
    signed[:, : sin.shape[1] // 2].neg_()
    return signed


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """`apply_rotary` bit for bit, in fewer passes: the sign is in the table, the halves swap."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos[:, None]).add_(swapped.mul_(signed_sin[:, None]))
