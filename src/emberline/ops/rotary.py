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
