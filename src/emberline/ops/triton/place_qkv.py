"""Norm, rotation and KV write in one pass over a projection's packed rows."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.triton.gpu import await_inputs, early_start

FEW_ROWS = 64  # up to here a program takes one row's head, so that all of the GPU takes part
ROWS = 8  # of a head that a program takes where many run


@triton.jit(
    do_not_specialize=("count",),
    do_not_specialize_on_alignment=("cos", "signed_sin", "slots"),
)
def _place_head(
    heads, norm, cos, signed_sin, slots, q_out, keys, values,
    count, row_stride, layer_stride, cos_stride, sin_stride,
    key_stride, value_stride, key_layer_stride, value_layer_stride,
    norm_stride, norm_layer_stride, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, NORMED: tl.constexpr, SLOTTED: tl.constexpr,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of some rows a program, its two halves apart: a rotation mixes them.

    Every product is rounded as the plain op rounds it. All that is read is under way before the
    first of it is used.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, LANES)
    live = row < count
    inside = live[:, None] & (lane < HALF)
    row = row.to(tl.int64)
    normed = head < NORMED
    turned = head < QUERIES + KEYS
    factor_left = tl.zeros((LANES,), tl.float32)
    factor_right = tl.zeros((LANES,), tl.float32)
    if NORMED > 0:
        weight = norm + layer * norm_layer_stride + head * norm_stride + lane
        here = (lane < HALF) & normed
        factor_left = tl.load(weight, mask=here, other=0.0).to(tl.float32)
        factor_right = tl.load(weight + HALF, mask=here, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    slot = row
    if SLOTTED:
        slot = tl.load(slots + row, mask=live & (head >= QUERIES), other=0).to(tl.int64)
    source = heads + layer * layer_stride + row[:, None] * row_stride + head * (2 * HALF) + lane
    left = tl.load(source, mask=inside, other=0.0)
    right = tl.load(source + HALF, mask=inside, other=0.0)
    cosines = cos + row[:, None] * cos_stride + lane
    sines = signed_sin + row[:, None] * sin_stride + lane
    along_left = tl.load(cosines, mask=inside & turned, other=0.0).to(tl.float32)
    across_right = tl.load(sines, mask=inside & turned, other=0.0).to(tl.float32)
    along_right = tl.load(cosines + HALF, mask=inside & turned, other=0.0).to(tl.float32)
    across_left = tl.load(sines + HALF, mask=inside & turned, other=0.0).to(tl.float32)
    dtype = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    if NORMED > 0 and normed:
        square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        factor = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        left = (left * factor).to(dtype).to(tl.float32)
        right = (right * factor).to(dtype).to(tl.float32)
        left = (left * factor_left).to(dtype).to(tl.float32)
        right = (right * factor_right).to(dtype).to(tl.float32)
    if turned:
        kept = (left * along_left).to(dtype).to(tl.float32)
        mixed = (right * across_right).to(dtype).to(tl.float32)
        far = (left * across_left).to(dtype).to(tl.float32)
        right = (right * along_right).to(dtype).to(tl.float32) + far
        left = kept + mixed
    if QUERIES > 0 and head < QUERIES:
        target = q_out + (row[:, None] * QUERIES + head) * (2 * HALF) + lane
    elif turned:
        at = layer * key_layer_stride + slot[:, None] * key_stride
        target = keys + at + (head - QUERIES) * (2 * HALF) + lane
    else:
        at = layer * value_layer_stride + slot[:, None] * value_stride
        target = values + at + (head - QUERIES - KEYS) * (2 * HALF) + lane
    tl.store(target, left.to(dtype), mask=inside)
    tl.store(target + HALF, right.to(dtype), mask=inside)


def place_qkv(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`ops.place_qkv.place_qkv` in one launch. Rows may lie apart; a row's elements may not."""
    kv_heads, dim = keys.shape[1:]
    heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
    q = qkv.new_empty(len(qkv), heads.shape[1] - 2 * kv_heads, dim)
    _place(heads[:, None], cos, signed_sin, keys[None], values[None], slots, q, norm, eps)
    return q


def place_context(
    kv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    norm: Tensor,
    eps: float,
) -> None:
    """`ops.place_qkv.place_context` in one launch for all layers."""
    _place(kv, cos, signed_sin, keys, values, slots, None, norm, eps)


def _place(
    heads: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor | None,
    q: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> None:
    """Heads [N, num_layers, num_heads + 2 num_kv_heads, head_dim] to where they belong."""
    count, num_layers, num_heads, dim = heads.shape
    num_kv_heads = keys.shape[2]
    for pool in (keys, values):
        if pool.stride()[2:] != (dim, 1):
            raise ValueError("the heads of a slot must lie one after another")
    if not count:
        return
    rows = 1 if count <= FEW_ROWS else ROWS
    constants: dict[str, Any] = {
        "QUERIES": num_heads - 2 * num_kv_heads,
        "KEYS": num_kv_heads,
        "NORMED": 0 if norm is None else norm.shape[-2],
        "SLOTTED": slots is not None,
        "HALF": dim // 2,
        "LANES": triton.next_power_of_2(dim // 2),
        "ROWS": rows,
    }
    _place_head[(triton.cdiv(count, rows), num_heads, num_layers)](
        heads, norm, cos, signed_sin, slots, q, keys, values,
        count, heads.stride(0), heads.stride(1), cos.stride(0), signed_sin.stride(0),
        keys.stride(1), values.stride(1), keys.stride(0), values.stride(0),
        0 if norm is None else norm.stride(-2),
        0 if norm is None or norm.dim() == 2 else norm.stride(0), eps,
        # A warp a row, however many: a row's squares are then added in one order.
        **constants, num_warps=rows, **early_start(heads.device),
    )  # fmt: skip
