"""Token scoring on a GPU: what `sampling/logprobs.py` says, without a [N, V] of log-probabilities.

Two kernels. The first reads every asked row once, chunks of it in parallel, and keeps of each block
of columns its largest logit, its mass, and how many logits are above the token's. The second puts a
row together: the top ids lie in the blocks of the largest maxima, so it looks at those only. Blocks
have one size whatever the batch is, and are added in one order: a row's numbers depend on that row
alone.

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
from emberline.ops.triton.noise import NO_RANK, finite, rank_of, ranked_value, tempered

CHUNK = 2048  # columns that are read together
BLOCK = 128  # columns that are summed together
BLOCKS = CHUNK // BLOCK
MOST_TOP = 20
PROGRAMS = 4096  # over which rows are spread, more for each the fewer they are


@triton.jit
def _is_asked(token_id, asks, owners, n):
    """Whether token n is to be scored."""
    if owners is None:
        return tl.load(asks + n) != 0
    else:
        owner = tl.load(owners + n)
        there = (owner >= 0) & (token_id >= 0)
        return there & (tl.load(asks + owner, mask=there, other=0) != 0)


@triton.jit
def _read_row(
    logits, rows, token_ids, asks, owners, temperatures, masses, aboves, block_ranks,
    stride, size, num_chunks,
    TEMPERED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (n, i) takes chunks i, i + I, .. of token n's row.

    What it sums lies within a block, so that no warp waits for another.
    """
    await_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    token_id = tl.load(token_ids + n)
    temperature = tl.full((), 0.0, tl.float32)
    if TEMPERED:
        temperature = tl.load(temperatures + n)
    if not _is_asked(token_id, asks, owners, n):
        return
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    logits += row * stride
    chosen = tempered(tl.load(logits + token_id).to(tl.float32), temperature)
    lanes = tl.arange(0, CHUNK)
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        column = chunk * CHUNK + lanes
        x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        x = tempered(x, temperature)
        rank = tl.where(column < size, rank_of(x), NO_RANK)
        best = tl.max(tl.reshape(rank, (BLOCKS, BLOCK)), 1)
        x = tl.reshape(x, (BLOCKS, BLOCK))
        peak = finite(_peak_of(best))
        place = (n * num_chunks + chunk) * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(block_ranks + place, best)
        tl.store(masses + place, tl.sum(tl.exp(x - peak[:, None]), 1))
        tl.store(aboves + place, tl.sum((x > chosen).to(tl.int32), 1))


@triton.jit
def _peak_of(rank):
    """The largest logit of a block, -inf of one past the end."""
    return tl.where(rank == NO_RANK, float("-inf"), ranked_value(rank))


@triton.jit
def _top_blocks(ranks, num_top, TOP: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr):
    """First columns of the blocks of the `num_top` largest maxima, the earlier of equals.

    For every entry outside them there are `num_top` before it in the order.
    """
    place = tl.arange(0, TOP)
    block = tl.arange(0, ALL)
    starts = tl.full((TOP,), ALL * BLOCK, tl.int32)  # past the end
    for i in range(num_top):
        best = tl.max(ranks, 0)
        found = tl.min(tl.where(ranks == best, block, ALL), 0)
        found = tl.where(best == NO_RANK, ALL, found)
        starts = tl.where(place == i, found * BLOCK, starts)
        ranks = tl.where(block == found, NO_RANK, ranks)
    return starts


@triton.jit(do_not_specialize_on_alignment=["logprobs", "ranks", "top_ids", "top_logprobs"])
def _put_together(
    logits, rows, token_ids, asks, owners, temperatures, masses, aboves, block_ranks,
    logprobs, ranks, top_ids, top_logprobs,
    stride, size, num_chunks, num_top,
    TEMPERED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PER_CHUNK: tl.constexpr,
    TOP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token a program, one warp: searching is a chain of small reductions."""
    await_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TOP)
    top_ids += n * num_top + place
    top_logprobs += n * num_top + place
    # All that has an address by now is asked for at once.
    row = tl.load(rows + n)
    token_id = tl.load(token_ids + n)
    temperature = tl.full((), 0.0, tl.float32)
    if TEMPERED:
        temperature = tl.load(temperatures + n)
    ALL: tl.constexpr = CHUNKS * PER_CHUNK
    block = tl.arange(0, ALL)
    num_blocks = num_chunks * PER_CHUNK
    there = block < num_blocks
    block_rank = tl.load(block_ranks + n * num_blocks + block, mask=there, other=NO_RANK)
    mass = tl.load(masses + n * num_blocks + block, mask=there, other=0.0)
    above = tl.load(aboves + n * num_blocks + block, mask=there, other=0)
    if not _is_asked(token_id, asks, owners, n):
        # Never a plausible number where nothing was computed.
        tl.store(logprobs + n, float("nan"))
        tl.store(ranks + n, tl.full((), 0, tl.int64))
        tl.store(top_ids, tl.full((TOP,), -1, tl.int64), mask=place < num_top)
        tl.store(top_logprobs, tl.full((TOP,), float("nan"), tl.float32), mask=place < num_top)
        return
    logits += row * stride
    chosen = tempered(tl.load(logits + token_id).to(tl.float32), temperature)
    block_peak = _peak_of(block_rank)
    peak = tl.max(block_peak, 0)
    log_total = tl.log(tl.sum(mass * tl.exp(block_peak - finite(peak)), 0))
    if num_top > 0:
        starts = tl.multiple_of(_top_blocks(block_rank, num_top, TOP, ALL, BLOCK), BLOCK)
        column = starts[:, None] + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        rank = tl.where(column < size, rank_of(tempered(x, temperature)), NO_RANK)
        best_columns = tl.full((TOP,), 0, tl.int32)
        best_ranks = tl.full((TOP,), 0, tl.int32)
        for i in range(num_top):
            best = tl.max(tl.max(rank, 0), 0)
            found = tl.min(tl.min(tl.where(rank == best, column, ALL * BLOCK), 0), 0)
            best_columns = tl.where(place == i, found, best_columns)
            best_ranks = tl.where(place == i, best, best_ranks)
            rank = tl.where(column == found, NO_RANK, rank)
        tl.store(top_ids, best_columns.to(tl.int64), mask=place < num_top)
        found_logprobs = ranked_value(best_ranks) - peak - log_total
        tl.store(top_logprobs, found_logprobs, mask=place < num_top)
    tl.store(logprobs + n, chosen - peak - log_total)
    tl.store(ranks + n, tl.sum(above, 0).to(tl.int64) + 1)


def score_tokens(
    logits: Scored,
    index: Tensor,
    token_ids: Tensor,
    asks: Tensor,
    num_top: int,
    temperatures: Tensor | None = None,
    owners: Tensor | None = None,
    into: TokenScores | None = None,
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
        into: where to write all but the ids, each contiguous; None: somewhere new.

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
    masses = torch.empty(num_tokens, num_chunks * BLOCKS, device=device)
    aboves, block_ranks = (torch.empty_like(masses, dtype=torch.int32) for _ in range(2))
    if into is None:
        into = _room(token_ids, num_top)
    written = (into.logprobs, into.ranks, into.top_ids, into.top_logprobs)
    read = (logits, index, token_ids, asks, owners, temperatures)
    states, early = (masses, aboves, block_ranks), early_start(device)
    if num_tokens:
        _read_row[(num_tokens, programs_a_row(num_tokens, num_chunks, PROGRAMS))](
            *read, *states, logits.stride(0), size, num_chunks,
            TEMPERED=temperatures is not None, CHUNK=CHUNK, BLOCK=BLOCK, **early,
        )  # fmt: skip
        _put_together[(num_tokens,)](
            *read, *states, *written, logits.stride(0), size, num_chunks, num_top,
            TEMPERED=temperatures is not None, CHUNKS=triton.next_power_of_2(num_chunks),
            BLOCK=BLOCK, PER_CHUNK=BLOCKS, TOP=triton.next_power_of_2(max(num_top, 1)),
            num_warps=1, **early,
        )  # fmt: skip
    return into


def takes(logits: Tensor, num_top: int) -> bool:
    """Whether `score_tokens` takes these logits and so many alternatives."""
    return num_top <= min(MOST_TOP, logits.shape[-1]) and _are_readable(logits)


def _room(token_ids: Tensor, num_top: int) -> TokenScores:
    """Scores of these ids, to be written."""
    num_tokens, device = len(token_ids), token_ids.device
    return TokenScores(
        token_ids=token_ids,
        logprobs=torch.empty(num_tokens, device=device),
        ranks=torch.empty(num_tokens, dtype=torch.int64, device=device),
        top_ids=torch.empty(num_tokens, num_top, dtype=torch.int64, device=device),
        top_logprobs=torch.empty(num_tokens, num_top, device=device),
    )


def check_rows(logits: Tensor) -> None:
    """Raise `ValueError` unless the kernels can read these logits."""
    if not _are_readable(logits):
        raise ValueError(
            "need logits in float32, bfloat16 or float16 with contiguous columns, got "
            f"{logits.dtype} with strides {tuple(logits.stride())}: the plain op takes any"
        )


def _are_readable(logits: Tensor) -> bool:
    return logits.dtype != torch.float64 and logits.stride(-1) == 1


def programs_a_row(num_rows: int, num_chunks: int, programs: int) -> int:
    """Over how many programs to spread the chunks of a row, where all rows are to have so many."""
    return max(1, min(num_chunks, programs // max(1, num_rows)))
