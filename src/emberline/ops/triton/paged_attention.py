"""Attention over paged KV, its lengths read on the device: fixed grids for captured steps.

The query heads that share a key head and the queries of a request are the rows of one product, so
that a key is read once for all of them. Where few rows run, the keys are spread over programs
(flash decoding: Dao et al. 2023) and a second kernel merges what they found.

Fixed order: keys are cut at multiples of `CHUNK` positions, each chunk is summed by itself, and
the chunks are merged first to last, by one program or by the second kernel: the same operations
either way. Rows run in tiles of one size. Blocks that a row does not see change none of its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from emberline.ops.paged_attention import PagedContext
from emberline.ops.triton.gpu import processors
from emberline.ops.triton.paged_kernels import attend_span, merge_spans

CHUNK = 256  # positions summed by themselves in fixed order
FIXED_ROWS = 32  # of a tile in fixed order
MOST_ROWS = 64  # of a tile
WIDE_ROWS = 16  # of a tile in float32, whose products are not for tensor cores
LEAST_SPAN = 128  # keys that a program should have before another one takes part
MOST_SPANS = 32
MOST_PARTIAL_BYTES = 2**26  # of what spread programs leave for the second kernel
PROGRAMS_PER_PROCESSOR = 2  # that keep one busy


@dataclass(frozen=True, slots=True)
class _Grid:
    """How a launch is cut. Depends on shapes alone, so it can be captured."""

    rows: int  # of a tile: queries times the heads that share a key head
    tiles: int  # of a request
    spans: int  # programs that share the keys of a tile
    chunk: int  # positions summed by themselves; 0: a span is one sum

    @classmethod
    def of(
        cls, context: PagedContext, q: Tensor, values: Tensor, max_query_len: int, block_len: int
    ) -> _Grid:
        """The grid for `max_query_len` queries a request."""
        reqs, num_pages = context.page_table.shape
        kv_heads, value_dim = values.shape[1:]
        packed = max_query_len * (q.shape[1] // kv_heads)
        most_keys = num_pages * context.page_size
        wide = q.dtype == torch.float32
        if context.fixed_order:
            spans = max(1, triton.cdiv(most_keys, CHUNK))
            partial = 4 * spans * q.shape[0] * q.shape[1] * value_dim
            spread = partial <= MOST_PARTIAL_BYTES
            rows = WIDE_ROWS if wide else FIXED_ROWS
            return cls(rows, triton.cdiv(packed, rows), spans if spread else 1, CHUNK)
        rows = min(MOST_ROWS, max(16, triton.next_power_of_2(packed)))
        if wide:
            rows = WIDE_ROWS
        tiles = triton.cdiv(packed, rows)
        wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors(q.device), reqs * tiles * kv_heads)
        most = min(MOST_SPANS, triton.cdiv(most_keys + block_len, LEAST_SPAN))
        return cls(rows, tiles, max(1, min(wanted, most)), 0)


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
    """`ops.paged_attention.paged_attention` in one or two launches."""
    return _attend(
        q, keys, values, None, None, context, query_start_loc, max_query_len,
        scale, sliding_window, soft_cap, sinks,
    )  # fmt: skip


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
    """`ops.paged_attention.block_attention` in one or two launches."""
    width = q.shape[0] // len(context.lens)
    return _attend(
        q, keys, values, block_keys, block_values, context, None, width, scale, None, None, None
    )


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_keys: Tensor | None,
    block_values: Tensor | None,
    context: PagedContext,
    query_start_loc: Tensor | None,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Both forms: with `query_start_loc` the causal one, else that of blocks."""
    num_rows, num_heads, dim = q.shape
    kv_heads, value_dim = values.shape[1:]
    block_len = 0 if query_start_loc is not None else max_query_len
    out = q.new_empty(num_rows, num_heads * value_dim)
    if not num_rows:
        return out
    grid = _Grid.of(context, q, values, max_query_len, block_len)
    mixed, states = out, None
    if grid.spans > 1:
        mixed = q.new_empty(num_rows, num_heads, grid.spans, value_dim, dtype=torch.float32)
        states = q.new_empty(num_rows, num_heads, grid.spans, 2, dtype=torch.float32)
    shape: dict[str, Any] = {
        "VALUE_DIM": value_dim,
        "VALUE_LANES": _lanes(value_dim),
        "SPANS": grid.spans,
        "SINKS": sinks is not None,
    }
    lanes = max(_lanes(dim), _lanes(value_dim))
    reqs = len(context.lens)
    attend_span[(reqs * grid.tiles, kv_heads, grid.spans)](
        q, keys, values, block_keys, block_values, sinks,
        query_start_loc, context.lens, context.page_table, mixed, states,
        q.stride(0), q.stride(1),
        *keys.stride()[:2], *values.stride()[:2],
        *(block_keys.stride()[:2] if block_keys is not None else (0, 0)),
        *(block_values.stride()[:2] if block_values is not None else (0, 0)),
        context.page_table.stride(0), scale, soft_cap or 0.0,
        **shape, GROUP=num_heads // kv_heads, DIM=dim, LANES=_lanes(dim),
        PAGE=context.page_size, TILES=grid.tiles, ROWS=grid.rows,
        KEYS=_keys(lanes, q.dtype),
        CHUNK=grid.chunk, WINDOW=sliding_window or 0, CAPPED=soft_cap is not None,
        BLOCK=block_len, COLUMNS=max(16, triton.next_power_of_2(block_len)) if block_len else 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if states is not None:
        merge_spans[(num_rows, num_heads)](
            mixed, states, sinks, query_start_loc, out, reqs,
            **shape, RAGGED=query_start_loc is not None, TOGETHER=min(8, grid.spans),
            num_warps=1,
        )  # fmt: skip
    return out


def _keys(lanes: int, dtype: torch.dtype) -> int:
    """Of a tile, so that its products stay in registers."""
    if dtype == torch.float32:
        return 32 if lanes <= 64 else 16
    return 64 if lanes <= 128 else 32


def _lanes(width: int) -> int:
    """Of a tile that holds a head: tensor cores take powers of two from 16 on."""
    return max(16, int(triton.next_power_of_2(width)))
