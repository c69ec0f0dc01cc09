"""Attention over paged KV, its lengths read on the device: fixed grids for captured steps.

The query heads that share a key head and the queries of a request are the rows of one product, so
that a key is read once for all of them. Where few programs would run, the keys of each are spread
over several (flash decoding: Dao et al. 2023), and the last of them to finish merges what they
found, first to last. How many take part depends on a request's length: a short one needs no merge.

Fixed order: keys are cut at multiples of `CHUNK` positions, each chunk is summed by itself, and
the chunks are merged first to last, by one program or by the last of several: the same operations
either way. Rows run in tiles of one size. Blocks that a row does not see change none of its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
import triton
from torch import Tensor

from emberline.ops.paged_attention import COUNTERS, PagedContext
from emberline.ops.triton.gpu import early_start, processors
from emberline.ops.triton.paged_kernels import attend_span

CHUNK = 512  # positions summed by themselves in fixed order
FEW_ROWS = 32  # of a tile where a request has no more, and in fixed order
LEAST_ROWS = 16  # likewise, and in float32, whose products are not for tensor cores
LEAST_SPAN = 128  # keys that a program should have before another one takes part
MOST_PARTIAL_BYTES = 2**26  # of what spread programs leave for the last of them
FEW_PROGRAMS = 2  # with few rows that keep a multiprocessor busy
STAGES = 5  # two tiles of keys are under way, and the page ids of two more: fewer overlap nothing


@dataclass(frozen=True, slots=True)
class _Grid:
    """How a launch is cut. Depends on shapes alone, so it can be captured."""

    rows: int  # of a tile: queries times the heads that share a key head
    tiles: int  # of a request
    spans: int  # most programs that share the keys of a tile
    chunk: int  # positions summed by themselves; 0: a span is one sum
    keys: int  # of a tile
    warps: int
    stages: int = STAGES

    @classmethod
    def of(
        cls, context: PagedContext, q: Tensor, values: Tensor, max_query_len: int, lanes: int
    ) -> _Grid:
        """The grid for `max_query_len` queries a request, whose heads lie in `lanes` lanes."""
        reqs, num_pages = context.page_table.shape
        kv_heads, value_dim = values.shape[1:]
        packed = max_query_len * (q.shape[1] // kv_heads)
        most_keys = num_pages * context.page_size
        busy = min(processors(q.device), COUNTERS)
        wide = q.dtype == torch.float32
        many = not (wide or context.fixed_order) and packed > FEW_ROWS
        narrow = packed <= LEAST_ROWS and lanes <= 64 and not context.fixed_order
        rows = LEAST_ROWS if wide or narrow else FEW_ROWS
        if many:
            full = packed > 64 and reqs * kv_heads * triton.cdiv(packed, 128) >= busy
            rows = 128 if full and lanes <= 128 else 64
        tiles = triton.cdiv(packed, rows)
        programs = reqs * tiles * kv_heads
        if context.fixed_order:
            spans = max(1, triton.cdiv(most_keys, CHUNK))
            partial = 4 * spans * q.shape[0] * q.shape[1] * value_dim
            if programs >= busy or partial > MOST_PARTIAL_BYTES:
                spans = 1
            keys = _few(lanes, wide, alone=lanes <= 64)[0]
            return cls(rows, tiles, spans, CHUNK, keys, 4 if wide else 8)
        # Some programs read a span each, then one reads a state of each: the sum is to be small.
        square = triton.cdiv(most_keys, min(packed, rows))
        most = min(triton.cdiv(most_keys, LEAST_SPAN), 1 + isqrt(square - 1))
        room = busy if packed > 64 else FEW_PROGRAMS * busy
        spans = max(1, min(room // programs, most))
        if many:
            return cls(rows, tiles, spans, 0, *_many(lanes, rows))
        few = _few(lanes, wide, alone=programs * spans <= busy, narrow=narrow)
        return cls(rows, tiles, spans, 0, *few)


def _few(lanes: int, wide: bool, *, alone: bool, narrow: bool = False) -> tuple[int, int, int]:
    """Keys of a tile, warps, and stages, for few rows. By measurement (docs/lab-notes.md).

    A program that has a multiprocessor for itself asks for more at once: it has little more than
    one tile of keys, and nothing to fetch ahead.
    """
    if wide:
        return (32 if lanes <= 64 else 16), 4, STAGES
    if lanes > 128:
        return 32, 4, 1 if alone else STAGES
    if alone:
        return 128, (4 if lanes <= 64 else 8), 1
    if lanes > 64:
        return 64, 4, STAGES
    return (64, 2, STAGES) if narrow else (128, 4, 2)


def _many(lanes: int, rows: int) -> tuple[int, int]:
    """The same for more: as many keys as the products' registers have room for."""
    if lanes > 128:
        return 32, 4
    return (128 if lanes <= 64 and rows == 128 else 64), rows // 16


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
    """`ops.paged_attention.paged_attention` in one launch."""
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
    """`ops.paged_attention.block_attention` in one launch."""
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
    lanes = max(_lanes(dim), _lanes(value_dim))
    grid = _Grid.of(context, q, values, max_query_len, lanes)
    mixed = states = arrivals = None
    if grid.spans > 1:
        mixed = q.new_empty(num_rows, num_heads, grid.spans, value_dim, dtype=torch.float32)
        states = q.new_empty(num_rows, num_heads, grid.spans, 2, dtype=torch.float32)
        arrivals = context.arrivals
    attend_span[(len(context.lens) * grid.tiles, kv_heads, grid.spans)](
        q, keys, values, block_keys, block_values, sinks,
        query_start_loc, context.lens, context.page_table, out, mixed, states, arrivals,
        q.stride(0), q.stride(1),
        *keys.stride()[:2], *values.stride()[:2],
        *(block_keys.stride()[:2] if block_keys is not None else (0, 0)),
        *(block_values.stride()[:2] if block_values is not None else (0, 0)),
        context.page_table.stride(0), grid.tiles, grid.spans, scale, soft_cap or 0.0,
        GROUP=num_heads // kv_heads, DIM=dim, LANES=_lanes(dim),
        VALUE_DIM=value_dim, VALUE_LANES=_lanes(value_dim), SINKS=sinks is not None,
        PAGE=context.page_size, ROWS=grid.rows, KEYS=grid.keys,
        SPREAD=grid.spans > 1, LEAST=LEAST_SPAN, CHUNK=grid.chunk,
        WHOLE=grid.rows >= 64 and not sliding_window and not block_len,
        TOGETHER=4 if grid.rows * lanes <= 32 * 32 * grid.warps else 2,
        WINDOW=sliding_window or 0, CAPPED=soft_cap is not None,
        BLOCK=block_len, COLUMNS=max(16, triton.next_power_of_2(block_len)) if block_len else 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=grid.warps, num_stages=grid.stages, **early_start(q.device),
    )  # fmt: skip
    return out


def _lanes(width: int) -> int:
    """Of a tile that holds a head: tensor cores take powers of two from 16 on."""
    return max(16, int(triton.next_power_of_2(width)))
