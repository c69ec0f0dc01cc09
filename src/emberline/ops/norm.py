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


def add_rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual stream after an update, and its norm for what comes next.

    Args:
        x: [N, D].
        update: [N, D] to add; None for nothing.
        weight: [D].
        eps: added to the mean square.

    Returns:
        x + update, rounded to its dtype (`x` itself without an update), and `rms_norm` of it.
    """
    if update is not None:
        x = x + update
    return x, rms_norm(x, weight, eps)
