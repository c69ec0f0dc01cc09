"""Drawing one id a row on a GPU: what `sampling.keys.draw` does, under the same keys.

Two kernels. `read_windows` reads every row once, chunks of it in parallel, and keeps of each chunk
its best candidate (with its noise, where the draw is by noise), its largest logit and its mass;
then one program a row decides. Acceptance reads the target's rows with the same kernel. Chunks have
one size whatever the batch is, so a row's numbers depend on that row alone.

Must not know what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.batch import DrawKeys
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
    locate,
    rank_of,
    tempered,
    uniform,
)
from emberline.ops.triton.scores import check_rows, programs_a_row

CHUNK = 2048  # columns that are summed together
PROGRAMS = 1024  # over which rows are spread: few, as each has its best found once


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """What is left of rows [N, V] once they have been read. C chunks a row."""

    # [N, C] int64, `candidate` of the most likely id or of the one that noise favours, of all the
    # chunks of a program
    best: Tensor
    peaks: Tensor  # [N, C] float32, largest logit
    masses: Tensor  # [N, C] float32, sum of exp(logit - peak)

    @classmethod
    def empty(cls, num_rows: int, num_chunks: int, device: torch.device) -> ChunkStates:
        """Room for them."""
        peaks, masses = (torch.empty(num_rows, num_chunks, device=device) for _ in range(2))
        best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=device)
        return cls(best, peaks, masses)


@triton.jit(do_not_specialize=["width"])
def _read_windows(
    logits, starts, lens, positions, seeds, temperatures, shared, best, peaks, masses,
    stride, size, num_chunks, width,
    WINDOWED: tl.constexpr, COUPLED: tl.constexpr, WEIGHED: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (b * width + entry, i) takes chunks i, i + I, .. of that entry's row.

    Of the most likely id a row of the vocabulary costs what it takes to read, if little is done to
    each number: none is divided by a temperature of 0, and exponentials are for those who ask.
    """
    await_inputs(EARLY)
    item = tl.program_id(0)
    req = item // width
    entry = item % width
    row = item.to(tl.int64)
    temperature = tl.load(temperatures + req)
    position = tl.load(positions + req) + entry
    seed = tl.load(seeds + req)
    if COUPLED:
        noisy = (temperature > 0) & (tl.load(shared + req) != 0)
    else:
        noisy = (temperature > 0) & (tl.load(shared + req) == TARGET)
    if WINDOWED:
        row = tl.load(starts + req) + entry
        if entry >= tl.load(lens + req):
            return
    logits += row * stride
    word = hash_key(seed, position, position * 0 + TARGET)
    first = tl.program_id(1)
    out = item.to(tl.int64) * num_chunks
    lanes = tl.arange(0, CHUNK)
    # Each lane keeps its own best, so that warps wait for each other once and not at every chunk.
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    top_column = first * CHUNK + lanes
    for chunk in range(first, num_chunks, tl.num_programs(1)):
        column = chunk * CHUNK + lanes
        x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            x = tl.div_rn(x, temperature)
        if WEIGHED:
            peak = tl.max(x, 0)
            tl.store(peaks + out + chunk, peak)
            tl.store(masses + out + chunk, tl.sum(tl.exp(x - finite(peak)), 0))
        if noisy:
            x += gumbel(word, column)
        better = (x > top) | ((x != x) & (top == top))  # as ranks are: the first NaN is over all
        top = tl.where(better, x, top)
        top_column = tl.where(better, column, top_column)
    rank = tl.where(top_column < size, rank_of(top), NO_RANK)
    highest = tl.max(rank, 0)
    found = tl.min(tl.where(rank == highest, top_column, size), 0)
    for chunk in range(first, num_chunks, tl.num_programs(1)):
        tl.store(best + out + chunk, candidate(highest, found))


def read_windows(
    logits: Tensor,
    num_reqs: int,
    width: int,
    windows: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    shared: Tensor,
    *,
    weighed: bool,
) -> ChunkStates:
    """Read the rows of B windows of at most W entries.

    Args:
        logits: [Q, V].
        num_reqs: B.
        width: W.
        windows: [B] int64 first row and [B] int64 length of each; None: W rows each, in order.
        positions: [B] int64, of entry 0; the position of entry i is i more.
        seeds: [B] int64.
        temperatures: [B] float32, 0 = the most likely id.
        shared: [B], whether noise enters: a bool, or an int64 purpose that has to be `TARGET`.
        weighed: whether peaks and masses are wanted; they are not written if not.

    Returns:
        States of B * W rows; those past a window's end are never written.
    """
    check_rows(logits)
    size = logits.shape[-1]
    num_chunks, num_rows = triton.cdiv(size, CHUNK), num_reqs * width
    states = ChunkStates.empty(num_rows, num_chunks, logits.device)
    starts, lens = windows if windows is not None else (None, None)
    if num_rows:
        _read_windows[(num_rows, programs_a_row(num_rows, num_chunks, PROGRAMS))](
            logits, starts, lens, positions, seeds, temperatures, shared,
            states.best, states.peaks, states.masses, logits.stride(0), size, num_chunks, width,
            WINDOWED=windows is not None, COUPLED=shared.dtype == torch.bool, WEIGHED=weighed,
            CHUNK=CHUNK, **early_start(logits.device),
        )  # fmt: skip
    return states


@triton.jit
def choose_by_mass(
    logits, chunk_peak, chunk_mass, temperature, point, size,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The id at a point of the cumulative distribution of one row.

    The chunk first, then the column in it: running sums are taken over few numbers, in float64.

    Args:
        logits: pointer to the row.
        chunk_peak, chunk_mass: [CHUNKS], -inf and 0 past the last.
        point: float64 in [0, 1).
    """
    peak = finite(tl.max(chunk_peak, 0))
    chunk, inside = locate(chunk_mass * tl.exp(chunk_peak - peak), point, CHUNKS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
    found, _ = locate(tl.exp(tempered(x, temperature) - peak), inside, CHUNK)
    return chunk * CHUNK + found


@triton.jit
def settle_row(
    logits, best, peaks, masses, temperature, seed, position, purpose, size, num_chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The id that a row's key picks, and the row's largest logit and mass.

    Args:
        logits: pointer to the row.
        best: the largest of its `candidate`s.
        peaks, masses: pointers to the states of its chunks.
        temperature: by which the row at `logits` is yet to be divided; 0: the most likely id.
    """
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    chunk_peak = tl.load(peaks + chunk, mask=there, other=float("-inf"))
    chunk_mass = tl.load(masses + chunk, mask=there, other=0.0)
    peak = tl.max(chunk_peak, 0)
    mass = tl.sum(chunk_mass * tl.exp(chunk_peak - finite(peak)), 0)
    chosen = column_of(best)
    if (temperature > 0) & (purpose != TARGET):
        point = uniform(hash_key(seed, position, purpose))
        found = choose_by_mass(
            logits, chunk_peak, chunk_mass, temperature, point, size, CHUNKS, CHUNK
        )
        # A row with a NaN, or of nothing but -inf, has no mass: id 0, as in `sampling.keys`.
        chosen = tl.where(mass > 0, found, 0).to(tl.int64)
    return chosen, peak, mass


@triton.jit(do_not_specialize=["width"])
def _settle(
    logits, best, peaks, masses, positions, seeds, temperatures, purposes, ids, normalisers,
    stride, size, num_chunks, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row a program: entry `row % width` of a request."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    req = row // width
    states = row * num_chunks
    chunk = tl.arange(0, CHUNKS)
    keys = tl.load(best + states + chunk, mask=chunk < num_chunks, other=NO_CANDIDATE)
    chosen, peak, mass = settle_row(
        logits + row * stride, tl.max(keys, 0), peaks + states, masses + states,
        tl.load(temperatures + req), tl.load(seeds + req),
        tl.load(positions + req) + row % width, tl.load(purposes + req), size, num_chunks,
        CHUNKS, CHUNK,
    )  # fmt: skip
    tl.store(ids + row, chosen)
    tl.store(normalisers + row * 2, peak)
    tl.store(normalisers + row * 2 + 1, mass)


def draw(
    logits: Tensor, temperatures: Tensor, keys: DrawKeys, width: int = 1
) -> tuple[Tensor, Tensor]:
    """`sampling.keys.draw` with `KeyedDraws`, without the copy of the divided logits.

    Args:
        logits: [B * W, V] float32, bfloat16 or float16, rows of contiguous columns.
        temperatures: [B] float32; 0 = greedy.
        keys: [B] names of the draws of entry 0; the position of entry i is i more.
        width: W, consecutive rows that each of them names.

    Returns:
        ids [B * W] int64, and normalisers [B * W, 2] float32: the largest of a row's logits /
        temperature, and the sum of exp(they - it). With them acceptance needs no second reading
        of q.

    Raises:
        ValueError: the logits are float64, or their columns do not follow each other.
    """
    num_rows, size = logits.shape
    draws = (keys.positions, keys.seeds, temperatures, keys.purposes)
    states = read_windows(logits, num_rows // width, width, None, *draws, weighed=True)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    normalisers = torch.empty(num_rows, 2, device=logits.device)
    num_chunks = states.best.shape[1]
    if num_rows:
        _settle[(num_rows,)](
            logits, states.best, states.peaks, states.masses, *draws, ids, normalisers,
            logits.stride(0), size, num_chunks, width,
            CHUNKS=triton.next_power_of_2(num_chunks), CHUNK=CHUNK, **early_start(logits.device),
        )  # fmt: skip
    return ids, normalisers
