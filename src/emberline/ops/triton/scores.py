"""Token scoring on a GPU: what `sampling/logprobs.py` says, without a [N, V] of log-probabilities.

Two kernels. The first reads every asked row once, chunks of it in parallel, and keeps of each chunk
its largest logit, its mass, how many logits are above the token's, and the largest of each block of
columns. The second puts a row together: the top ids lie in the blocks of the largest maxima, so it
looks at those only. Chunks have one size whatever the batch is, and are added in one order: a row's
numbers depend on that row alone.

A row that nobody asks for is not read. Must not know what a row is for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.batch import TokenScores
from emberline.layout import Scored
from emberline.ops.triton.gpu import await_inputs, early_start
from emberline.ops.triton.noise import NO_CANDIDATE, candidate, column_of, finite, tempered

CHUNK = 2048  # columns that are summed together
BLOCK = 128  # columns of which the largest is kept
BLOCKS = CHUNK // BLOCK
MOST_TOP = 20
PROGRAMS = 2048  # at which a GPU is full: a row is spread over fewer the more rows there are


@triton.jit
def _is_asked(token_ids, asks, owners, n):
    """Whether token n is to be scored."""
    if owners is None:
        return tl.load(asks + n) != 0
    else:
        owner = tl.load(owners + n)
        there = (owner >= 0) & (tl.load(token_ids + n) >= 0)
        return there & (tl.load(asks + owner, mask=there, other=0) != 0)


@triton.jit
def _read_row(
    logits, rows, token_ids, asks, owners, temperatures, peaks, masses, aboves, block_keys,
    stride, size, num_chunks,
    TEMPERED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (n, i) takes chunks i, i + I, .. of token n's row."""
    await_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    if not _is_asked(token_ids, asks, owners, n):
        return
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    logits += tl.load(rows + n) * stride
    temperature = tl.full((), 0.0, tl.float32)
    if TEMPERED:
        temperature = tl.load(temperatures + n)
    chosen = tempered(tl.load(logits + tl.load(token_ids + n)).to(tl.float32), temperature)
    lanes = tl.arange(0, CHUNK)
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        column = chunk * CHUNK + lanes
        x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        x = tempered(x, temperature)
        peak = tl.max(x, 0)
        mass = tl.sum(tl.exp(x - finite(peak)), 0)
        tl.store(peaks + n * num_chunks + chunk, peak)
        tl.store(masses + n * num_chunks + chunk, mass)
        tl.store(aboves + n * num_chunks + chunk, tl.sum((x > chosen).to(tl.int32), 0))
        key = tl.where(column < size, candidate(x, column), NO_CANDIDATE)
        best = tl.max(tl.reshape(key, (BLOCKS, BLOCK)), 1)
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(block_keys + n * num_chunks * BLOCKS + block, best)


@triton.jit
def _put_together(
    logits, rows, token_ids, asks, owners, temperatures, peaks, masses, aboves, block_keys,
    logprobs, ranks, top_ids, top_logprobs,
    stride, size, num_chunks, num_top,
    TEMPERED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PER_CHUNK: tl.constexpr,
    TOP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    await_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TOP)
    top_ids += n * num_top + place
    top_logprobs += n * num_top + place
    if not _is_asked(token_ids, asks, owners, n):
        # Never a plausible number where nothing was computed.
        tl.store(logprobs + n, float("nan"))
        tl.store(ranks + n, tl.full((), 0, tl.int64))
        tl.store(top_ids, tl.full((TOP,), -1, tl.int64), mask=place < num_top)
        tl.store(top_logprobs, tl.full((TOP,), float("nan"), tl.float32), mask=place < num_top)
        return
    logits += tl.load(rows + n) * stride
    temperature = tl.full((), 0.0, tl.float32)
    if TEMPERED:
        temperature = tl.load(temperatures + n)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    chunk_peak = tl.load(peaks + n * num_chunks + chunk, mask=there, other=float("-inf"))
    mass = tl.load(masses + n * num_chunks + chunk, mask=there, other=0.0)
    peak = tl.max(chunk_peak, 0)
    total = tl.sum(mass * tl.exp(chunk_peak - finite(peak)), 0)
    log_total = tl.log(total)
    chosen = tempered(tl.load(logits + tl.load(token_ids + n)).to(tl.float32), temperature)
    tl.store(logprobs + n, chosen - peak - log_total)
    above = tl.load(aboves + n * num_chunks + chunk, mask=there, other=0)
    tl.store(ranks + n, tl.sum(above, 0).to(tl.int64) + 1)
    if num_top > 0:
        # The blocks of the `num_top` largest maxima, the earlier of equals: for every entry outside
        # them there are `num_top` before it in the order.
        block = tl.arange(0, CHUNKS * PER_CHUNK)
        num_blocks = num_chunks * PER_CHUNK
        block_key = tl.load(
            block_keys + n * num_blocks + block, mask=block < num_blocks, other=NO_CANDIDATE
        )
        starts = tl.full((TOP,), size, tl.int64)
        for i in range(num_top):
            best = tl.max(block_key, 0)
            found = tl.where(best == NO_CANDIDATE, size, column_of(best) // BLOCK * BLOCK)
            starts = tl.where(place == i, found, starts)
            block_key = tl.where(block_key == best, NO_CANDIDATE, block_key)
        column = starts[:, None] + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        key = tl.where(
            column < size, candidate(tempered(x, temperature), column.to(tl.int32)), NO_CANDIDATE
        )
        key = tl.reshape(key, (TOP * BLOCK,))
        best_columns = tl.full((TOP,), 0, tl.int64)
        for i in range(num_top):
            best = tl.max(key, 0)
            best_columns = tl.where(place == i, column_of(best), best_columns)
            key = tl.where(key == best, NO_CANDIDATE, key)
        found_x = tl.load(logits + best_columns, mask=place < num_top, other=0.0).to(tl.float32)
        tl.store(top_ids, best_columns, mask=place < num_top)
        found_logprobs = tempered(found_x, temperature) - peak - log_total
        tl.store(top_logprobs, found_logprobs, mask=place < num_top)


def score_tokens(
    logits: Scored,
    index: Tensor,
    token_ids: Tensor,
    asks: Tensor,
    num_top: int,
    temperatures: Tensor | None = None,
    owners: Tensor | None = None,
) -> TokenScores:
    """`sampling.logprobs.score_tokens` for the tokens that ask.

    Args:
        logits: [Q, V] float32, bfloat16 or float16, rows of contiguous columns.
        index: [N] int64, rows of `logits`; read only where `asks`.
        token_ids: [N] int64, likewise.
        asks: [N] bool; with `owners` [B], by request.
        num_top: L, how many of the most likely ids to report, 0 .. 20 and at most V.
        temperatures: [N] float32 by which a token's row is divided first (0: it is not); None:
            none is.
        owners: [N] int64, the request of each token; -1 of nobody's, which is not asked for, nor is
            an id of -1.

    Returns:
        Scores in float32. Tokens that do not ask have rank 0, ids -1 and NaN.

    Raises:
        ValueError: `num_top` is out of range, or the logits are float64.
    """
    num_tokens, size = len(index), logits.shape[-1]
    if not 0 <= num_top <= min(MOST_TOP, size):
        raise ValueError(f"num_top must be in [0, {min(MOST_TOP, size)}], got {num_top}")
    check_rows(logits)
    device, num_chunks = logits.device, triton.cdiv(size, CHUNK)
    peaks, masses = (torch.empty(num_tokens, num_chunks, device=device) for _ in range(2))
    aboves = torch.empty(num_tokens, num_chunks, dtype=torch.int32, device=device)
    block_keys = torch.empty(num_tokens, num_chunks * BLOCKS, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_tokens, device=device)
    ranks = torch.empty(num_tokens, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_tokens, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_tokens, num_top, device=device)
    read = (logits, index, token_ids, asks, owners, temperatures)
    states, early = (peaks, masses, aboves, block_keys), early_start(device)
    if num_tokens:
        _read_row[(num_tokens, programs_a_row(num_tokens, num_chunks))](
            *read, *states, logits.stride(0), size, num_chunks,
            TEMPERED=temperatures is not None, CHUNK=CHUNK, BLOCK=BLOCK, **early,
        )  # fmt: skip
        _put_together[(num_tokens,)](
            *read, *states, logprobs, ranks, top_ids, top_logprobs,
            logits.stride(0), size, num_chunks, num_top,
            TEMPERED=temperatures is not None, CHUNKS=triton.next_power_of_2(num_chunks),
            BLOCK=BLOCK, PER_CHUNK=BLOCKS, TOP=triton.next_power_of_2(max(num_top, 1)),
            **early,
        )  # fmt: skip
    return TokenScores(token_ids, logprobs, ranks, top_ids, top_logprobs)


def check_rows(logits: Tensor) -> None:
    """Raise `ValueError` unless the kernels can read these logits."""
    if logits.dtype == torch.float64 or logits.stride(-1) != 1:
        raise ValueError(
            "need logits in float32, bfloat16 or float16 with contiguous columns, got "
            f"{logits.dtype} with strides {tuple(logits.stride())}: the plain op takes any"
        )


def programs_a_row(num_rows: int, num_chunks: int) -> int:
    """Over how many programs to spread the chunks of a row, so that all rows fill the GPU."""
    return max(1, min(num_chunks, PROGRAMS // max(1, num_rows)))
