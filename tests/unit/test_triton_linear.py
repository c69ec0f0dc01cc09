"""Linear maps and what stands round them, against their plain forms; and maps in fixed order."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from emberline.ops import linear as plain
from emberline.ops.linear import Linear, Scaled, Stream
from emberline.ops.triton import fixed_linear, skinny
from emberline.ops.triton import linear as fast

from support.triton_kernels import DEVICE, exact_products

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
COUNTS = (1, 2, 7, 8, 16, 17, 64, 100)
__all__ = ["exact_products"]


@pytest.fixture(autouse=True)
def _exact(exact_products: None) -> None:
    torch.manual_seed(0)


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that lie apart."""
    return torch.randn(count, width + 16).to(DEVICE, dtype)[:, :width]


def weights(size: int, width: int, dtype: torch.dtype, bias: bool = True) -> Linear:
    weight = torch.randn(size, width) / width**0.5
    return Linear(weight.to(DEVICE, dtype), torch.randn(size).to(DEVICE, dtype) if bias else None)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def total(stream: Stream) -> torch.Tensor:
    return stream.x if stream.update is None else stream.x + stream.update


def scaled(x: torch.Tensor, norm: torch.Tensor) -> Scaled:
    """As another map's launch leaves it."""
    squares = x.float().square()
    return Scaled(x * norm, torch.stack((squares[:, ::2].sum(1), squares[:, 1::2].sum(1))))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("count", "size", "width"), [(0, 32, 64), (1, 40, 144), (8, 33, 576), (21, 16, 1056)]
)
def test_few_rows(count, size, width, dtype) -> None:
    """Tails of every dimension, with and without what stands round the map."""
    x, linear = rows(count, width, dtype), weights(size, width, dtype)
    norm = torch.rand(width).to(DEVICE, dtype)
    residual = rows(count, size, dtype)
    close(skinny.few_rows(x, linear), linear(x))
    bare = Linear(linear.weight, None)
    close(skinny.few_rows_add(x, bare, residual, None).x, residual + bare(x))
    begun = scaled(x, norm)
    got = skinny.few_rows(begun.rows, linear, squares=begun.squares, eps=1e-5)
    close(got, plain.norm_linear(Stream(x), norm, 1e-5, linear)[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_after_few_rows(activation, bias, dtype) -> None:
    x, linear = rows(3, 200, dtype), weights(2 * 24, 200, dtype, bias)
    norm = torch.rand(200).to(DEVICE, dtype)
    begun = scaled(x, norm)
    got = skinny.few_rows(begun.rows, linear, squares=begun.squares, eps=1e-5, gate=activation)
    close(got, plain.norm_gated(Stream(x), norm, 1e-5, linear, activation)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "size"), [(1, 16), (5, 72), (40, 40)])
def test_a_sum_begins_the_next_norm(count, size, dtype) -> None:
    x, linear = rows(count, size, dtype), weights(size, 64, dtype, bias=False)
    norm = torch.rand(size).to(DEVICE, dtype)
    got = skinny.few_rows_add(rows(count, 64, dtype), linear, x, norm)
    assert got.update is None
    assert got.scaled is not None
    close(got.scaled.rows, got.x * norm)
    torch.testing.assert_close(got.scaled.squares.sum(0), got.x.float().square().sum(1))


def test_a_wide_map_has_wider_tiles(monkeypatch) -> None:
    """As those of a large model: more outputs and inputs a program, several tiles under way."""
    monkeypatch.setattr(skinny, "SMALL_WEIGHT", 0)
    monkeypatch.setattr(skinny, "FULL_PROGRAMS", 0)
    for dtype in (torch.float32, torch.bfloat16):
        x, linear = rows(2, 1040, dtype), weights(50, 1040, dtype)
        close(skinny.few_rows(x, linear), linear(x))


def test_sums_are_rounded_where_the_plain_form_rounds() -> None:
    """An update of 1.0039 is added as 1, and 256 stays what it was; unrounded it makes 258."""
    x = torch.full((1, 16), 256.0, dtype=torch.bfloat16, device=DEVICE)
    y = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
    y[0, :2] = 1.0
    linear = Linear(torch.zeros(16, 64, dtype=torch.bfloat16, device=DEVICE), None)
    linear.weight[:, 0], linear.weight[:, 1] = 1.0, 2.0**-8  # half way to the next after one
    got, want = (total(op.linear_add(y, linear, x)) for op in (fast, plain))
    assert torch.equal(got, want)
    assert torch.equal(got, x)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [0, 5, 70])
def test_a_layer_of_maps(count, dtype, fixed_order, monkeypatch) -> None:
    """Few rows and many, as a decoder chains them: the stream and its updates stay what they are.

    Many rows go to the library's product, which here is as good as any.
    """
    monkeypatch.setattr(skinny, "SMALL_WEIGHT", 0)
    first, gate_up, second = (
        weights(*shape, dtype) for shape in ((32, 48), (2 * 40, 48), (48, 40))
    )
    norm = torch.rand(48).to(DEVICE, dtype)
    x, update, mixed = rows(count, 48, dtype), rows(count, 48, dtype), rows(count, 40, dtype)
    results = []
    for op, mode in ((fast, {"fixed_order": fixed_order}), (plain, {})):
        start, y = op.norm_linear(Stream(x, update), norm, 1e-5, first, **mode)
        stream = op.linear_add(mixed, second, start, norm, **mode)
        middle, h = op.norm_gated(stream, norm, 1e-5, gate_up, "silu", **mode)
        stream = op.linear_add(h, second, middle, norm, **mode)
        end, again = op.norm_linear(stream, norm, 1e-5, first, **mode)
        results.append((start, y, middle, h, end, again, op.linear(end, first, **mode)))
    for got, want in zip(*results, strict=True):
        close(got, want)


def test_few_rows_leave_no_update() -> None:
    """What one launch can add is added: the next norm then needs no launch of its own."""
    linear = weights(16, 32, torch.float32)
    x = rows(8, 16, torch.float32)
    assert fast.linear_add(rows(8, 32, torch.float32), linear, x).update is None
    fixed = fast.linear_add(rows(8, 32, torch.float32), linear, x, fixed_order=True)
    assert fixed.update is not None


def test_a_large_input_has_a_finite_norm_in_float16() -> None:
    x = torch.full((1, 32), 3e4, dtype=torch.float16, device=DEVICE)
    norm = torch.full((32,), 8.0, dtype=torch.float16, device=DEVICE)
    linear = weights(16, 32, torch.float16)
    nothing = Linear(0 * linear.weight[:, :16].repeat(2, 1), None)
    stream = fast.linear_add(0 * x[:, :16], nothing, x, norm)
    close(fast.norm_linear(stream, norm, 0.0, linear)[1], 0 * x[:, :1] + linear(0 * x + 8.0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [False, True])
def test_fixed_order_gives_a_row_the_same_bits_in_any_company(wide, dtype, monkeypatch) -> None:
    size, width = (150, 80) if wide else (40, 144)
    if wide:  # the tiles of a map with many outputs
        monkeypatch.setattr(fixed_linear, "LEAST_PROGRAMS", 1)
    run = partial(fast.linear, weights=weights(size, width, dtype), fixed_order=True)
    row = rows(1, width, dtype)
    want = run(row)
    close(want, plain.linear(row, run.keywords["weights"]))
    for count in COUNTS:
        for place in {0, count // 2, count - 1}:
            x = 10 * rows(count, width, dtype)
            x[place] = row
            assert torch.equal(run(x)[place : place + 1], want)


def test_packed_weights_are_not_read_as_a_matrix() -> None:
    """They hold a layout that only the CPU's library knows."""
    packed = Linear(torch.zeros(16, 16), None, packed=True)
    assert not skinny.takes(torch.zeros(1, 16), packed)
    with pytest.raises(ValueError, match="packed"):
        fast.linear(torch.zeros(1, 16), packed, fixed_order=True)
