"""Causal attention of a step's queries over paged KV.

The plan (which slots a query group reads, the mask) is made once a step for each distinct sliding
window and used by every layer. Results do not depend on how a sequence was cut into steps: see
`plan_attention`. Must not know models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_GRANULE = 8
KV_GRANULE = 128
SHORT_QUERY = 16  # queries up to here are batched over requests, longer ones run one by one


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Requests that attend together: G requests, n queries each (padded), a window of W slots."""

    queries: Tensor  # [G * n] int64, token of each query; padding repeats the last one
    slots: Tensor  # [G * W] int64, KV slot of each window position
    mask: Tensor  # [G, 1, n, W], 0 or -inf
    tokens: Tensor  # [t] int64, live tokens of the group
    rows: Tensor  # [t] int64, their places among the padded queries
    num_reqs: int  # G


def plan_attention(
    query_lens: Sequence[int],
    positions: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> list[QueryGroup]:
    """Group the step's queries.

    Args:
        query_lens: tokens each request forwards; they end at its last position.
        positions: [T] int64, request-major, consecutive within a request.
        page_table: [B, M] int64.
        page_size: tokens a page.
        sliding_window: tokens a query sees, itself included; None for all.
        dtype: of the mask, the dtype of the computation.
    """
    starts = [0]
    for n in query_lens:
        starts.append(starts[-1] + n)
    short = [r for r, n in enumerate(query_lens) if n <= SHORT_QUERY]
    groups = [[r] for r, n in enumerate(query_lens) if n > SHORT_QUERY]
    if short:
        groups.append(short)
    return [
        _group(reqs, starts, positions, page_table, page_size, sliding_window, dtype)
        for reqs in groups
    ]


def _group(
    reqs: list[int],
    starts: list[int],
    positions: Tensor,
    page_table: Tensor,
    page_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> QueryGroup:
    device = positions.device
    lens = [starts[r + 1] - starts[r] for r in reqs]
    width = _round_up(max(lens), QUERY_GRANULE)
    first = torch.tensor([starts[r] for r in reqs], device=device)
    last = torch.tensor([starts[r + 1] - 1 for r in reqs], device=device)
    queries = torch.minimum(first[:, None] + torch.arange(width, device=device), last[:, None])
    query_pos = positions[queries]  # [G, n]
    window = _round_up(int(query_pos.max()) + 1, KV_GRANULE)
    kv_pos = torch.arange(window, device=device)
    seen = kv_pos <= query_pos[:, :, None]
    if sliding_window is not None:
        seen &= kv_pos > query_pos[:, :, None] - sliding_window
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    live = torch.arange(width, device=device) < torch.tensor(lens, device=device)[:, None]
    return QueryGroup(
        queries=queries.flatten(),
        slots=_slots(page_table[reqs], page_size, window).flatten(),
        mask=mask[:, None],
        tokens=queries[live],
        rows=live.flatten().nonzero()[:, 0],
        num_reqs=len(reqs),
    )


def attend(
    q: Tensor, keys: Tensor, values: Tensor, groups: Sequence[QueryGroup], scale: float
) -> Tensor:
    """Attention output of every token.

    Args:
        q: [T, num_heads, head_dim], rotated.
        keys: [num_slots, num_kv_heads, head_dim], one layer of the pool, this step's included.
        values: the same shape.
        groups: the step's plan.
        scale: factor of the scores.

    Returns:
        [T, num_heads, head_dim].
    """
    out = torch.empty_like(q)
    num_kv_heads, head_dim = keys.shape[1:]
    share = q.shape[1] // num_kv_heads
    for group in groups:
        reqs = group.num_reqs
        k = keys.index_select(0, group.slots).view(reqs, -1, num_kv_heads, head_dim)
        v = values.index_select(0, group.slots).view(reqs, -1, num_kv_heads, head_dim)
        grouped = q.index_select(0, group.queries)
        grouped = grouped.view(reqs, -1, num_kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            grouped.flatten(2, 3),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=group.mask.repeat(1, 1, share, 1),
            scale=scale,
        )
        mixed = mixed.view(reqs, num_kv_heads, share, -1, head_dim).permute(0, 3, 1, 2, 4)
        out[group.tokens] = mixed.reshape(-1, *q.shape[1:])[group.rows]
    return out


def _slots(page_table: Tensor, page_size: int, window: int) -> Tensor:
    """[G, M] pages to the [G, window] slots of positions 0 .. window-1 (page 0 past the end)."""
    pages = -(-window // page_size)
    table = page_table[:, :pages]
    if table.shape[1] < pages:
        table = F.pad(table, (0, pages - table.shape[1]))
    offsets = torch.arange(page_size, device=page_table.device)
    return (table[:, :, None] * page_size + offsets).flatten(1)[:, :window]


def _round_up(count: int, granule: int) -> int:
    return -(-count // granule) * granule
