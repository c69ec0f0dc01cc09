"""Linear maps on a GPU, and the norm, gate and sum round them: where the way is chosen.

By shapes and the mode alone: in fixed order one kernel for every row count; of few rows one that
takes the neighbours along in the same launch; else the GPU library's product between kernels of
their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.ops.gated import Activation
from emberline.ops.linear import Linear
from emberline.ops.triton.fixed_linear import fixed_linear
from emberline.ops.triton.gated import gated
from emberline.ops.triton.norm import add_rms_norm
from emberline.ops.triton.skinny import few_rows, takes


def linear(x: Tensor, weights: Linear, *, fixed_order: bool = False) -> Tensor:
    """`ops.linear.linear` in one launch."""
    if fixed_order:
        return fixed_linear(x, weights)
    return few_rows(x, weights) if takes(x, weights) else weights(x)


def norm_linear(
    x: Tensor,
    update: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Linear,
    *,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.linear.norm_linear`: one launch for few rows without an update, else two."""
    if not fixed_order and update is None and _norms_inside(x, weights):
        return x, few_rows(x, weights, norm=norm, eps=eps)
    x, normed = add_rms_norm(x, update, norm, eps)
    return x, linear(normed, weights, fixed_order=fixed_order)


def norm_gated(
    x: Tensor,
    update: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Linear,
    activation: Activation = "silu",
    *,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.linear.norm_gated`: one launch for few rows without an update, else two or three."""
    few = not fixed_order and takes(x, weights)
    if few and update is None and _norms_inside(x, weights):
        return x, few_rows(x, weights, norm=norm, eps=eps, gate=activation)
    x, normed = add_rms_norm(x, update, norm, eps)
    if few:
        return x, few_rows(normed, weights, gate=activation)
    return x, gated(linear(normed, weights, fixed_order=fixed_order), activation)


def linear_add(
    y: Tensor, weights: Linear, x: Tensor, *, fixed_order: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`ops.linear.linear_add` in one launch: few rows are added to, others leave an update."""
    if not fixed_order and takes(y, weights):
        return few_rows(y, weights, residual=x), None
    return x, linear(y, weights, fixed_order=fixed_order)


def _norms_inside(x: Tensor, weights: Linear) -> bool:
    """Whether a norm goes along: in float16 an input times its weight could be too large."""
    return x.dtype != torch.float16 and takes(x, weights)
