"""Acceptance on a GPU: what `sampling/rejection.py` decides, for a bucket of windows of one width.

p and q as there. Four kernels, three where no request goes by coins:

    read_windows   of every entry's row of p: best candidate, largest logit and mass of its chunks
    _judge         a request a program: which drafts stand, and the last token where p chose it
    _left_over     of the one row that decides a coin request: the mass of max(p - q, 0) by chunk
    _emit          a request a program: the recovered or bonus draw; everything that is emitted

Unlike the plain op it looks at every entry at once, also past the first rejection: a GPU has the
room, and no result depends on it. And it says itself where a row is no distribution (its best logit
is not finite): whoever reads the result cannot look at rows that it does not wait for. Nothing here
depends on the batch or waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.batch import Verdict
from emberline.layout import Scored
from emberline.ops.triton.draws import CHUNK, read_windows
from emberline.ops.triton.gpu import await_inputs, early_start
from emberline.ops.triton.noise import (
    ACCEPT,
    BONUS,
    NO_CANDIDATE,
    RECOVER,
    column_of,
    finite,
    hash_key,
    is_finite_candidate,
    locate,
    tempered,
    uniform,
)
from emberline.ops.triton.scores import check_rows, programs_a_row

ENTRIES = 8  # of a window, at least: one variant of a kernel serves most blocks
REQS = 256  # requests that a program looks at together
PROGRAMS = 2048  # over which rows are spread


@triton.jit(do_not_specialize=["width"])
def _judge(
    logits, draft_ids, draft_logits, normalisers, starts, lens,
    positions, seeds, temperatures, coupled, best, peaks, masses,
    num_accepted, final_ids, final_peaks, final_masses,
    stride, draft_stride, num_chunks, width,
    COINS: tl.constexpr, POINTS: tl.constexpr, ENTRIES: tl.constexpr, CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One request a program; its window is a tile of entries by chunks."""
    await_inputs(EARLY)
    req = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + req)
    temperature = tl.load(temperatures + req)
    entry = tl.arange(0, ENTRIES)
    alive = entry < length
    has_draft = entry + 1 < length
    chunk = tl.arange(0, CHUNKS)
    at = (req * width + entry[:, None]) * num_chunks + chunk
    there = alive[:, None] & (chunk < num_chunks)
    draft = tl.load(draft_ids + req * (width - 1) + entry, mask=has_draft, other=0)
    favourite = tl.max(tl.load(best + at, mask=there, other=NO_CANDIDATE), 1)
    choice = column_of(favourite)
    stands = has_draft & (choice == draft)
    if COINS:
        coins = (temperature > 0) & (tl.load(coupled + req) == 0)
        chunk_peak = tl.load(peaks + at, mask=there, other=float("-inf"))
        chunk_mass = tl.load(masses + at, mask=there, other=0.0)
        peak = tl.max(chunk_peak, 1)
        mass = tl.sum(chunk_mass * tl.exp(chunk_peak - finite(peak)[:, None]), 1)
        row = tl.load(starts + req) + entry
        x = tl.load(logits + row * stride + draft, mask=has_draft, other=0.0).to(tl.float32)
        p = tl.exp(tempered(x, temperature) - finite(peak)) / tl.where(mass == 0, 1.0, mass)
        ratio = p
        if not POINTS:
            k = req * (width - 1) + entry
            y = tl.load(draft_logits + k * draft_stride + draft, mask=has_draft, other=0.0)
            q_peak = tl.load(normalisers + k * 2, mask=has_draft, other=0.0)
            q_mass = tl.load(normalisers + k * 2 + 1, mask=has_draft, other=1.0)
            q = tl.exp(y.to(tl.float32) - q_peak) / q_mass
            # q(x) is 0 only if it underflowed: x was drawn, so p(x) >= q(x) unless p(x) did too.
            ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), tl.where(p > 0, 1.0, 0.0))
        word = hash_key(
            tl.load(seeds + req), tl.load(positions + req) + entry, entry.to(tl.int64) * 0 + ACCEPT
        )
        # No minimum: a GPU's would make a ratio that is NaN 1, where it must not accept.
        heads = uniform(word) < tl.where(ratio >= 1.0, 1.0, ratio).to(tl.float64)
        stands = tl.where(coins, has_draft & heads, stands)
    accepted = tl.min(tl.where(stands, ENTRIES, entry), 0)
    tl.store(num_accepted + req, accepted.to(tl.int64))
    # What follows a rejected draft is nobody's: only rows that something was read from count.
    broken = alive & (entry <= accepted) & (is_finite_candidate(favourite) == 0)
    final = tl.sum(tl.where(entry == accepted, choice, 0), 0)
    tl.store(final_ids + req, tl.where(tl.max(broken.to(tl.int32), 0) > 0, -1, final))
    if COINS:
        tl.store(final_peaks + req, tl.sum(tl.where(entry == accepted, peak, 0.0), 0))
        tl.store(final_masses + req, tl.sum(tl.where(entry == accepted, mass, 0.0), 0))


@triton.jit
def _weights(
    logits, draft_logits, draft, column, size, temperature, peak, mass, q_peak, q_mass, recovers,
    POINTS: tl.constexpr,
):  # fmt: skip
    """max(p - q, 0) at columns of a row, or p itself. Pointers are to the rows."""
    inside = column < size
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    weight = tl.exp(tempered(x, temperature) - peak) / tl.where(mass == 0, 1.0, mass)
    if recovers:
        if POINTS:
            weight = tl.where(column == draft, 0.0, weight)
        else:
            y = tl.load(draft_logits + column, mask=inside, other=float("-inf")).to(tl.float32)
            over = weight - tl.exp(y - q_peak) / q_mass
            weight = tl.where(over > 0, over, 0.0)
    return weight


@triton.jit(do_not_specialize=["width"])
def _left_over(
    logits, draft_ids, draft_logits, normalisers, starts, lens, temperatures, coupled,
    num_accepted, final_peaks, final_masses, left,
    stride, draft_stride, size, num_chunks, width,
    POINTS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (b, i) takes chunks i, i + I, .. of the row at which request b was rejected."""
    await_inputs(EARLY)
    req = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + req)
    accepted = tl.load(num_accepted + req)
    coins = (temperature > 0) & (tl.load(coupled + req) == 0)
    if coins & (accepted + 1 < tl.load(lens + req)):
        k = req * (width - 1) + accepted
        logits += (tl.load(starts + req) + accepted) * stride
        draft = tl.load(draft_ids + k)
        q_peak = tl.full((), 0.0, tl.float32)
        q_mass = tl.full((), 1.0, tl.float32)
        if not POINTS:
            draft_logits += k * draft_stride
            q_peak = tl.load(normalisers + k * 2)
            q_mass = tl.load(normalisers + k * 2 + 1)
        peak = finite(tl.load(final_peaks + req))
        mass = tl.load(final_masses + req)
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            weight = _weights(
                logits, draft_logits, draft, column, size, temperature, peak, mass,
                q_peak, q_mass, True, POINTS,
            )  # fmt: skip
            tl.store(left + req * num_chunks + chunk, tl.sum(weight, 0))


@triton.jit
def _last_draw(
    logits, draft_ids, draft_logits, normalisers, starts, lens, positions, seeds, temperature,
    peaks, masses, accepted, final_peaks, final_masses, left, req,
    stride, draft_stride, size, num_chunks, width,
    POINTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The recovered or bonus token of a coin request."""
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    at = (req * width + accepted) * num_chunks + chunk
    peak = finite(tl.load(final_peaks + req))
    mass = tl.load(final_masses + req)
    chunk_peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    chunk_mass = tl.load(masses + at, mask=there, other=0.0) * tl.exp(chunk_peak - peak)
    rejected = accepted + 1 < tl.load(lens + req)
    # Where p and q agree to the last bit a rejection is a rounding accident: p is the answer.
    recovers = rejected
    draft = tl.full((), 0, tl.int64)
    q_peak = tl.full((), 0.0, tl.float32)
    q_mass = tl.full((), 1.0, tl.float32)
    if rejected:
        k = req * (width - 1) + accepted
        left_over = tl.load(left + req * num_chunks + chunk, mask=there, other=0.0)
        recovers = tl.max(left_over, 0) > 0
        chunk_mass = tl.where(recovers, left_over, chunk_mass)
        draft = tl.load(draft_ids + k)
        if not POINTS:
            draft_logits += k * draft_stride
            q_peak = tl.load(normalisers + k * 2)
            q_mass = tl.load(normalisers + k * 2 + 1)
    purpose = tl.where(rejected, RECOVER, BONUS).to(tl.int64)
    point = uniform(hash_key(tl.load(seeds + req), tl.load(positions + req) + accepted, purpose))
    found, inside = locate(chunk_mass, point, CHUNKS)
    column = found * CHUNK + tl.arange(0, CHUNK)
    weight = _weights(
        logits + (tl.load(starts + req) + accepted) * stride, draft_logits, draft, column, size,
        temperature, peak, mass, q_peak, q_mass, recovers, POINTS,
    )  # fmt: skip
    place, _ = locate(weight, inside, CHUNK)
    return (found * CHUNK + place).to(tl.int64)


@triton.jit(do_not_specialize=["num_reqs", "width"])
def _emit(
    logits, draft_ids, draft_logits, normalisers, starts, lens,
    positions, seeds, temperatures, coupled, peaks, masses,
    num_accepted, final_ids, final_peaks, final_masses, left,
    token_ids, scored_index, req_of_emitted, emitted_start_loc,
    num_reqs, stride, draft_stride, size, num_chunks, width,
    COINS: tl.constexpr, POINTS: tl.constexpr, ENTRIES: tl.constexpr, REQS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b writes what request b emits, program B what none does."""
    await_inputs(EARLY)
    req = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, REQS)
    start = tl.full((), 0, tl.int64)
    for first in range(0, req, REQS):
        other = first + lane
        emits = tl.load(lens + other, mask=other < req, other=0) > 0
        stood = tl.load(num_accepted + other, mask=other < req, other=0)
        start += tl.sum(tl.where(emits, stood + 1, 0), 0)
    tl.store(emitted_start_loc + req, start)
    if req == num_reqs:
        for lo in range(start, num_reqs * width, REQS):
            past = lo + lane < num_reqs * width
            nobody = tl.full((REQS,), -1, tl.int64)
            tl.store(token_ids + lo + lane, nobody, mask=past)
            tl.store(scored_index + lo + lane, nobody, mask=past)
            tl.store(req_of_emitted + lo + lane, nobody, mask=past)
        return
    length = tl.load(lens + req)
    if length == 0:
        return
    accepted = tl.load(num_accepted + req)
    final = tl.load(final_ids + req)
    if COINS:
        temperature = tl.load(temperatures + req)
        if (temperature > 0) & (tl.load(coupled + req) == 0) & (final >= 0):
            final = _last_draw(
                logits, draft_ids, draft_logits, normalisers, starts, lens, positions, seeds,
                temperature, peaks, masses, accepted, final_peaks, final_masses, left, req,
                stride, draft_stride, size, num_chunks, width, POINTS, CHUNKS, CHUNK,
            )  # fmt: skip
    entry = tl.arange(0, ENTRIES)
    emitted = entry <= accepted
    stood = tl.load(draft_ids + req * (width - 1) + entry, mask=entry < accepted, other=0)
    tl.store(token_ids + start + entry, tl.where(entry < accepted, stood, final), mask=emitted)
    tl.store(scored_index + start + entry, tl.load(starts + req) + entry, mask=emitted)
    tl.store(req_of_emitted + start + entry, entry.to(tl.int64) * 0 + req, mask=emitted)


def accept(
    logits: Scored,
    window_start: Tensor,
    window_lens: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    draft_normalisers: Tensor | None,
    *,
    temperatures: Tensor,
    coupled: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    coins: bool = True,
) -> tuple[Verdict, Tensor]:
    """`sampling.rejection.accept` with `KeyedDraws`, for B windows of 0 .. K + 1 entries.

    Args:
        logits: [Q, V] float32, bfloat16 or float16: those of p but for the temperature.
        window_start: [B] int64, row of entry 0.
        window_lens: [B] int64. 0: the request emits nothing.
        draft_ids: [B, K] int64; draft k is judged at entry k, and read where there is entry k + 1.
        draft_logits: [B, K, V] of q; None: each draft is a point mass.
        draft_normalisers: [B, K, 2] float32, those of `draft_logits` as `draw` and `markov_walk`
            give them; None with them.
        temperatures: [B] float32, 0 = greedy. Where the logits have been divided already: 1.
        coupled: [B] bool; ignored where greedy.
        seeds: [B] int64.
        first_positions: [B] int64, sequence position of the token drawn at entry 0.
        coins: False: every request is greedy or coupled, and q is not read.

    Returns:
        The verdict, and [N] int64 the request of each emitted token. N = B * (K + 1) whatever is
        emitted; entries from `emitted_start_loc[B]` on are -1. So is the last id of a request whose
        emitted entries include one that is no distribution.

    Raises:
        ValueError: q has no normalisers, or the logits are float64.
    """
    (num_reqs, num_drafts), size, device = draft_ids.shape, logits.shape[-1], logits.device
    points = draft_logits is None or not coins
    if draft_logits is not None and coins:
        check_rows(draft_logits)
        if draft_normalisers is None or not draft_logits.is_contiguous():
            raise ValueError(
                "draft_logits must be contiguous and come with their draft_normalisers, as "
                "`draw` and `markov_walk` give them"
            )
    width = num_drafts + 1
    draws = (first_positions, seeds, temperatures, coupled)
    windows = window_start, window_lens
    states = read_windows(logits, num_reqs, width, windows, *draws, weighed=coins)
    num_chunks = states.best.shape[1]

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=device)

    num_accepted, final_ids = ints(num_reqs), ints(num_reqs)
    final_peaks, final_masses = (torch.empty(num_reqs, device=device) for _ in range(2))
    left = torch.empty(num_reqs, num_chunks, device=device)
    emitted = [ints(num_reqs * width) for _ in range(3)]
    emitted_start_loc = ints(num_reqs + 1)
    drafts = (logits, draft_ids, draft_logits, draft_normalisers, window_start, window_lens)
    decided = (num_accepted, final_ids, final_peaks, final_masses)
    strides = (logits.stride(0), size)
    entries = max(ENTRIES, triton.next_power_of_2(width))
    chunks, early = triton.next_power_of_2(num_chunks), early_start(device)
    if num_reqs:
        _judge[(num_reqs,)](
            *drafts, *draws, states.best, states.peaks, states.masses, *decided,
            *strides, num_chunks, width,
            COINS=coins, POINTS=points, ENTRIES=entries, CHUNKS=chunks, **early,
        )  # fmt: skip
    if coins and num_reqs:
        _left_over[(num_reqs, programs_a_row(num_reqs, num_chunks, PROGRAMS))](
            *drafts, temperatures, coupled, num_accepted, final_peaks, final_masses, left,
            *strides, size, num_chunks, width,
            POINTS=points, CHUNK=CHUNK, **early,
        )  # fmt: skip
    _emit[(num_reqs + 1,)](
        *drafts, *draws, states.peaks, states.masses, *decided, left, *emitted, emitted_start_loc,
        num_reqs, *strides, size, num_chunks, width,
        COINS=coins, POINTS=points, ENTRIES=entries, REQS=REQS, CHUNKS=chunks, CHUNK=CHUNK,
        **early,
    )  # fmt: skip
    token_ids, scored_index, req_of_emitted = emitted
    return Verdict(num_accepted, token_ids, scored_index, emitted_start_loc), req_of_emitted
