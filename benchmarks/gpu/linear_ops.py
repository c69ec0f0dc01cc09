"""The linear maps of a decoder as benchmark cases: few rows in one launch, and in fixed order.

The plain form is the GPU library's product between kernels of their own for the norm and the gate.
Few rows are measured past the count from which the engine takes the library's product, to see
where that belongs. Must not know how cases are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from emberline.ops.gated import Activation
from emberline.ops.linear import Linear, Scaled
from emberline.ops.triton.fixed_linear import fixed_linear
from emberline.ops.triton.gated import gated
from emberline.ops.triton.norm import add_rms_norm
from emberline.ops.triton.skinny import few_rows, few_rows_add

from gpu import model_ops
from gpu.timing import Case, copies_of

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure at."""

    shapes: tuple[tuple[model_ops.Shape, int], ...]  # and its vocabulary
    few: tuple[int, ...]  # rows
    fixed: tuple[int, ...]


SIZES = Sizes(
    tuple(zip(model_ops.SIZES.shapes, (49152, 151936), strict=True)),
    few=(1, 8, 16, 32, 64),
    fixed=(1, 8, 32, 256, 2048),
)


@dataclass(frozen=True, slots=True)
class _Map:
    """One of a decoder's maps, and what its launch takes along."""

    op: str
    size: int  # outputs a row
    width: int
    normed: bool = False
    gate: bool = False
    adds: bool = False

    @classmethod
    def of(cls, shape: model_ops.Shape, vocab: int) -> tuple[_Map, ...]:
        """Those of a model."""
        mixed = shape.heads * shape.dim
        qkv = mixed + 2 * shape.kv_heads * shape.dim
        return (
            cls("norm_linear", qkv, shape.hidden, normed=True),
            cls("linear_add", shape.hidden, mixed, adds=True),
            cls("norm_gated", shape.intermediate, shape.hidden, normed=True, gate=True),
            cls("linear_add", shape.hidden, shape.intermediate, adds=True),
            cls("linear", vocab, shape.hidden),
        )

    def num_bytes(self, rows: int, size: int) -> float:
        """Least bytes at `size` bytes a number."""
        weights = self.size * (1 + self.gate) * self.width
        return float(size * (weights + rows * (self.width + self.size * (1 + self.adds))))


@dataclass(frozen=True, slots=True)
class _Inputs:
    x: Tensor  # [N, width]
    weights: tuple[Linear, ...]  # a copy each
    norm: Tensor | None
    scaled: Scaled | None  # x, as the map before leaves it
    residual: Tensor | None

    @classmethod
    def make(cls, linear: _Map, rows: int, new: Callable[..., Tensor]) -> _Inputs:
        copies = copies_of(linear.num_bytes(rows, new(1).element_size()))
        weight = new(copies, linear.size * (1 + linear.gate), linear.width) * linear.width**-0.5
        x = new(rows, linear.width)
        norm = new(linear.width) if linear.normed else None
        scaled = None
        if norm is not None:
            squares = x.float().square().unflatten(1, (-1, 16)).sum(2)
            scaled = Scaled(x * norm, squares.T.contiguous())
        residual = new(rows, linear.size) if linear.adds else None
        return cls(x, tuple(Linear(w, None) for w in weight), norm, scaled, residual)


def cases(
    dtype: torch.dtype, wanted: str, sizes: Sizes = SIZES, device: str = "cuda"
) -> Iterator[Case]:
    """Every case whose op has `wanted` in its name."""
    new = partial(torch.randn, dtype=dtype, device=device)
    for shape, vocab in sizes.shapes:
        for linear in _Map.of(shape, vocab):
            if wanted in linear.op:
                yield from (_few(shape.name, linear, rows, new) for rows in sizes.few)
            if wanted in "linear_fixed" and not linear.gate:
                yield from (_fixed(shape.name, linear, rows, new) for rows in sizes.fixed)


def _few(name: str, linear: _Map, rows: int, new: Callable[..., Tensor]) -> Case:
    inputs = _Inputs.make(linear, rows, new)

    gate: Activation | None = "silu" if linear.gate else None
    next_norm = None if inputs.residual is None else new(linear.size)

    def run(i: int) -> Tensor:
        if inputs.residual is not None:
            return few_rows_add(inputs.x, inputs.weights[i], inputs.residual, next_norm).x
        rows, squares = inputs.x, None
        if inputs.scaled is not None:
            rows, squares = inputs.scaled.rows, inputs.scaled.squares
        return few_rows(rows, inputs.weights[i], squares=squares, eps=EPS, gate=gate)

    def plain(i: int) -> Tensor:
        x = inputs.x
        if inputs.norm is not None:
            x = add_rms_norm(x, None, inputs.norm, EPS)[1]
        y = inputs.weights[i](x)
        if linear.gate:
            return gated(y)
        return y if inputs.residual is None else inputs.residual + y

    return _case(linear.op, name, linear, rows, inputs, run, plain)


def _fixed(name: str, linear: _Map, rows: int, new: Callable[..., Tensor]) -> Case:
    inputs = _Inputs.make(linear, rows, new)
    return _case(
        "linear_fixed", name, linear, rows, inputs,
        lambda i: fixed_linear(inputs.x, inputs.weights[i]),
        lambda i: inputs.weights[i](inputs.x),
    )  # fmt: skip


def _case(
    op: str,
    name: str,
    linear: _Map,
    rows: int,
    inputs: _Inputs,
    run: Callable[[int], Tensor],
    plain: Callable[[int], Tensor],
) -> Case:
    size = f"{name}, {rows} x {linear.width} to {linear.size}"
    flops = 2.0 * rows * linear.width * linear.size * (1 + linear.gate)
    num_bytes = linear.num_bytes(rows, inputs.x.element_size())
    return Case(op, size, run, plain, len(inputs.weights), num_bytes, flops)
