"""Linear maps on a GPU, and the norm, gate and sum round them: where the way is chosen.

By shapes and the mode alone: in fixed order one kernel for every row count; of few rows one that
takes the neighbours along in the same launch; else the GPU library's product between kernels of
their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.ops.gated import Activation
from emberline.ops.linear import Linear, Stream
from emberline.ops.triton.fixed_linear import fixed_linear
from emberline.ops.triton.gated import gated
from emberline.ops.triton.norm import add_rms_norm
from emberline.ops.triton.skinny import few_rows, few_rows_add, takes


def linear(x: Tensor, weights: Linear, *, fixed_order: bool = False) -> Tensor:
    """`ops.linear.linear` in one launch."""
    if fixed_order:
        return fixed_linear(x, weights)
    return few_rows(x, weights) if takes(x, weights) else weights(x)


def norm_linear(
    stream: Stream, norm: Tensor, eps: float, weights: Linear, *, fixed_order: bool = False
) -> tuple[Tensor, Tensor]:
    """`ops.linear.norm_linear`: one launch for few rows that are scaled already, else two."""
    scaled = stream.scaled
    if scaled is not None and takes(scaled.rows, weights):
        return stream.x, few_rows(scaled.rows, weights, squares=scaled.squares, eps=eps)
    x, normed = add_rms_norm(stream.x, stream.update, norm, eps)
    return x, linear(normed, weights, fixed_order=fixed_order)


def norm_gated(
    stream: Stream,
    norm: Tensor,
    eps: float,
    weights: Linear,
    activation: Activation = "silu",
    *,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.linear.norm_gated`: one launch for few rows that are scaled, else two or three."""
    scaled = stream.scaled
    if scaled is not None and takes(scaled.rows, weights):
        squares = scaled.squares
        return stream.x, few_rows(scaled.rows, weights, squares=squares, eps=eps, gate=activation)
    x, normed = add_rms_norm(stream.x, stream.update, norm, eps)
    if not fixed_order and takes(x, weights):
        return x, few_rows(normed, weights, gate=activation)
    return x, gated(linear(normed, weights, fixed_order=fixed_order), activation)


def linear_add(
    y: Tensor, weights: Linear, x: Tensor, norm: Tensor | None = None, *, fixed_order: bool = False
) -> Stream:
    """`ops.linear.linear_add` in one launch: few rows are added to, others leave an update."""
    if fixed_order or not takes(y, weights):
        return Stream(x, linear(y, weights, fixed_order=fixed_order))
    # In float16 a row times the weights could be too large before it is divided.
    return few_rows_add(y, weights, x, None if x.dtype == torch.float16 else norm)
