"""Attention over paged KV where every length lies on the device: what a captured step runs.

Two forms: a target's rows, each seeing its own past, and a draft's block, whose slots see the
context in the pages and each other. Here in plain torch, the reference of
`ops/triton/paged_attention.py`; the CPU runs `ops/attention.py`, which plans on the host. Must not
know models or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

COUNTERS = 1024


@dataclass(frozen=True)
class PagedContext:
    """What each of B requests has in the pages. Made once a step; the tensors stay in place."""

    lens: Tensor  # [B] integers: tokens in the pages that are seen, this step's included
    page_table: Tensor  # [B, M] integers
    page_size: int
    fixed_order: bool = False
    """A row's sums then depend on its own keys alone, bit for bit (batch-invariant mode)."""

    @cached_property
    def arrivals(self) -> Tensor:
        """[COUNTERS] int32 zeros, by which the programs of a kernel tell who comes last.

        The last one leaves a zero, so one launch a step makes them for every layer.
        """
        return torch.zeros(COUNTERS, dtype=torch.int32, device=self.lens.device)

    def slots(self) -> Tensor:
        """[B, M * page_size] slots of positions 0, 1, ..."""
        offsets = torch.arange(self.page_size, device=self.page_table.device)
        return (self.page_table.long()[:, :, None] * self.page_size + offsets).flatten(1)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    context: PagedContext,
    query_start_loc: Tensor,
    max_query_len: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention: the queries of a request are its last tokens.

    Args:
        q: [N, num_heads, head_dim], rotated; N may exceed the live rows.
        keys: [num_slots, num_kv_heads, head_dim], this step's included.
        values: [num_slots, num_kv_heads, value_dim].
        context: lengths (once this step has run) and pages; a request without queries may have
            any length.
        query_start_loc: [B + 1] integers: rows of request b are those from entry b to b + 1.
        max_query_len: most queries a request may have.
        scale: factor of the scores.
        sliding_window: tokens a query sees, itself included; None for all.
        soft_cap: c: scores become c * tanh(scores / c).
        sinks: [num_heads], a score a head that takes its share of the softmax.

    Returns:
        [N, num_heads * value_dim]; rows that are not live hold anything.
    """
    del max_query_len  # sizes the grid of kernels
    row = torch.arange(q.shape[0], device=q.device)
    req = torch.searchsorted(query_start_loc, row, right=True) - 1
    req = req.clamp_max(len(context.lens) - 1)
    position = (context.lens[req] - query_start_loc[req + 1] + row)[:, None]
    slots = context.slots()[req]
    column = torch.arange(slots.shape[1], device=q.device)
    seen = column <= position
    if sliding_window is not None:
        seen &= column > position - sliding_window
    return _mix(q, keys[slots], values[slots], seen, scale, soft_cap, sinks)


def block_attention(
    q: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    keys: Tensor,
    values: Tensor,
    context: PagedContext,
    *,
    scale: float,
) -> Tensor:
    """Attention of B blocks of W slots: each slot sees its request's context and its whole block.

    Args:
        q: [B * W, num_heads, head_dim], rotated.
        block_keys: [B * W, num_kv_heads, head_dim] of the blocks, in no page.
        block_values: [B * W, num_kv_heads, value_dim].
        keys, values, context: as in `paged_attention`.
        scale: factor of the scores.

    Returns:
        [B * W, num_heads * value_dim].
    """
    reqs = len(context.lens)
    width, slots = q.shape[0] // reqs, context.slots()
    column = torch.arange(slots.shape[1], device=q.device)
    seen = (column < context.lens[:, None]).repeat_interleave(width, 0)
    seen = torch.cat((seen.new_ones(len(q), width), seen), 1)

    def beside(block: Tensor, pool: Tensor) -> Tensor:
        both = torch.cat((block.view(reqs, width, *block.shape[1:]), pool[slots]), 1)
        return both.repeat_interleave(width, 0)

    return _mix(q, beside(block_keys, keys), beside(block_values, values), seen, scale, None, None)


def _mix(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention of each row over columns of its own, in float32.

    Args:
        q: [N, num_heads, head_dim].
        keys, values: [N, S, num_kv_heads, width]; what is not seen may hold anything.
        seen: [N, S] bool.
    """
    count, _, kv_heads, dim = keys.shape
    grouped = q.float().view(count, kv_heads, -1, dim)
    scores = torch.einsum("nhgd,nshd->nhgs", grouped, keys.float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(kv_heads, -1, 1).expand(count, -1, -1, 1)
        scores = torch.cat((column, scores), -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        weights = weights[..., 1:]
    held = values.float().masked_fill(~seen[:, :, None, None], 0.0)
    return torch.einsum("nhgs,nshd->nhgd", weights, held).flatten(1).to(q.dtype)
