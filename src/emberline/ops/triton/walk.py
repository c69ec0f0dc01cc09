"""The sequential head's walk over a block on a GPU: what `DSparkDrafter.propose` does after its
backbone, for the vanilla head.

One kernel a slot. Its programs share the vocabulary: each gathers w1 of the token before the slot,
multiplies it with its columns of w2, adds the base logits, divides by the temperature, adds the
noise and keeps its best candidate. Which token came before, every program reads for itself off the
candidates of the slot before, so that no kernel stands between two slots; one last kernel settles
the last slot and gives all confidences. Where q is asked for, draws go by the inverse of a
cumulative distribution, and a kernel a slot settles them.

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
from emberline.ops.triton.noise import (
    NO_CANDIDATE,
    TARGET,
    candidate,
    column_of,
    finite,
    gumbel,
    hash_key,
    tempered,
)
from emberline.ops.triton.scores import check_rows

FEW_COLUMNS, MANY_COLUMNS = 512, 1024  # a program's, in a small and in a large vocabulary
LARGE_VOCAB = 1 << 16
MOST_ROWS = 32  # requests of one product: with more of them registers run out
STRIPE = 64  # columns of one product
FAST_RANK_BYTES = 512  # of a row of w2: three stripes of it fit the memory that a program shares
FEATURES = 512  # of a hidden state that a confidence takes at a time


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
def _before(
    ids, anchors, best, rows, there, slot, num_reqs, num_drafts, num_parts,
    FIRST: tl.constexpr, SETTLED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """[ROWS] the token before a slot: the anchor, or the draft of the slot before."""
    if FIRST:
        return tl.load(anchors + rows, mask=there, other=0)
    elif SETTLED:
        return tl.load(ids + rows * num_drafts + (slot - 1), mask=there, other=0)
    else:
        part = tl.arange(0, PARTS)
        # Two slots take turns: this one's candidates must not touch those it reads.
        at = (((slot - 1) % 2) * num_reqs + rows[:, None]) * num_parts + part
        known = there[:, None] & (part < num_parts)
        return column_of(tl.max(tl.load(best + at, mask=known, other=NO_CANDIDATE), 1))


@triton.jit(do_not_specialize=["slot", "num_reqs"])
def _draw_slot(
    base, w1, w2, ids, anchors, positions, seeds, temperatures, purposes,
    best, peaks, masses, drawn,
    slot, num_reqs, num_drafts, num_parts, size,
    FIRST: tl.constexpr, WRITES: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, STRIPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (g, i) takes COLUMNS columns of the vocabulary for ROWS requests.

    Groups are the faster axis: those that need the same columns of w2 run at the same time.
    """
    part = tl.program_id(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = rows < num_reqs
    before = _before(
        ids, anchors, best, rows, there, slot, num_reqs, num_drafts, num_parts, FIRST, WRITES, PARTS
    )
    if not FIRST and not WRITES:
        tl.store(ids + rows * num_drafts + (slot - 1), before, mask=there & (part == 0))
    lane = tl.arange(0, LANES)
    known = there[:, None] & (lane < RANK)
    latent = tl.load(w1 + before[:, None] * RANK + lane, mask=known, other=0.0)
    temperature = tl.load(temperatures + rows, mask=there, other=0.0)
    purpose = tl.load(purposes + rows, mask=there, other=0)
    noisy = (temperature > 0) & (purpose == TARGET)
    if not WRITES:
        noisy = temperature > 0  # without q nothing else can be drawn from
    asked = there & (temperature > 0) & (purpose != TARGET)
    position = tl.load(positions + rows, mask=there, other=0) + (slot + 1)
    word = hash_key(tl.load(seeds + rows, mask=there, other=0), position, purpose)
    any_noise = tl.max(noisy.to(tl.int32), 0) > 0

    top = tl.full((ROWS,), NO_CANDIDATE, tl.int64)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, STRIPE):
        column = part * COLUMNS + start + tl.arange(0, STRIPE)
        inside = column < size
        weight = tl.load(
            w2 + column[None, :].to(tl.int64) * RANK + lane[:, None],
            mask=inside[None, :] & (lane[:, None] < RANK),
            other=0.0,
        )
        bias = tl.dot(latent, weight, input_precision=PRECISION)
        at = (rows[:, None] * num_drafts + slot) * size + column
        live = there[:, None] & inside[None, :]
        x = tl.load(base + at, mask=live, other=float("-inf")).to(tl.float32) + bias
        x = tempered(x, temperature[:, None])
        if WRITES:
            tl.store(drawn + at, x, mask=live & asked[:, None])
            higher = tl.maximum(peak, tl.max(x, 1))
            fresh = tl.sum(tl.exp(x - finite(higher)[:, None]), 1)
            mass = mass * tl.exp(peak - finite(higher)) + fresh
            peak = higher
        if any_noise:
            x += tl.where(noisy[:, None], gumbel(word[:, None], column[None, :]), 0.0)
        columns = tl.broadcast_to(column[None, :], (ROWS, STRIPE))
        key = tl.where(live, candidate(x, columns), NO_CANDIDATE)
        top = tl.maximum(top, tl.max(key, 1))
    at = ((slot % 2) * num_reqs + rows) * num_parts + part
    tl.store(best + at, top, mask=there)
    if WRITES:
        tl.store(peaks + at, peak, mask=there)
        tl.store(masses + at, mass, mask=there)


@triton.jit(do_not_specialize=["slot", "num_reqs"])
def _settle_slot(
    drawn, best, peaks, masses, positions, seeds, temperatures, purposes, ids, normalisers,
    slot, num_reqs, num_drafts, num_parts, size,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One request a program: its draft of this slot, where q is written."""
    req = tl.program_id(0).to(tl.int64)
    states = ((slot % 2) * num_reqs + req) * num_parts
    k = req * num_drafts + slot
    purpose = tl.load(purposes + req)
    # What is at `drawn` has been divided by the temperature: 1 is left, or 0 for the best.
    greedy = tl.load(temperatures + req) == 0
    chosen, peak, mass = settle_row(
        drawn + k * size, best + states, peaks + states, masses + states,
        tl.where(greedy, 0.0, 1.0), tl.load(seeds + req), tl.load(positions + req) + slot + 1,
        purpose, size, num_parts, PARTS, COLUMNS,
    )  # fmt: skip
    tl.store(ids + k, chosen)
    tl.store(normalisers + k * 2, peak)
    tl.store(normalisers + k * 2 + 1, mass)


@triton.jit(do_not_specialize=["num_reqs"])
def _finish(
    hidden, w1, weight, bias, scales, anchors, best, ids, confidence,
    num_reqs, num_drafts, num_parts,
    LAST: tl.constexpr, SETTLED: tl.constexpr, CONFIDENT: tl.constexpr, BIASED: tl.constexpr,
    WIDE: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Program (b, k): the confidence of draft k; the last one also says what the last draft is."""
    req = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    k = req * num_drafts + slot
    if not SETTLED:
        last = slot == LAST
        part = tl.arange(0, PARTS)
        at = ((LAST % 2) * num_reqs + req) * num_parts + part
        keys = tl.load(best + at, mask=last & (part < num_parts), other=NO_CANDIDATE)
        tl.store(ids + k, column_of(tl.max(keys, 0)), mask=last)
    if CONFIDENT:
        total = tl.zeros((FEATURES,), tl.float32)
        for start in range(0, DIM, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            inside = feature < DIM
            h = tl.load(hidden + k * DIM + feature, mask=inside, other=0.0)
            w = tl.load(weight + feature, mask=inside, other=0.0)
            total += h.to(tl.float32) * w.to(tl.float32)
        logit = tl.sum(total, 0)
        if WIDE:
            before = tl.load(anchors + req) if slot == 0 else tl.load(ids + k - 1)
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
    columns = MANY_COLUMNS if size > LARGE_VOCAB else FEW_COLUMNS
    num_parts = triton.cdiv(size, columns)
    parts, lanes = triton.next_power_of_2(num_parts), max(16, triton.next_power_of_2(rank))
    ids = torch.empty(num_reqs, num_drafts, dtype=torch.int64, device=device)
    best = torch.empty(2, num_reqs, num_parts, dtype=torch.int64, device=device)
    peaks = masses = drawn = normalisers = None
    if need_logits:
        peaks, masses = torch.empty(2, 2, num_reqs, num_parts, device=device).unbind()
        drawn = torch.empty(num_reqs, num_drafts, size, device=device)
        normalisers = torch.empty(num_reqs, num_drafts, 2, device=device)
    row_group = min(MOST_ROWS, max(16, triton.next_power_of_2(num_reqs)))
    draws = (keys.positions, keys.seeds, temperatures, keys.purposes)
    for slot in range(num_drafts):
        _draw_slot[(triton.cdiv(num_reqs, row_group), num_parts)](
            base, w1, w2, ids, anchors, *draws, best, peaks, masses, drawn,
            slot, num_reqs, num_drafts, num_parts, size,
            FIRST=slot == 0, WRITES=need_logits, RANK=rank, LANES=lanes, ROWS=row_group,
            PARTS=parts, COLUMNS=columns, STRIPE=STRIPE,
            PRECISION="ieee" if w2.dtype == torch.float32 else "tf32",
            num_stages=3 if lanes * w2.element_size() <= FAST_RANK_BYTES else 1,
        )  # fmt: skip
        if need_logits:
            _settle_slot[(num_reqs,)](
                drawn, best, peaks, masses, *draws, ids, normalisers,
                slot, num_reqs, num_drafts, num_parts, size,
                PARTS=parts, COLUMNS=columns,
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
            num_reqs, num_drafts, num_parts,
            LAST=num_drafts - 1, SETTLED=need_logits, CONFIDENT=confidence is not None,
            BIASED=bias is not None, WIDE=weight.shape[1] > dim,
            DIM=dim, RANK=rank, LANES=lanes, PARTS=parts, FEATURES=FEATURES,
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
