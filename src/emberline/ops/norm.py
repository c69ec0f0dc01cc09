"""RMS normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each [..., D] row to unit root mean square, in float32, then by `weight` [D].

    Zhang and Sennrich 2019. Rounded to the input's dtype before the weight, as Llama does.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
