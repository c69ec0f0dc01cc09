"""Triton kernels of training on a GPU; imported only where one is used.

Each has its plain form elsewhere, which says what is computed: `loss_rows` that of
`objectives.loss_and_gradient`, `lockstep_attention` the attention of `target.Lockstep`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.train.objectives import Mix, RowLosses

COLUMNS = 4096  # of a row that one step of a kernel's loop takes
KEYS = 64  # positions that one step of the attention takes
LEAST_QUERIES = 16  # rows of the smallest matrix product on tensor cores


@triton.jit
def _loss_row(
    draft, target, labels, weights, gradient, ce_out, l1_out, total_out, agree_out, hit_out,
    size, ce, l1, soft_ce, l1_sharp, cold,
    SHARP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its normalisers, then its distances, then its gradient.

    The second and third reading of a row come from the L2 cache where few rows run at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    draft += row * size
    target += row * size
    gradient += row * size
    label = tl.load(labels + row)
    weight = tl.load(weights + row)
    lanes = tl.arange(0, BLOCK)

    top_d = tl.full((BLOCK,), float("-inf"), tl.float32)
    top_t = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass_d = tl.zeros((BLOCK,), tl.float32)
    mass_t = tl.zeros((BLOCK,), tl.float32)
    best_d = tl.zeros((BLOCK,), tl.int32)
    best_t = tl.zeros((BLOCK,), tl.int32)
    cold_d = tl.zeros((BLOCK,), tl.float32)
    cold_t = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + lanes
        inside = column < size
        x = tl.load(draft + column, mask=inside, other=-1e30)
        y = tl.load(target + column, mask=inside, other=-1e30)
        peak = tl.maximum(top_d, x)
        mass_d = mass_d * tl.exp(top_d - peak) + tl.exp(x - peak)
        if SHARP:
            cold_d = cold_d * tl.exp((top_d - peak) * cold) + tl.exp((x - peak) * cold)
        best_d = tl.where(x > top_d, column, best_d)
        top_d = peak
        peak = tl.maximum(top_t, y)
        mass_t = mass_t * tl.exp(top_t - peak) + tl.exp(y - peak)
        if SHARP:
            cold_t = cold_t * tl.exp((top_t - peak) * cold) + tl.exp((y - peak) * cold)
        best_t = tl.where(y > top_t, column, best_t)
        top_t = peak
    max_d = tl.max(top_d, 0)
    max_t = tl.max(top_t, 0)
    # The first of equal maxima, as torch.argmax on a CPU takes it.
    choice_d = tl.min(tl.where(top_d == max_d, best_d, size), 0)
    choice_t = tl.min(tl.where(top_t == max_t, best_t, size), 0)
    sum_d = tl.sum(mass_d * tl.exp(top_d - max_d), 0)
    sum_t = tl.sum(mass_t * tl.exp(top_t - max_t), 0)
    cold_sum_d = tl.sum(cold_d * tl.exp((top_d - max_d) * cold), 0)
    cold_sum_t = tl.sum(cold_t * tl.exp((top_t - max_t) * cold), 0)

    apart = tl.zeros((BLOCK,), tl.float32)
    lean = tl.zeros((BLOCK,), tl.float32)
    expected = tl.zeros((BLOCK,), tl.float32)
    cold_apart = tl.zeros((BLOCK,), tl.float32)
    cold_lean = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + lanes
        inside = column < size
        x = tl.load(draft + column, mask=inside, other=-1e30)
        y = tl.load(target + column, mask=inside, other=-1e30)
        q = tl.exp(x - max_d) / sum_d
        p = tl.exp(y - max_t) / sum_t
        gap = q - p
        expected += tl.where(inside, p * x, 0.0)
        apart += tl.abs(gap)
        lean += tl.where(gap > 0, q, tl.where(gap < 0, -q, 0.0))
        if SHARP:
            q = tl.exp((x - max_d) * cold) / cold_sum_d
            gap = q - tl.exp((y - max_t) * cold) / cold_sum_t
            cold_apart += tl.abs(gap)
            cold_lean += tl.where(gap > 0, q, tl.where(gap < 0, -q, 0.0))
    distance = tl.sum(apart, 0)
    side = tl.sum(lean, 0)
    cold_distance = tl.sum(cold_apart, 0)
    cold_side = tl.sum(cold_lean, 0)

    for start in range(0, size, BLOCK):
        column = start + lanes
        inside = column < size
        x = tl.load(draft + column, mask=inside, other=-1e30)
        y = tl.load(target + column, mask=inside, other=-1e30)
        q = tl.exp(x - max_d) / sum_d
        gap = q - tl.exp(y - max_t) / sum_t
        sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
        slope = ce * (q - tl.where(column == label, 1.0, 0.0)) + l1 * q * (sign - side)
        slope += soft_ce * gap
        if SHARP:
            q = tl.exp((x - max_d) * cold) / cold_sum_d
            gap = q - tl.exp((y - max_t) * cold) / cold_sum_t
            sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
            slope += l1_sharp * cold * q * (sign - cold_side)
        slope *= weight
        tl.store(gradient + column, slope.to(gradient.dtype.element_ty), mask=inside)

    normaliser = max_d + tl.log(sum_d)
    entropy = normaliser - tl.load(draft + label)
    soft_entropy = normaliser - tl.sum(expected, 0)
    total = ce * entropy + l1 * distance + soft_ce * soft_entropy + l1_sharp * cold_distance
    tl.store(ce_out + row, entropy)
    tl.store(l1_out + row, distance)
    tl.store(total_out + row, total)
    tl.store(agree_out + row, choice_d == choice_t)
    tl.store(hit_out + row, choice_d == label)


def loss_rows(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    mix: Mix,
    dtype: torch.dtype,
) -> RowLosses:
    """`objectives.loss_and_gradient` in one kernel: three readings of the logits, one writing."""
    count, size = draft_logits.shape
    draft, target = draft_logits.contiguous(), target_logits.contiguous()
    gradient = torch.empty(count, size, dtype=dtype, device=draft.device)
    ce, l1, total = torch.empty(3, count, device=draft.device).unbind()
    agree, hit = torch.empty(2, count, dtype=torch.bool, device=draft.device).unbind()
    _loss_row[(count,)](
        draft, target, labels.contiguous(), weights.float().contiguous(), gradient,
        ce, l1, total, agree, hit,
        size, mix.ce, mix.l1, mix.soft_ce, mix.l1_sharp, 1 / mix.sharp_temperature,
        SHARP=mix.l1_sharp != 0, BLOCK=min(COLUMNS, triton.next_power_of_2(size)), num_warps=16,
    )  # fmt: skip
    return RowLosses(ce, l1, total, gradient, agree, hit)


@triton.jit
def _attend_row(
    query, keys, values, out, count, batch_stride, head_stride, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One KV head of one sequence a program; its query heads are the rows of a product."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    at = ((sequence * tl.num_programs(1) + head) * GROUP + row[:, None]) * DIM + dim
    q = tl.load(query + at, mask=row[:, None] < GROUP, other=0.0)
    base = sequence * batch_stride + head * head_stride
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, count, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < count
        where = base + position[:, None] * DIM + dim
        k = tl.load(keys + where, mask=inside[:, None], other=0.0)
        v = tl.load(values + where, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(inside, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        chances = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        mass = mass * shrink + tl.sum(chances, 1)
        mixed = mixed * shrink[:, None] + tl.dot(chances.to(v.dtype), v)
        peak = higher
    tl.store(out + at, mixed / mass[:, None], mask=row[:, None] < GROUP)


def lockstep_attention(query: Tensor, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """Attention of one token a sequence over the first `count` entries of its cache.

    Args:
        query: [B, H, Dh]; heads that share a KV head are neighbours.
        keys, values: [B, Hkv, L, Dh], contiguous in the last two.
        count: entries to see, 1 .. L.

    Returns:
        [B, H, Dh] in the query's dtype.
    """
    batch, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if keys.stride() != values.stride() or keys.stride()[2:] != (dim, 1):
        raise ValueError("keys and values must be laid out alike, rows of a head after another")
    group = heads // kv_heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    constants: dict[str, Any] = {
        "GROUP": group,
        "DIM": dim,
        "ROWS": max(LEAST_QUERIES, triton.next_power_of_2(group)),
        "BLOCK": KEYS,
    }
    _attend_row[(batch, kv_heads)](
        query.contiguous(), keys, values, out, count, keys.stride(0), keys.stride(1), dim**-0.5,
        **constants, num_warps=2,
    )  # fmt: skip
    return out
