"""Linear maps of a few rows in one launch, with the norm before or the gate or sum after.

What such a map costs is the reading of its weights, once, and a launch: so every program streams
the weights of a few outputs past all rows, with as many bytes under way as a processor holds, and
nothing is left for a second kernel. The warps of a program share the input dimension (a batched
product, a warp an entry of the batch), which keeps their chains of dependent products short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.gated import Activation
from emberline.ops.linear import Linear
from emberline.ops.triton.gpu import processors, shared_memory

FEW_ROWS = 16  # up to here weights of any size are best read by one launch
SMALL_WEIGHT = 2**22  # numbers; of so few the launches cost more than the reading,
MORE_ROWS = 64  # up to here
WARPS = 4
WIDE_OUTPUT = 4096  # from here on 32 outputs a program still keep a large GPU busy
MOST_TILES = 8  # of weights under way in a program
LEAST_TILES = 3
MOST_RESIDENT = 3  # programs that share a processor's memory for what is under way
GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2}


@triton.jit
def _activate(x, GATE: tl.constexpr):
    if GATE == 1:
        return x * tl.sigmoid(x)
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
    z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * z)


@triton.jit
def _finish(sums, factor, bias, column, inside, NORMED: tl.constexpr, BIASED: tl.constexpr):
    """Sums [PARTS, OUTS, ROWS] of the warps as outputs [OUTS, ROWS] of the map, in float32."""
    total = tl.sum(sums, 0)
    if NORMED:
        total = total * factor[None, :]
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    x, weight, bias, norm, residual, out,
    count, size, width, x_stride, weight_stride, residual_stride, to_up, eps,
    NORMED: tl.constexpr, BIASED: tl.constexpr, GATE: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of rows a program. Tiles are [part, output or row, input]."""
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = (tl.arange(0, PARTS) * DEPTH)[:, None, None] + tl.arange(0, DEPTH)[None, None, :]
    live = row < count
    inside = column < size
    x_at = x + row.to(tl.int64)[None, :, None] * x_stride + at
    weight_at = weight + column.to(tl.int64)[None, :, None] * weight_stride + at
    # A copy a row: what a warp copies has to be wide, or it is not fetched ahead.
    norm_at = norm + (row * 0)[None, :, None] + at if NORMED else x_at
    dtype = x.dtype.element_ty
    sums = tl.zeros((PARTS, OUTS, ROWS), tl.float32)
    up_sums = tl.zeros((PARTS, OUTS, ROWS), tl.float32)
    squares = tl.zeros((PARTS, ROWS, DEPTH), tl.float32)
    for start in range(0, width, PARTS * DEPTH):
        within = start + at < width
        lit = within & live[None, :, None]
        here = within & inside[None, :, None]
        rows = tl.load(x_at + start, mask=lit, other=0.0)
        tile = tl.load(weight_at + start, mask=here, other=0.0)
        if NORMED:
            scale = tl.load(norm_at + start, mask=lit, other=0.0).to(tl.float32)
            wide = rows.to(tl.float32)
            squares += wide * wide
            rows = (wide * scale).to(dtype)
        rows = tl.permute(rows, (0, 2, 1))
        sums = tl.dot(tile, rows, sums, input_precision="ieee")
        if GATE > 0:
            up_tile = tl.load(weight_at + to_up + start, mask=here, other=0.0)
            up_sums = tl.dot(up_tile, rows, up_sums, input_precision="ieee")

    factor = tl.sum(tl.sum(squares, 2), 0) / width + eps
    if NORMED:
        factor = tl.rsqrt(factor)
    y = _finish(sums, factor, bias, column, inside, NORMED, BIASED).to(dtype)
    if GATE > 0:
        up_column = size + column
        up = _finish(up_sums, factor, bias, up_column, inside, NORMED, BIASED).to(dtype)
        active = _activate(y.to(tl.float32), GATE).to(dtype)
        y = (active.to(tl.float32) * up.to(tl.float32)).to(dtype)
    written = inside[:, None] & live[None, :]
    wide_row = row.to(tl.int64)[None, :]
    if ADDS:
        held_at = residual + wide_row * residual_stride + column[:, None]
        held = tl.load(held_at, mask=written, other=0.0)
        y = (held.to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out + wide_row * size + column[:, None], y, mask=written)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How a launch is cut. Depends on shapes alone, so it can be captured."""

    rows: int
    outs: int
    depth: int  # inputs that a warp takes at a time
    under_way: int  # tiles of weights

    @classmethod
    def of(cls, x: Tensor, size: int, normed: bool, gate: bool) -> _Tiles:
        """The tiles for `size` outputs a row."""
        count, width = x.shape
        wide = x.dtype == torch.float32
        rows = 8 if count <= 8 else 16 if count <= 16 or wide else 32
        outs = 32 if size >= WIDE_OUTPUT else 16
        programs = triton.cdiv(size, outs) * triton.cdiv(count, rows)
        resident = max(1, min(MOST_RESIDENT, triton.cdiv(programs, processors(x.device))))
        room = shared_memory(x.device) * 7 // 8 // resident
        lanes = outs * (1 + gate) + rows * (1 + normed)
        depth = 16 if wide else 64 if width >= 1024 else 32
        if depth == 64 and room // (WARPS * depth * lanes * x.element_size()) < LEAST_TILES:
            depth = 32
        fitting = room // (WARPS * depth * lanes * x.element_size())
        steps = triton.cdiv(width, WARPS * depth)
        return cls(rows, outs, depth, max(2, min(MOST_TILES, fitting, steps)))


def takes(x: Tensor, linear: Linear) -> bool:
    """Whether so few rows run that `few_rows` is the way. Depends on shapes and dtype alone."""
    if linear.packed or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    small = linear.weight.numel() <= SMALL_WEIGHT
    return x.shape[0] <= (MORE_ROWS if small else FEW_ROWS)


def few_rows(
    x: Tensor,
    linear: Linear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A linear map of [N, I] and what stands round it. One launch, right for any N.

    Args:
        x: [N, I]. Rows may lie apart; their elements may not.
        linear: I -> O, not packed.
        norm: [I], RMS norm weights of the input. Its factor scales the sums, not the inputs, so
            that a row is read once: one rounding less than the norm by itself has.
        eps: of the norm.
        gate: the outputs are a gate, then what it gates: `ops.gated.gated` of them is returned.
        residual: [N, O], what the rounded outputs are added to.

    Returns:
        [N, O], or [N, O / 2] behind a gate.
    """
    count, width = x.shape
    weight, bias = linear.weight, linear.bias
    size = weight.shape[0] // (1 if gate is None else 2)
    out = x.new_empty(count, size)
    if not count:
        return out
    tiles = _Tiles.of(x, size, norm is not None, gate is not None)
    _few_rows[(triton.cdiv(size, tiles.outs), triton.cdiv(count, tiles.rows))](
        x, weight, bias, norm, residual, out,
        count, size, width, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), size * weight.stride(0), eps,
        NORMED=norm is not None, BIASED=bias is not None, GATE=GATES[gate],
        ADDS=residual is not None,
        ROWS=tiles.rows, OUTS=tiles.outs, PARTS=WARPS, DEPTH=tiles.depth,
        num_warps=WARPS, num_stages=tiles.under_way + 1,
    )  # fmt: skip
    return out
