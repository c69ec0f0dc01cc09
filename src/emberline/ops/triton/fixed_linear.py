"""Linear maps in fixed order: a row's result depends on that row alone, bit for bit.

How a launch is cut depends on the weight's shape and the dtype, never on how many rows run:

- the tile is one shape for every row count, so a row meets the same tensor-core instruction
  whoever its neighbours are, and what such an instruction gives for one row is a function of that
  row and of the weights (each output is a sum of its own; where in a tile a row stands is only an
  address). Rows that a tile has too many are zeros and are not written;
- one program takes all of the input dimension, first to last, in steps of one size: no sum is
  split by how busy the GPU is, and none is finished by whoever comes last;
- the count is no constant of the compiled kernel, so the same machine code runs for all of them.

In float32 the products are IEEE products, a fused sum a step in the order of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.linear import Linear

ROWS = 64  # of a tile: the least that Hopper's widest tensor-core instruction takes
WIDE_ROWS = 16  # in float32, whose products are not for tensor cores
LEAST_PROGRAMS = 128  # a row tile: what keeps a large GPU's memory busy
MOST_OUTS = 128
TILE_BYTES = 96 * 1024  # under way in a program


@triton.jit(do_not_specialize=["count"])
def _fixed_order(
    x, weight, bias, out, count, size, width, x_stride, weight_stride,
    BIASED: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of rows and outputs a program; those of the same outputs run beside each other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    depth = tl.arange(0, DEPTH)
    live = (row < count)[:, None]
    inside = column < size
    x_at = x + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * weight_stride + depth[:, None]
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(0, width, DEPTH):
        within = start + depth < width
        rows = tl.load(x_at + start, mask=live & within[None, :], other=0.0)
        tile = tl.load(weight_at + start, mask=inside[None, :] & within[:, None], other=0.0)
        sums = tl.dot(rows, tile, sums, input_precision="ieee")
    if BIASED:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=live & inside[None, :])


def fixed_linear(x: Tensor, linear: Linear) -> Tensor:
    """`linear` of rows [N, I], in fixed order: [N, O]. Rows may lie apart; their elements may not.

    Raises:
        ValueError: the weights are packed for a CPU.
    """
    if linear.packed:
        raise ValueError("packed weights have no fixed order on a GPU: keep them as they are")
    count, width = x.shape
    size = linear.weight.shape[0]
    out = x.new_empty(count, size)
    if not count:
        return out
    rows, outs, depth = _tile(size, x.dtype)
    tile_bytes = (rows + outs) * depth * x.element_size()
    _fixed_order[(triton.cdiv(count, rows), triton.cdiv(size, outs))](
        x, linear.weight, linear.bias, out,
        count, size, width, x.stride(0), linear.weight.stride(0),
        BIASED=linear.bias is not None, ROWS=rows, OUTS=outs, DEPTH=depth,
        num_warps=4, num_stages=1 + max(2, min(6, TILE_BYTES // tile_bytes)),
    )  # fmt: skip
    return out


def _tile(size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows, outputs and inputs of a tile, for weights of `size` outputs."""
    if dtype == torch.float32:
        return WIDE_ROWS, 32, 32
    outs = MOST_OUTS
    while outs > 16 and triton.cdiv(size, outs) < LEAST_PROGRAMS:
        outs //= 2
    return ROWS, outs, 128 if outs <= 32 else 64
