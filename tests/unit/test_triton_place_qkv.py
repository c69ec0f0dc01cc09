"""Norm, rotation and KV write in one kernel, against the plain form."""

from __future__ import annotations

import pytest
import torch

from emberline.ops import place_qkv as plain
from emberline.ops.rotary import sign_sin
from emberline.ops.triton import place_qkv as fast

from support.triton_kernels import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def angles(count: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(count, dim // 2).repeat(1, 2) * 7
    return turns.cos().to(DEVICE, dtype), sign_sin(turns.sin().to(DEVICE, dtype))


@pytest.mark.parametrize(
    ("count", "num_heads", "kv_heads", "dim", "normed", "dtype"),
    [
        (0, 2, 1, 64, "nothing", torch.float32),
        (3, 3, 1, 64, "nothing", torch.bfloat16),
        (3, 3, 1, 64, "queries and keys", torch.float32),
        (66, 1, 1, 64, "values as well", torch.float32),
        (66, 1, 1, 64, "nothing", torch.float16),
        (1, 8, 1, 128, "queries and keys", torch.bfloat16),
        (1, 8, 1, 128, "values as well", torch.float16),
        (2, 2, 1, 256, "queries and keys", torch.float16),
        (5, 2, 2, 80, "queries and keys", torch.float32),
    ],
)
def test_rows_are_placed_as_the_plain_op_places_them(
    count, num_heads, kv_heads, dim, normed, dtype
) -> None:
    torch.manual_seed(0)
    width = (num_heads + 2 * kv_heads) * dim
    # Rows of a wider tensor: packed projections need not lie without gaps.
    qkv = torch.randn(count, width + 32).to(DEVICE, dtype)[:, :width]
    cos, sin = angles(count, dim, dtype)
    num_normed = {"nothing": 0, "queries and keys": 1, "values as well": 2}[normed]
    norm = None
    if num_normed:
        norm = torch.rand(num_heads + num_normed * kv_heads, dim).to(DEVICE, dtype)
    slots = torch.randperm(100)[:count].to(DEVICE)
    pools = torch.randn(2, 100, kv_heads, dim).to(DEVICE, dtype).repeat(2, 1, 1, 1, 1)
    q, other_q = (
        op(qkv, cos, sin, *pool, slots, norm=norm, eps=1e-5)
        for op, pool in zip((fast.place_qkv, plain.place_qkv), pools, strict=True)
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(q, other_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pools[0], pools[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_row_has_the_same_bits_among_few_and_many(dim) -> None:
    """On a GPU: its squares are added in one order, however many rows a program takes."""
    torch.manual_seed(0)
    qkv = torch.randn(70, 4 * dim).to(DEVICE, torch.bfloat16)
    cos, sin = angles(70, dim, torch.bfloat16)
    norm, slots = torch.rand(3, dim).to(DEVICE, torch.bfloat16), torch.arange(70, device=DEVICE)
    pools = torch.zeros(2, 2, 70, 1, dim).to(DEVICE, torch.bfloat16)
    few, many = (
        fast.place_qkv(qkv[:n], cos[:n], sin[:n], *pool, slots[:n], norm=norm, eps=1e-5)
        for n, pool in zip((3, 70), pools, strict=True)
    )
    assert torch.equal(few, many[:3])
    assert torch.equal(pools[0, :, :3], pools[1, :, :3])


def test_without_slots_rows_go_one_after_another() -> None:
    torch.manual_seed(0)
    qkv, (cos, sin) = torch.randn(4, 4 * 16, device=DEVICE), angles(4, 16, torch.float32)
    pools = torch.zeros(2, 2, 4, 1, 16, device=DEVICE)
    for op, pool in zip((fast.place_qkv, plain.place_qkv), pools, strict=True):
        op(qkv, cos, sin, *pool, None)
    torch.testing.assert_close(pools[0], pools[1])
    assert torch.equal(pools[0][1], qkv[:, 48:].view(4, 1, 16))


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_layers_that_were_projected_together(slot_type) -> None:
    torch.manual_seed(0)
    layers, kv_heads, dim = 3, 2, 64
    kv = torch.randn(5, layers, 2 * kv_heads, dim, device=DEVICE)
    cos, sin = angles(5, dim, torch.float32)
    norm = torch.rand(layers, 1, dim, device=DEVICE).expand(layers, kv_heads, dim)
    slots = torch.tensor([7, 3, 0, 0, 9], dtype=slot_type, device=DEVICE)  # two are padding
    pools = torch.zeros(2, 2, layers, 12, kv_heads, dim, device=DEVICE)
    for op, pool in zip((fast.place_context, plain.place_context), pools, strict=True):
        op(kv, cos, sin, *pool, slots, norm=norm, eps=1e-5)
    torch.testing.assert_close(pools[0][:, :, 1:], pools[1][:, :, 1:])
    assert not pools[0][:, :, [1, 2, 4, 5, 6, 8, 10, 11]].any()


def test_a_pool_whose_heads_lie_apart_is_refused() -> None:
    pool = torch.zeros(4, 2, 32, device=DEVICE)[:, :, :16]
    qkv, (cos, sin) = torch.zeros(1, 5 * 16, device=DEVICE), angles(1, 16, torch.float32)
    with pytest.raises(ValueError, match="heads of a slot"):
        fast.place_qkv(qkv, cos, sin, pool, pool, None)
