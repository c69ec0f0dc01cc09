"""Causal attention of a step's queries over paged KV.

The plan (which queries run together, the slots they read, the mask) is made once a step for each
distinct sliding window and used by every layer. Must not know models or requests.

A token's result does not depend on how its sequence was cut into steps or what else ran:
matrix products see query rows in multiples of 8 (heads that share a key head are rows too), and
a KV window is rounded up so that a longer one only adds blocks that are masked as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_GRANULE = 8
SHORT_QUERY = 16  # up to here queries of several requests run together
MAX_QUERY = 128  # longer ones are cut: bounds the mask, and early queries skip late keys
MOST_WASTE = 16
"""Query rows that padding may add before a group of its own is cheaper (lab notes, CPU forward)."""
KV_BLOCK = 512
"""Keys that the CPU's fused attention takes at a time; windows start at a multiple of it."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """G requests (or pieces of one) that attend together: n queries each, W slots.

    m is n * (query heads that share a key head), rounded up to `ROW_GRANULE`.
    """

    queries: Tensor | slice  # [G * n] tokens; padding repeats a request's last one
    slots: Tensor  # [G * W] int64
    mask: Tensor  # [G, 1, m, W]: 0 or -inf
    tokens: Tensor | slice  # [t] live tokens, in token space
    places: Tensor | slice  # [t] where they are among the G * n
    num_reqs: int  # G


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries of one request."""

    req: int
    token: int  # first query, token space
    count: int
    position: int  # of the first query

    @property
    def end(self) -> int:
        return self.position + self.count


def window_of(end: int) -> int:
    """Slots that a query group reads when its last position is `end - 1`.

    A multiple of 128, and never 256 past a multiple of 512: a last block of 256 keys is summed in
    another order than one of 384 or 512, while 128 agrees with every longer one (measured in
    float32 and bfloat16; lab notes, CPU forward).
    """
    window = _round_up(end, 128)
    return window + 128 if window % KV_BLOCK == 256 else window


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_table: Tensor,
    page_size: int,
    *,
    share: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> list[QueryGroup]:
    """Group the step's queries.

    Args:
        query_lens: tokens each request forwards: its last ones.
        seq_lens: tokens each request has in KV once this step has run.
        page_table: [B, M] int64.
        page_size: tokens a page.
        share: query heads that read one key head.
        sliding_window: tokens a query sees, itself included; None for all.
        dtype: of the computation and of the mask.
    """
    groups: list[list[_Piece]] = []
    together: dict[int, list[_Piece]] = {}
    for piece in _pieces(query_lens, seq_lens):
        if piece.count > SHORT_QUERY:
            groups.append([piece])
        else:  # Windows within a factor of two of each other share a gather.
            size = (window_of(piece.end) // 128).bit_length()
            together.setdefault(size, []).append(piece)
    for pieces in together.values():
        groups += _by_length(pieces, share)
    return [
        _group(pieces, page_table, page_size, share, sliding_window, dtype) for pieces in groups
    ]


def _by_length(pieces: list[_Piece], share: int) -> Iterable[list[_Piece]]:
    """Cut into groups where padding the shorter ones to the longest would cost too much."""
    rows = {p.count: _round_up(p.count * share, ROW_GRANULE) for p in pieces}
    longest = 0  # rows of the group being filled
    group: list[_Piece] = []
    waste = 0  # rows that padding adds to it
    for count in sorted(rows):
        more = (rows[count] - longest) * len(group)
        if group and waste + more > MOST_WASTE:
            yield sorted(group, key=_first_token)
            group, waste, more = [], 0, 0
        longest, waste = rows[count], waste + more
        group += [piece for piece in pieces if piece.count == count]
    yield sorted(group, key=_first_token)


def _first_token(piece: _Piece) -> int:
    return piece.token


def _pieces(query_lens: Sequence[int], seq_lens: Sequence[int]) -> Iterable[_Piece]:
    token = 0
    for req, (count, end) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for offset in range(0, count, MAX_QUERY):
            length = min(MAX_QUERY, count - offset)
            yield _Piece(req, token + offset, length, end - count + offset)
        token += count


def _group(
    pieces: list[_Piece],
    page_table: Tensor,
    page_size: int,
    share: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> QueryGroup:
    device, width = page_table.device, max(p.count for p in pieces)
    end = window_of(max(p.end for p in pieces))
    begin = 0
    if sliding_window is not None:
        begin = max(0, min(p.position for p in pieces) - sliding_window + 1)
        begin = begin // KV_BLOCK * KV_BLOCK
    first = torch.tensor([p.position for p in pieces], device=device)
    query_pos = (first[:, None] + torch.arange(width, device=device))[:, :, None]
    key_pos = torch.arange(begin, end, device=device)
    hidden = key_pos > query_pos
    if sliding_window is not None:
        hidden |= key_pos <= query_pos - sliding_window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask = mask.masked_fill_(hidden, float("-inf")).repeat_interleave(share, 1)
    mask = F.pad(mask, (0, 0, 0, _round_up(width * share, ROW_GRANULE) - width * share))
    queries, tokens, places = _query_maps(pieces, width, device)
    reqs = [p.req for p in pieces]
    table = page_table if reqs == list(range(len(page_table))) else page_table[reqs]
    slots = _slots(table, page_size, begin, end).flatten()
    return QueryGroup(queries, slots, mask[:, None], tokens, places, len(pieces))


def _query_maps(
    pieces: list[_Piece], width: int, device: torch.device
) -> tuple[Tensor | slice, Tensor | slice, Tensor | slice]:
    start = pieces[0].token
    if all(p.count == width and p.token == start + i * width for i, p in enumerate(pieces)):
        span = slice(start, start + len(pieces) * width)
        return span, span, slice(None)
    first = torch.tensor([p.token for p in pieces], device=device)[:, None]
    counts = torch.tensor([p.count for p in pieces], device=device)[:, None]
    steps = torch.arange(width, device=device)
    queries = first + torch.minimum(steps, counts - 1)
    live = steps < counts
    return queries.flatten(), queries[live], live.flatten().nonzero()[:, 0]


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Sequence[QueryGroup],
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output of every token.

    Args:
        q: [T, num_heads, head_dim], rotated.
        keys: [num_slots, num_kv_heads, head_dim], one layer of the pool, this step's included.
            What lies in masked slots must be finite.
        values: [num_slots, num_kv_heads, value_dim].
        groups: the step's plan.
        scale: factor of the scores.
        soft_cap: c: scores become c * tanh(scores / c) (Gemma 2).
        sinks: [num_heads], a score a head that takes its share of the softmax and adds no value
            (Xiao et al. 2023; learned, as in GPT-OSS).

    Returns:
        [T, num_heads * value_dim].
    """
    if len(groups) == 1 and isinstance(groups[0].queries, slice):
        return _attend_group(q, keys, values, groups[0], scale, soft_cap, sinks)
    out = q.new_empty(q.shape[0], q.shape[1] * values.shape[2])
    for group in groups:
        mixed = _attend_group(q, keys, values, group, scale, soft_cap, sinks)
        out[group.tokens] = mixed[group.places]
    return out


def _attend_group(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: QueryGroup,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[G * n, num_heads * value_dim]."""
    reqs, (num_kv_heads, head_dim) = group.num_reqs, keys.shape[1:]
    share = q.shape[1] // num_kv_heads
    k = keys.index_select(0, group.slots).view(reqs, -1, num_kv_heads, head_dim).transpose(1, 2)
    v = values.index_select(0, group.slots).view(reqs, -1, *values.shape[1:]).transpose(1, 2)
    x = q[group.queries].view(reqs, -1, num_kv_heads, share, head_dim)
    width = x.shape[1]
    x = x.transpose(1, 2).reshape(reqs, num_kv_heads, width * share, head_dim)
    if padding := group.mask.shape[2] - width * share:
        x = F.pad(x, (0, 0, 0, padding))
    if soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(x, k, v, attn_mask=group.mask, scale=scale)
    else:
        if sinks is not None:
            sinks = F.pad(sinks.view(-1, share).repeat(1, width), (0, padding))
        out = weigh(x @ k.mT * scale, group.mask, soft_cap, sinks) @ v
    out = out[:, :, : width * share].reshape(reqs, num_kv_heads, width, share, -1)
    return out.transpose(1, 2).reshape(reqs * width, -1)


def weigh(scores: Tensor, mask: Tensor, soft_cap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention weights of scores [G, H, m, W], by a softmax in float32.

    Args:
        scores: scaled.
        mask: 0 or -inf, broadcast over the scores.
        soft_cap, sinks: see `attend`; sinks [H, m].
    """
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    wide = (scores + mask).to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is None:
        return torch.softmax(wide, -1).to(scores.dtype)
    # The sink comes first: a longer window then only adds columns at the end.
    column = sinks.to(wide.dtype)[None, :, :, None].expand(wide.shape[0], -1, -1, 1)
    return torch.softmax(torch.cat((column, wide), -1), -1)[..., 1:].to(scores.dtype)


def _slots(page_table: Tensor, page_size: int, begin: int, end: int) -> Tensor:
    """[G, M] pages to [G, end - begin] slots of those positions (page 0 past the table)."""
    first, last = begin // page_size, -(-end // page_size)
    table = page_table[:, first:last]
    if table.shape[1] < last - first:
        table = F.pad(table, (0, last - first - table.shape[1]))
    offsets = torch.arange(page_size, device=page_table.device)
    return (table[:, :, None] * page_size + offsets).flatten(1)


def _round_up(count: int, granule: int) -> int:
    return -(-count // granule) * granule
