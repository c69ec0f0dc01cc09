"""Linear maps of a few rows in one launch, with half a norm before, the gate or the sum after.

What such a map costs is the reading of its weights, once, and a launch: so every program streams
the weights of a few outputs past all rows, with as many bytes under way as a processor holds, and
nothing is left for a second kernel. With a norm inside every program would read whole rows twice:
the map before scales them by the norm's weights and leaves their squares, the map after divides.
The warps of a program share the input dimension (a batched product, a warp an entry of the batch),
which keeps their chains of dependent products short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.gated import Activation
from emberline.ops.linear import Linear, Scaled, Stream
from emberline.ops.triton.gpu import (
    await_inputs,
    early_start,
    fetch_ahead,
    processors,
    shared_memory,
)

FEW_ROWS = 16  # up to here weights of any size are best read by one launch
SMALL_WEIGHT = 2**22  # numbers; of so few the launches cost more than the reading
MORE_ROWS = 32  # up to here a small weight's launches cost more than the library's
LONG_ROW = 1024  # inputs; of fewer a program of a large weight has too little to stream
WARPS = 4
LARGE_WARPS = 2  # of a program that streams a large weight
FULL_PROGRAMS = 2  # a processor, from where on a program takes 32 outputs and not 16
MOST_TILES = 8  # of weights under way in a program
LEAST_TILES = 3
LINE_BYTES = 128  # of a cache
MOST_LINES = 32  # of an output's weights that are fetched before the inputs are there
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
def _finish(sums, factor, bias, column, inside, BIASED: tl.constexpr):
    """Sums [PARTS, OUTS, ROWS] of the warps as outputs [OUTS, ROWS] of the map, in float32."""
    total = tl.sum(sums, 0) * factor[None, :]
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["count", "num_squares"])
def _few_rows(
    x, weight, bias, squares, residual, norm, out, scaled, squares_out,
    count, size, width, x_stride, weight_stride, residual_stride, to_up, num_squares, eps,
    NORMED: tl.constexpr, BIASED: tl.constexpr, GATE: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, SQUARES: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    EARLY: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of rows a program. Tiles are [part, output or row, input]."""
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = (tl.arange(0, PARTS) * DEPTH)[:, None, None] + tl.arange(0, DEPTH)[None, None, :]
    live = row < count
    inside = column < size
    x_at = x + row.to(tl.int64)[None, :, None] * x_stride + at
    weight_at = weight + column.to(tl.int64)[None, :, None] * weight_stride + at
    if EARLY and SMALL:
        # What the cache holds when the inputs are there need not come from memory any more.
        line = tl.minimum(tl.arange(0, LINES) * LINE, width - 1)
        known = tl.minimum(column, size - 1).to(tl.int64)
        first = weight + known[:, None] * weight_stride + line[None, :]
        fetch_ahead(first)
        if GATE > 0:
            fetch_ahead(first + to_up)
    if SCALES:
        factors = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    # Where a launch streams for long, programs that start before its end are in its way.
    await_inputs(EARLY, not SMALL)
    # What is needed in the end is asked for in the beginning.
    written = inside[:, None] & live[None, :]
    wide_row = row.to(tl.int64)[None, :]
    if NORMED:
        part = tl.arange(0, SQUARES)
        there = (part < num_squares)[:, None] & live[None, :]
        square = tl.load(squares + part[:, None] * count + row[None, :], mask=there, other=0.0)
    if ADDS:
        held_at = residual + wide_row * residual_stride + column[:, None]
        held = tl.load(held_at, mask=written, other=0.0).to(tl.float32)
    sums = tl.zeros((PARTS, OUTS, ROWS), tl.float32)
    up_sums = tl.zeros((PARTS, OUTS, ROWS), tl.float32)
    for start in range(0, width, PARTS * DEPTH):
        within = start + at < width
        rows = tl.load(x_at + start, mask=within & live[None, :, None], other=0.0)
        tile = tl.load(weight_at + start, mask=within & inside[None, :, None], other=0.0)
        rows = tl.permute(rows, (0, 2, 1))
        sums = tl.dot(tile, rows, sums, input_precision="ieee")
        if GATE > 0:
            up_tile = tl.load(
                weight_at + to_up + start, mask=within & inside[None, :, None], other=0.0
            )
            up_sums = tl.dot(up_tile, rows, up_sums, input_precision="ieee")

    factor = tl.full((ROWS,), 1.0, tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(square, 0) / width + eps)
    dtype = out.dtype.element_ty
    y = _finish(sums, factor, bias, column, inside, BIASED).to(dtype)
    if GATE > 0:
        up_column = size + column
        up = _finish(up_sums, factor, bias, up_column, inside, BIASED).to(dtype)
        active = _activate(y.to(tl.float32), GATE).to(dtype)
        y = (active.to(tl.float32) * up.to(tl.float32)).to(dtype)
    if ADDS:
        y = (held + y.to(tl.float32)).to(dtype)
    out_at = wide_row * size + column[:, None]
    tl.store(out + out_at, y, mask=written)
    if SCALES:
        wide = tl.where(written, y.to(tl.float32), 0.0)
        tl.store(scaled + out_at, (wide * factors[:, None]).to(dtype), mask=written)
        own = squares_out + tl.program_id(0) * count + row
        tl.store(own, tl.sum(wide * wide, 0), mask=live)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How a launch is cut. Depends on shapes alone, so it can be captured."""

    rows: int
    outs: int
    depth: int  # inputs that a warp takes at a time
    warps: int
    under_way: int  # tiles of weights

    @classmethod
    def of(cls, x: Tensor, size: int, gate: bool) -> _Tiles:
        """The tiles for `size` outputs a row."""
        count, width = x.shape
        wide, small = x.dtype == torch.float32, _is_small(size * width * (1 + gate))
        warps = WARPS if small else LARGE_WARPS
        rows = 8 if count <= 8 else 16 if count <= 16 or wide else 32
        busy = processors(x.device)
        outs = 32 if size >= 32 * FULL_PROGRAMS * busy else 16
        programs = triton.cdiv(size, outs) * triton.cdiv(count, rows)
        resident = max(1, min(MOST_RESIDENT, triton.cdiv(programs, busy)))
        room = shared_memory(x.device) * 7 // 8 // resident
        slice_bytes = warps * (outs * (1 + gate) + rows) * x.element_size()  # of an input a warp
        depth = 16 if wide else 128 if not small else 64 if width >= 1024 else 32
        while depth > 32 and room // (slice_bytes * depth) < LEAST_TILES:
            depth //= 2
        steps = triton.cdiv(width, warps * depth)
        fitting = room // (slice_bytes * depth)
        return cls(rows, outs, depth, warps, max(2, min(MOST_TILES, fitting, steps)))


def _is_small(numbers: int) -> bool:
    """Whether a weight's launch costs more than its reading."""
    return numbers <= SMALL_WEIGHT


def takes(x: Tensor, linear: Linear) -> bool:
    """Whether so few rows run that `few_rows` is the way. Depends on shapes and dtype alone."""
    if linear.packed or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if _is_small(linear.weight.numel()):
        return x.shape[0] <= MORE_ROWS
    return x.shape[0] <= FEW_ROWS and x.shape[1] >= LONG_ROW


def few_rows(
    x: Tensor,
    linear: Linear,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gate: Activation | None = None,
) -> Tensor:
    """A linear map of [N, I] and what stands round it. One launch, right for any N.

    Args:
        x: [N, I]. Rows may lie apart; their elements may not.
        linear: I -> O, not packed.
        squares: [P, N] float32, `Scaled.squares` of rows `x`: the norm is finished here. Its factor
            scales the sums, not the inputs: one rounding less than the norm by itself has.
        eps: of the norm.
        gate: the outputs are a gate, then what it gates: `ops.gated.gated` of them is returned.

    Returns:
        [N, O], or [N, O / 2] behind a gate.
    """
    size = linear.weight.shape[0] // (1 if gate is None else 2)
    out = x.new_empty(x.shape[0], size)
    _launch(x, linear, out, squares=squares, eps=eps, gate=gate)
    return out


def few_rows_add(y: Tensor, linear: Linear, x: Tensor, norm: Tensor | None) -> Stream:
    """`ops.linear.linear_add` in one launch, as far as the norm that comes next can be begun.

    Args:
        y: [N, I].
        linear: I -> D, not packed.
        x: [N, D], what the rounded outputs are added to.
        norm: [D], weights of the next norm; None: nothing is scaled.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if norm is None:
        _launch(y, linear, out, residual=x)
        return Stream(out)
    programs = triton.cdiv(x.shape[1], _Tiles.of(y, x.shape[1], gate=False).outs)
    squares = torch.empty(programs, len(x), dtype=torch.float32, device=x.device)
    scaled = Scaled(torch.empty_like(out), squares)
    _launch(y, linear, out, residual=x, norm=norm, scaled=scaled)
    return Stream(out, scaled=scaled)


def _launch(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gate: Activation | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    scaled: Scaled | None = None,
) -> None:
    count, width = x.shape
    size = out.shape[1]
    if not count:
        return
    weight, bias = linear.weight, linear.bias
    tiles = _Tiles.of(x, size, gate is not None)
    num_squares = 0 if squares is None else len(squares)
    per_line = LINE_BYTES // weight.element_size()
    lines = triton.cdiv(width, per_line)
    _few_rows[(triton.cdiv(size, tiles.outs), triton.cdiv(count, tiles.rows))](
        x, weight, bias, squares, residual, norm, out,
        None if scaled is None else scaled.rows, None if scaled is None else scaled.squares,
        count, size, width, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), size * weight.stride(0), num_squares, eps,
        NORMED=squares is not None, BIASED=bias is not None, GATE=GATES[gate],
        ADDS=residual is not None, SCALES=scaled is not None,
        ROWS=tiles.rows, OUTS=tiles.outs, PARTS=tiles.warps, DEPTH=tiles.depth,
        SQUARES=triton.next_power_of_2(max(num_squares, 1)),
        LINES=min(MOST_LINES, triton.next_power_of_2(lines)), LINE=per_line,
        num_warps=tiles.warps, num_stages=tiles.under_way + 1,
        SMALL=_is_small(weight.numel()), **early_start(x.device),
    )  # fmt: skip
