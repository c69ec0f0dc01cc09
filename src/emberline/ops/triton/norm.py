"""Residual update and RMS norm in one pass: each row is read once and written twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.triton.gpu import await_inputs, early_start


@triton.jit
def _add_norm_row(
    x, update, weight, total_out, normed_out, x_stride, update_stride, width, eps,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row a program. Rounds where the plain op does: the sum, the normed row, the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    dtype = total.dtype
    if ADDS:
        added = tl.load(update + row * update_stride + column, mask=inside, other=0.0)
        total = (total.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(total_out + row * width + column, total, mask=inside)
    wide = total.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = normed.to(dtype).to(tl.float32) * factor
    tl.store(normed_out + row * width + column, scaled.to(dtype), mask=inside)


def add_rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`ops.norm.add_rms_norm` in one launch. Rows may lie apart; their elements may not."""
    count, width = x.shape
    normed = torch.empty(count, width, dtype=x.dtype, device=x.device)
    total = x if update is None else torch.empty_like(normed)
    block = triton.next_power_of_2(width)
    if count:
        _add_norm_row[(count,)](
            x, update, weight, total, normed,
            x.stride(0), 0 if update is None else update.stride(0), width, eps,
            ADDS=update is not None, BLOCK=block, num_warps=max(1, min(16, block // 256)),
            **early_start(x.device),
        )  # fmt: skip
    return total, normed
