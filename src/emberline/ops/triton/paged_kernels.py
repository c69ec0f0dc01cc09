"""The kernel of `paged_attention`: attention over a span of keys, and the merge of spans.

A state is what an online softmax carries (Milakov and Gimelshein 2018): for each row the highest
score so far in units of log2, the mass of exponentials below it, and the values mixed by them. A
row that has seen nothing has the score -inf and zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from emberline.ops.triton.gpu import await_inputs

LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is the GPU's own exponential


@triton.jit
def _merge(peak, mass, mixed, peak_2, mass_2, mixed_2):
    """Two states as one. With explicit fused products, so that every kernel rounds alike."""
    top = tl.maximum(peak, peak_2)
    ground = tl.where(top == float("-inf"), 0.0, top)
    first = tl.exp2(peak - ground)
    second = tl.exp2(peak_2 - ground)
    mass = tl.fma(mass, first, mass_2 * second)
    wide = tl.broadcast_to(first[:, None], mixed.shape)
    return top, mass, tl.fma(mixed, wide, mixed_2 * second[:, None])


@triton.jit
def _finish(peak, mass, mixed, sink, SINKS: tl.constexpr):
    """The attention of a state's rows; a sink adds mass and no value."""
    if SINKS:
        top = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - top)
        mass = mass * shrink + tl.exp2(sink - top)
        mixed = mixed * shrink[:, None]
    # A row of a tile that no query has may see nothing at all.
    return mixed / tl.where(mass > 0.0, mass, 1.0)[:, None]


@triton.jit
def _see(
    q, k, v, seen, peak, mass, mixed, scale, soft_cap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A state after one more tile of keys, of which each row sees its own: all if not MASKED."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        # tanh(x) is 2 sigmoid(2 x) - 1.
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores * scale / soft_cap) - 1.0) * LOG2_E
    else:
        scores = scores * (scale * LOG2_E)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    ground = higher
    if MASKED:
        ground = tl.where(higher == float("-inf"), 0.0, higher)
    chances = tl.exp2(scores - ground[:, None])
    shrink = tl.exp2(peak - ground)
    mass = mass * shrink + tl.sum(chances, 1)
    mixed = tl.dot(chances.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
    return higher, mass, mixed


@triton.jit
def _walk(
    q, keys, values, pages, begin, end, position, peak, mass, mixed,
    key_stride, value_stride, scale, soft_cap,
    DIM: tl.constexpr, LANES: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_LANES: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A state after the keys of positions [begin, end) of one request.

    Not MASKED: every row sees all of them, and they are whole tiles. Else what lies past `end` is
    not read: it may be another request's, or nothing. Neither is what lies behind every row's
    window: its page may be given up, and a weight of zero does not undo a NaN.
    """
    lane = tl.arange(0, LANES)
    value_lane = tl.arange(0, VALUE_LANES)
    for start in range(begin, end, KEYS):
        column = start + tl.arange(0, KEYS)
        inside = tl.full((KEYS,), True, tl.int1)
        if MASKED:
            inside = column < end
        if WINDOW > 0:
            inside = inside & (column > tl.min(position, 0) - WINDOW)
        page = tl.load(pages + column // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (page * PAGE + column % PAGE)[:, None]
        here = inside[:, None]
        k = tl.load(keys + slot * key_stride + lane, mask=here & (lane < DIM), other=0.0)
        v = tl.load(
            values + slot * value_stride + value_lane,
            mask=here & (value_lane < VALUE_DIM), other=0.0,
        )  # fmt: skip
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (column[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (column[None, :] > position[:, None] - WINDOW)
        peak, mass, mixed = _see(
            q, k, v, seen, peak, mass, mixed, scale, soft_cap, MASKED, CAPPED, PRECISION
        )
    return peak, mass, mixed


@triton.jit
def _see_block(
    q, block_keys, block_values, first, share, kv_head, peak, mass, mixed, scale,
    key_stride, key_head_stride, value_stride, value_head_stride,
    DIM: tl.constexpr, LANES: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_LANES: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A state after the block from row `first` on; the same state where it is another's share."""
    lane = tl.arange(0, LANES)
    value_lane = tl.arange(0, VALUE_LANES)
    column = tl.arange(0, COLUMNS)
    row = (first + column).to(tl.int64)[:, None]
    inside = (column < BLOCK) & share
    here = inside[:, None]
    k = tl.load(
        block_keys + row * key_stride + kv_head * key_head_stride + lane,
        mask=here & (lane < DIM), other=0.0,
    )  # fmt: skip
    v = tl.load(
        block_values + row * value_stride + kv_head * value_head_stride + value_lane,
        mask=here & (value_lane < VALUE_DIM), other=0.0,
    )  # fmt: skip
    return _see(q, k, v, inside[None, :], peak, mass, mixed, scale, 0.0, True, False, PRECISION)


@triton.jit
def _extent(length, count, tile, ROWS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
            WINDOW: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Positions [low, high) that some row of a tile sees; low is a multiple of KEYS."""
    low = 0
    high = length
    if CAUSAL:
        last = ((tile + 1) * ROWS - 1) // GROUP
        high = tl.minimum(length, length - count + last + 1)
    if WINDOW > 0:
        first = tile * ROWS // GROUP
        low = tl.maximum(0, length - count + first - WINDOW + 1) // KEYS * KEYS
    return low, high


@triton.jit
def _share(
    low, high, span, spans, LEAST: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of the positions [low, high) those of one span, and how many spans there are for all.

    In fixed order a span is a chunk. Else there are up to `spans`, of LEAST keys or more.
    """
    if CHUNK > 0:
        count = tl.cdiv(high, CHUNK) - low // CHUNK
        begin = tl.maximum(low, (low // CHUNK + span) * CHUNK)
        end = tl.minimum(high, (low // CHUNK + span + 1) * CHUNK)
    else:
        size = tl.maximum(LEAST, tl.cdiv(tl.cdiv(high - low, KEYS), spans) * KEYS)
        count = tl.cdiv(high - low, size)
        begin = low + span * size
        end = tl.minimum(high, begin + size)
    return begin, end, tl.maximum(count, 1)


@triton.jit
def _join(
    mixed_out, states_out, arrivals, cell, live, span, spans, count, peak, mass, mixed,
    VALUE_DIM: tl.constexpr, VALUE_LANES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Leave a span's state. The last program to do so takes all of them, first to last.

    Some are written out together, so that all their loads are under way before the first merge.
    What other programs wrote is read where they meet, past the cache of a multiprocessor.

    Returns:
        The state, and whether it is that of all spans. If so the counter is zero again.
    """
    value_lane = tl.arange(0, VALUE_LANES)
    written = live[:, None] & (value_lane < VALUE_DIM)
    cell = cell * spans
    tl.store(states_out + 2 * (cell + span), peak, mask=live)
    tl.store(states_out + 2 * (cell + span) + 1, mass, mask=live)
    tl.store(mixed_out + (cell + span)[:, None] * VALUE_DIM + value_lane, mixed, mask=written)
    tl.debug_barrier()  # one thread counts for all of the program
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrivals, 0)
        peak = tl.full(peak.shape, float("-inf"), tl.float32)
        mass = tl.zeros(mass.shape, tl.float32)
        mixed = tl.zeros(mixed.shape, tl.float32)
        for begin in range(0, count, TOGETHER):
            for step in tl.static_range(TOGETHER):
                at = cell + begin + step
                there = live & (begin + step < count)
                peak_2 = tl.load(
                    states_out + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg"
                )
                mass_2 = tl.load(
                    states_out + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg"
                )
                mixed_2 = tl.load(
                    mixed_out + at[:, None] * VALUE_DIM + value_lane,
                    mask=there[:, None] & (value_lane < VALUE_DIM), other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                peak, mass, mixed = _merge(peak, mass, mixed, peak_2, mass_2, mixed_2)
    return peak, mass, mixed, last


@triton.jit(
    do_not_specialize=("tiles", "spans", "table_stride"),
    do_not_specialize_on_alignment=("query_start_loc", "lens", "page_table"),
)
def attend_span(
    q, keys, values, block_keys, block_values, sinks,
    query_start_loc, lens, page_table, out, mixed_out, states_out, arrivals,
    q_stride, q_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    block_key_stride, block_key_head_stride, block_value_stride, block_value_head_stride,
    table_stride, tiles, spans, scale, soft_cap,
    GROUP: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_LANES: tl.constexpr, SINKS: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPREAD: tl.constexpr,
    LEAST: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of one request's rows and one key head, over its share of the keys.

    SPREAD: up to `spans` programs share the keys; else one takes all. WHOLE: tiles of keys that
    all rows see go without masks.
    """
    req = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    span = tl.program_id(2)
    await_inputs(EARLY)
    length = tl.load(lens + req).to(tl.int32)
    if BLOCK > 0:
        first = req * BLOCK
        count = BLOCK
    else:
        first = tl.load(query_start_loc + req).to(tl.int32)
        count = tl.load(query_start_loc + req + 1).to(tl.int32) - first
    if tile * ROWS >= count * GROUP:
        return
    low, high = _extent(length, count, tile, ROWS, GROUP, BLOCK == 0, WINDOW, KEYS)
    begin, end = low, high
    if SPREAD:
        begin, end, parts = _share(low, high, span, spans, LEAST, KEYS, CHUNK)
        if span >= parts:
            return

    packed = tile * ROWS + tl.arange(0, ROWS)
    live = packed < count * GROUP
    position = length - count + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    row = (first + packed // GROUP).to(tl.int64)
    lane = tl.arange(0, LANES)
    x = tl.load(
        q + row[:, None] * q_stride + head[:, None] * q_head_stride + lane,
        mask=live[:, None] & (lane < DIM), other=0.0,
    )  # fmt: skip
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_LANES), tl.float32)
    if BLOCK > 0:
        peak, mass, mixed = _see_block(
            x, block_keys, block_values, first, span == 0, kv_head, peak, mass, mixed, scale,
            block_key_stride, block_key_head_stride, block_value_stride, block_value_head_stride,
            DIM, LANES, VALUE_DIM, VALUE_LANES, BLOCK, COLUMNS, PRECISION,
        )  # fmt: skip
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    pages = page_table + req.to(tl.int64) * table_stride
    if CHUNK > 0:
        for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
            peak_2, mass_2, mixed_2 = _walk(
                x, keys, values, pages,
                tl.maximum(begin, chunk * CHUNK), tl.minimum(end, (chunk + 1) * CHUNK), position,
                tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32),
                tl.zeros((ROWS, VALUE_LANES), tl.float32),
                key_stride, value_stride, scale, soft_cap, DIM, LANES, VALUE_DIM, VALUE_LANES,
                PAGE, KEYS, True, BLOCK == 0, WINDOW, CAPPED, PRECISION,
            )  # fmt: skip
            peak, mass, mixed = _merge(peak, mass, mixed, peak_2, mass_2, mixed_2)
    else:
        if WHOLE:
            seen_by_all = tl.minimum(end, length - count + tile * ROWS // GROUP + 1)
            edge = begin + tl.maximum(seen_by_all - begin, 0) // KEYS * KEYS
            peak, mass, mixed = _walk(
                x, keys, values, pages, begin, edge, position, peak, mass, mixed,
                key_stride, value_stride, scale, soft_cap, DIM, LANES, VALUE_DIM, VALUE_LANES,
                PAGE, KEYS, False, False, 0, CAPPED, PRECISION,
            )  # fmt: skip
            begin = edge
        peak, mass, mixed = _walk(
            x, keys, values, pages, begin, end, position, peak, mass, mixed,
            key_stride, value_stride, scale, soft_cap, DIM, LANES, VALUE_DIM, VALUE_LANES,
            PAGE, KEYS, True, BLOCK == 0, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip

    cell = row * (tl.num_programs(1) * GROUP) + head
    if SPREAD:  # noqa: SIM102  known to the compiler: only then does it know of parts
        if parts > 1:
            group = tl.program_id(0) * tl.num_programs(1) + kv_head
            peak, mass, mixed, last = _join(
                mixed_out, states_out, arrivals + group, cell, live, span, spans, parts,
                peak, mass, mixed, VALUE_DIM, VALUE_LANES, TOGETHER,
            )  # fmt: skip
            if not last:
                return
    sink = peak
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
    result = _finish(peak, mass, mixed, sink, SINKS).to(out.dtype.element_ty)
    value_lane = tl.arange(0, VALUE_LANES)
    written = live[:, None] & (value_lane < VALUE_DIM)
    tl.store(out + cell[:, None] * VALUE_DIM + value_lane, result, mask=written)
