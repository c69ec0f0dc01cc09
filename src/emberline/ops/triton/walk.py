"""The sequential head's walk over a block on a GPU: what `DSparkDrafter.propose` does after its
backbone, for the vanilla head.

One kernel a slot. Its programs share the vocabulary: each gathers w1 of the token before the slot,
multiplies its rows of w2 with it, adds the base logits, divides by the temperature, adds the noise
and enters its best candidate where the next slot reads the best of all. Its programs start while
those of the slot before still run, and hold their part of w2 and of the base logits by then: one
token is what is left between two slots. A last kernel writes the tokens and all confidences. Where
q is asked for, draws go by the inverse of a cumulative distribution, and a kernel a slot settles
them. Products have one shape, so a row's numbers depend on that row alone.

Must not know the backbone.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.batch import DrawKeys, DrawnBlock
from emberline.ops.triton.draws import settle_row
from emberline.ops.triton.gpu import await_inputs, early_start
from emberline.ops.triton.noise import (
    NO_CANDIDATE,
    NO_RANK,
    TARGET,
    candidate,
    column_of,
    finite,
    gumbel,
    hash_key,
    rank_of,
    tempered,
)
from emberline.ops.triton.scores import check_rows

ROWS = 8  # requests of a program: the width of a product on tensor cores
STRIPE_BYTES = 1 << 15  # of w2, in one product
LEAST_STRIPE = 16  # rows of w2 in one product,
MOST_STRIPE_BYTES = 512  # and most, times the bytes of a number
FEW_COLUMNS, MANY_COLUMNS = 512, 1024  # a program's of several stripes, by the vocabulary
LARGE_VOCAB = 1 << 16
FAST_RANK_BYTES = 512  # of a row of w2: three stripes of it fit the memory that a program shares
MOST_FEATURES = 4096  # of a hidden state that a confidence takes at a time


class ConfidenceWeights(Protocol):
    """What the walk reads of a confidence head: `drafters.markov.ConfidenceHead`."""

    @property
    def weight(self) -> Tensor:
        """[1, D + r], or [1, D] when it does not see the previous token."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[1]."""
        ...

    @property
    def temperatures(self) -> Tensor:
        """[K'] float32, K' >= K."""
        ...


@triton.jit
def _weights(w2, column, lane, size, RANK: tl.constexpr):
    """[STRIPE, LANES] rows of w2."""
    known = (column < size)[:, None] & (lane < RANK)[None, :]
    at = column.to(tl.int64)[:, None] * RANK + lane[None, :]
    return tl.load(w2 + at, mask=known, other=0.0)


@triton.jit
def _latents(
    w1, ids, anchors, best, rows, there, slot, num_reqs, num_drafts,
    FIRST: tl.constexpr, SETTLED: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """[LANES, WIDTH] w1 of the token before a slot: the anchor, or the draft of the slot before.

    One request takes the first column, zeros the others.
    """
    if FIRST:
        before = tl.load(anchors + rows, mask=there, other=0)
    elif SETTLED:
        before = tl.load(ids + rows * num_drafts + (slot - 1), mask=there, other=0)
    else:
        before = column_of(tl.load(best + (slot - 1) * num_reqs + rows, mask=there, other=0))
    lane = tl.arange(0, LANES)
    at = tl.broadcast_to(before[None, :] * RANK + lane[:, None], (LANES, WIDTH))
    live = there
    if rows.shape[0] < WIDTH:
        live = tl.arange(0, WIDTH) == 0
    return tl.load(w1 + at, mask=live[None, :] & (lane < RANK)[:, None], other=0.0)


@triton.jit
def _product(weight, latents, ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """[STRIPE, ROWS] biases."""
    bias = tl.dot(weight, latents, input_precision=PRECISION)
    if ROWS < WIDTH:
        bias = tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == 0, bias, 0.0), 1, keep_dims=True)
    return bias


@triton.jit(do_not_specialize=["slot", "num_reqs", "num_drafts"])
def _draw_slot(
    base, w1, w2, ids, anchors, positions, seeds, temperatures, purposes,
    best, peaks, masses, drawn,
    slot, num_reqs, num_drafts, num_parts, size,
    FIRST: tl.constexpr, WRITES: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STRIPE: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (g, i) takes COLUMNS columns of the vocabulary for ROWS requests.

    Groups are the faster axis: those that need the same columns of w2 run at the same time. The
    next kernel may start once this one's inputs are there: a slot behind the first thus finds all
    but the token before it in place, and reads that much past any cache that may be older.
    """
    part = tl.program_id(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = rows < num_reqs
    lane = tl.arange(0, LANES)
    column = part * COLUMNS + tl.arange(0, STRIPE)
    if COLUMNS == STRIPE:
        weight = _weights(w2, column, lane, size, RANK)
    if FIRST:
        await_inputs(EARLY)
    temperature = tl.load(temperatures + rows, mask=there, other=0.0, cache_modifier=".cg")
    purpose = tl.load(purposes + rows, mask=there, other=0, cache_modifier=".cg")
    position = tl.load(positions + rows, mask=there, other=0, cache_modifier=".cg") + (slot + 1)
    seed = tl.load(seeds + rows, mask=there, other=0, cache_modifier=".cg")
    row = (rows * num_drafts + slot) * size
    live = there[None, :] & (column < size)[:, None]
    if COLUMNS == STRIPE:
        at = row[None, :] + column[:, None]
        given = tl.load(base + at, mask=live, other=float("-inf"), cache_modifier=".cg")
    warm = temperature > 0
    noisy = warm & (purpose == TARGET)
    if not WRITES:
        noisy = warm  # without q nothing else can be drawn from
    word = hash_key(seed, position, purpose)
    any_warm = tl.max(warm.to(tl.int32), 0) > 0
    any_noise = tl.max(noisy.to(tl.int32), 0) > 0
    if not FIRST:
        await_inputs(EARLY)
    latents = _latents(
        w1, ids, anchors, best, rows, there, slot, num_reqs, num_drafts,
        FIRST, WRITES, RANK, LANES, WIDTH,
    )  # fmt: skip

    top = tl.full((STRIPE, ROWS), NO_RANK, tl.int32)
    top_column = tl.zeros((STRIPE, ROWS), tl.int32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, STRIPE):
        here = column + start
        if COLUMNS != STRIPE:
            weight = _weights(w2, here, lane, size, RANK)
            live = there[None, :] & (here < size)[:, None]
            at = row[None, :] + here[:, None]
            given = tl.load(base + at, mask=live, other=float("-inf"))
        x = given.to(tl.float32) + _product(weight, latents, ROWS, WIDTH, PRECISION)
        if any_warm:
            x = tempered(x, temperature[None, :])
        if WRITES:
            tl.store(drawn + at, x, mask=live & (warm & (purpose != TARGET))[None, :])
            higher = tl.maximum(peak, tl.max(x, 0))
            fresh = tl.sum(tl.exp(x - finite(higher)[None, :]), 0)
            mass = mass * tl.exp(peak - finite(higher)) + fresh
            peak = higher
        if any_noise:
            x += tl.where(noisy[None, :], gumbel(word[None, :], here[:, None]), 0.0)
        rank = tl.where(live, rank_of(x), NO_RANK)
        better = rank > top  # of equals the earlier column stays
        top = tl.where(better, rank, top)
        top_column = tl.where(better, tl.broadcast_to(here[:, None], (STRIPE, ROWS)), top_column)
    highest = tl.max(top, 0)
    found = tl.min(tl.where(top == highest[None, :], top_column, size), 0)
    own = best + slot * num_reqs + rows
    tl.atomic_max(own, candidate(highest, found), mask=there, sem="relaxed")
    if WRITES:
        tl.store(peaks + rows * num_parts + part, peak, mask=there)
        tl.store(masses + rows * num_parts + part, mass, mask=there)


@triton.jit(do_not_specialize=["slot", "num_reqs", "num_drafts"])
def _settle_slot(
    drawn, best, peaks, masses, positions, seeds, temperatures, purposes, ids, normalisers,
    slot, num_reqs, num_drafts, num_parts, size,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One request a program: its draft of this slot, where q is written."""
    await_inputs(EARLY)
    req = tl.program_id(0).to(tl.int64)
    states = req * num_parts
    k = req * num_drafts + slot
    purpose = tl.load(purposes + req)
    # What is at `drawn` has been divided by the temperature: 1 is left, or 0 for the best.
    greedy = tl.load(temperatures + req) == 0
    chosen, peak, mass = settle_row(
        drawn + k * size, tl.load(best + slot * num_reqs + req), peaks + states, masses + states,
        tl.where(greedy, 0.0, 1.0), tl.load(seeds + req), tl.load(positions + req) + slot + 1,
        purpose, size, num_parts, PARTS, COLUMNS,
    )  # fmt: skip
    tl.store(ids + k, chosen)
    tl.store(normalisers + k * 2, peak)
    tl.store(normalisers + k * 2 + 1, mass)


@triton.jit(do_not_specialize=["num_reqs", "num_drafts"])
def _finish(
    hidden, w1, weight, bias, scales, anchors, best, ids, confidence,
    num_reqs, num_drafts,
    SETTLED: tl.constexpr, CONFIDENT: tl.constexpr, BIASED: tl.constexpr, SEES: tl.constexpr,
    DIM: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr, FEATURES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (b, k): draft k, where it is not settled, and its confidence."""
    await_inputs(EARLY)
    req = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    k = req * num_drafts + slot
    if not SETTLED:
        tl.store(ids + k, column_of(tl.load(best + slot * num_reqs + req)))
    if CONFIDENT:
        total = tl.zeros((FEATURES,), tl.float32)
        for start in range(0, DIM, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            inside = feature < DIM
            h = tl.load(hidden + k * DIM + feature, mask=inside, other=0.0)
            w = tl.load(weight + feature, mask=inside, other=0.0)
            total += h.to(tl.float32) * w.to(tl.float32)
        logit = tl.sum(total, 0)
        if SEES:
            if slot == 0:
                before = tl.load(anchors + req)
            elif SETTLED:
                before = tl.load(ids + k - 1)
            else:
                before = column_of(tl.load(best + (slot - 1) * num_reqs + req))
            lane = tl.arange(0, LANES)
            e = tl.load(w1 + before * RANK + lane, mask=lane < RANK, other=0.0)
            we = tl.load(weight + DIM + lane, mask=lane < RANK, other=0.0)
            logit += tl.sum(e.to(tl.float32) * we.to(tl.float32), 0)
        if BIASED:
            logit += tl.load(bias).to(tl.float32)
        logit = tl.div_rn(logit, tl.load(scales + slot))
        tl.store(confidence + k, 1.0 / (1.0 + tl.exp(-logit)))


def markov_walk(
    base: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    temperatures: Tensor,
    keys: DrawKeys,
    need_logits: bool,
    confidence: ConfidenceWeights | None,
) -> DrawnBlock:
    """Draw K tokens a block, each from softmax((base + w2(w1[previous])) / temperature).

    Another head takes it slot by slot: K = 1, its latents [B, r] for w1 and 0 .. B - 1 for the
    anchors. A head over fewer tokens takes w2 with rows of zeros for those it does not know.

    Args:
        base: [B, K, V] logits in float32, bfloat16 or float16, contiguous.
        hidden: [B, K, D] normed hidden states, contiguous; read for the confidences.
        anchors: [B] int64, rows of w1: the tokens before the blocks.
        w1: [V, r], contiguous.
        w2: [V, r], contiguous and of w1's dtype. Products are summed in float32 and not rounded.
        temperatures: [B] float32; 0 = greedy.
        keys: [B]: the anchor's position (draft k is drawn at the position k + 1 after it), and
            purposes as `sampling.keys.block_purposes` gives them.
        need_logits: whether anybody draws for a purpose of the draft's own, and will read q. If
            not, every draw that is not greedy is by noise.
        confidence: None if the checkpoint has no confidence head.

    Returns:
        The drafts; with `need_logits` q of those requests that are neither greedy nor coupled: the
        rest of `logits` is never written.

    Raises:
        ValueError: a tensor is not laid out as said.
    """
    _check(base, hidden, w1, w2)
    num_reqs, num_drafts, size = base.shape
    device, rank = base.device, w1.shape[1]
    lanes = max(16, triton.next_power_of_2(rank))
    columns, stripe = _columns(size, lanes, w2.element_size())
    num_parts = triton.cdiv(size, columns)
    ids = torch.empty(num_reqs, num_drafts, dtype=torch.int64, device=device)
    best = torch.full((num_drafts, num_reqs), NO_CANDIDATE.value, device=device)
    peaks = masses = drawn = normalisers = None
    if need_logits:
        peaks, masses = (torch.empty(num_reqs, num_parts, device=device) for _ in range(2))
        drawn = torch.empty(num_reqs, num_drafts, size, device=device)
        normalisers = torch.empty(num_reqs, num_drafts, 2, device=device)
    rows = 1 if num_reqs == 1 and not need_logits else ROWS
    draws, early = (keys.positions, keys.seeds, temperatures, keys.purposes), early_start(device)
    for slot in range(num_drafts):
        _draw_slot[(triton.cdiv(num_reqs, rows), num_parts)](
            base, w1, w2, ids, anchors, *draws, best, peaks, masses, drawn,
            slot, num_reqs, num_drafts, num_parts, size,
            FIRST=slot == 0, WRITES=need_logits, RANK=rank, LANES=lanes,
            ROWS=rows, WIDTH=ROWS, COLUMNS=columns, STRIPE=stripe,
            PRECISION="ieee" if w2.dtype == torch.float32 else "tf32",
            num_stages=3 if lanes * w2.element_size() <= FAST_RANK_BYTES else 1,
            num_warps=2 if columns == stripe else 4, **early,
        )  # fmt: skip
        if need_logits:
            _settle_slot[(num_reqs,)](
                drawn, best, peaks, masses, *draws, ids, normalisers,
                slot, num_reqs, num_drafts, num_parts, size,
                PARTS=triton.next_power_of_2(num_parts), COLUMNS=columns, **early,
            )  # fmt: skip
    confidences = None
    if confidence is not None:
        confidences = torch.empty(num_reqs, num_drafts, device=device)
    if confidence is not None or not need_logits:
        dim = hidden.shape[-1]
        # Where there is no head nothing of it is read.
        weight = w1 if confidence is None else confidence.weight
        bias = None if confidence is None else confidence.bias
        scales = temperatures if confidence is None else confidence.temperatures
        _finish[(num_reqs, num_drafts)](
            hidden, w1, weight, bias, scales, anchors, best, ids, confidences,
            num_reqs, num_drafts,
            SETTLED=need_logits, CONFIDENT=confidence is not None,
            BIASED=bias is not None, SEES=weight.shape[1] > dim,
            DIM=dim, RANK=rank, LANES=lanes,
            FEATURES=min(MOST_FEATURES, triton.next_power_of_2(dim)), **early,
        )  # fmt: skip
    return DrawnBlock(ids, drawn, normalisers, confidences)


def _check(base: Tensor, hidden: Tensor, w1: Tensor, w2: Tensor) -> None:
    check_rows(base)
    for name, tensor in (("base", base), ("hidden", hidden), ("w1", w1), ("w2", w2)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")
    if w1.dtype != w2.dtype or w2.shape != (base.shape[-1], w1.shape[1]):
        raise ValueError(
            f"w2 must be [{base.shape[-1]}, {w1.shape[1]}] in {w1.dtype} as base and w1 are, got "
            f"{list(w2.shape)} in {w2.dtype}"
        )


def _columns(size: int, lanes: int, num_bytes: int) -> tuple[int, int]:
    """Columns of a program and of one of its products: the same for any batch.

    Args:
        size: V.
        lanes: numbers of a row of w2.
        num_bytes: of such a number.
    """
    most = MOST_STRIPE_BYTES // num_bytes
    stripe = min(most, max(LEAST_STRIPE, STRIPE_BYTES // (lanes * num_bytes)))
    if stripe == most:
        return most, most
    return MANY_COLUMNS if size > LARGE_VOCAB else FEW_COLUMNS, stripe
