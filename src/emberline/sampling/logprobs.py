"""Log-probabilities: the only log-softmax of the package.

Prompt, first token, decode and verify are all scored here; they differ only in which row scores
which id. Must not know what a row is for, nor what a request asked.

A row's numbers are a function of that row alone, bit for bit: torch's log-softmax over the last
dimension reduces each row by itself, in an order that depends on V only, whatever the number of
rows or threads (a plain sum does not: it splits a lone row over threads). At most 16 rows of
log-probabilities exist at a time, on a GPU 256, so the memory is bounded whatever N.

Who is more likely is read off the logits: two that differ may round to one log-probability, and the
first alternative must be the id that an argmax draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.batch import TokenScores
from emberline.layout import Scored

_CPU_ROWS, _GPU_ROWS = 16, 256  # scored together
_SPARE_CANDIDATES = 16
_BLOCK = 128  # columns; of most of them only the largest is looked at
_SPARE_BLOCKS = 8


def score_tokens(logits: Scored, index: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
    """Score token n under row `index[n]`.

    Args:
        logits: [Q, V] float.
        index: [N] int64, rows of `logits`.
        token_ids: [N] int64.
        num_top: L, how many of the most likely ids to report, 0 .. V.

    Returns:
        Scores in float32 (float64 if the logits are). The token's value is the same float as its
        entry among the top ones. Its rank is 1 + the number of strictly more likely ids, so ties
        share the better rank; top ids are ordered by value, ties by id.
    """
    num_tokens, dtype = len(index), _dtype(logits)
    logprobs = torch.empty(num_tokens, dtype=dtype, device=logits.device)
    ranks = torch.empty_like(token_ids)
    top_ids = token_ids.new_empty((num_tokens, num_top))
    top_logprobs = logprobs.new_empty((num_tokens, num_top))
    together = _rows_together(logits)
    for lo in range(0, num_tokens, together):
        part = slice(lo, lo + together)
        rows, ids = _rows(logits, index[part]), token_ids[part, None]
        values = torch.log_softmax(rows, dim=-1)
        logprobs[part] = values.gather(-1, ids).squeeze(-1)
        if num_top:
            best = _top_ids(rows, num_top)
            top_ids[part] = best
            top_logprobs[part] = values.gather(-1, best)
            most_likely = rows.gather(-1, best)
        else:
            most_likely = rows.amax(-1, keepdim=True)
        ranks[part] = _ranks(rows, rows.gather(-1, ids), most_likely)
    return TokenScores(token_ids, logprobs, ranks, top_ids, top_logprobs)


def chosen_logprobs(
    logits: Scored, index: Tensor, chosen_ids: Sequence[Sequence[int]]
) -> list[tuple[float, ...]]:
    """Score given ids under row `index[n]` ([N] int64): for each n, in the order of its ids.

    The same floats as `score_tokens` gives for these ids.
    """
    scores: list[tuple[float, ...]] = [()] * len(index)
    wanted = [n for n, ids in enumerate(chosen_ids) if ids]
    together = _rows_together(logits)
    for lo in range(0, len(wanted), together):
        part = wanted[lo : lo + together]
        rows = _rows(logits, index[torch.tensor(part, device=index.device)])
        most = max(len(chosen_ids[n]) for n in part)
        padded = [[*chosen_ids[n], *[0] * (most - len(chosen_ids[n]))] for n in part]
        ids = torch.tensor(padded, device=logits.device)
        values = torch.log_softmax(rows, dim=-1).gather(-1, ids).tolist()
        for n, row in zip(part, values, strict=True):
            scores[n] = tuple(row[: len(chosen_ids[n])])
    return scores


def _rows_together(logits: Tensor) -> int:
    """On a CPU as many as its caches hold; a GPU is not filled by those."""
    return _CPU_ROWS if logits.device.type == "cpu" else _GPU_ROWS


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _rows(logits: Tensor, index: Tensor) -> Tensor:
    """[N, V] rows of the logits, in the precision of their scores."""
    return logits.index_select(0, index).to(_dtype(logits))


def _ranks(rows: Tensor, chosen: Tensor, best: Tensor) -> Tensor:
    """[N] 1 + the number of entries of a row above its chosen one.

    Args:
        rows: [N, V].
        chosen: [N, 1], an entry of each row.
        best: [N, L], the largest entries of each row, L >= 1. They answer for all but the rows
            whose chosen entry is none of them, which are counted.
    """
    ranks = (best > chosen).sum(-1) + 1
    deep = (chosen < best[:, -1:]).squeeze(-1).nonzero().squeeze(-1)
    if len(deep):
        above = rows.index_select(0, deep)
        # Ones in floats add up several times faster than booleans, and exactly up to 2**24.
        torch.gt(above, chosen[deep], out=above)
        ranks[deep] = above.sum(-1).long() + 1
    return ranks


def _top_ids(rows: Tensor, num_top: int) -> Tensor:
    """[N, V] -> [N, L] ids by value, ties by id.

    Blocks of columns first, by their largest entry, then the columns of the few best blocks. A
    block that was left out holds nothing above the last one taken: if that is below the last entry
    found, nothing is missing; else, there being too many ties, the whole row is searched. Of
    masked entries the first ids are wanted: the first block is always taken.
    """
    vocab = rows.shape[-1]
    num_blocks, num_taken = vocab // _BLOCK, num_top + _SPARE_BLOCKS
    if num_blocks < 4 * num_taken or num_top > _BLOCK // 2:
        return _sorted_top(rows, num_top)
    cut = num_blocks * _BLOCK
    maxima = rows[:, :cut].view(len(rows), num_blocks, _BLOCK).amax(-1)
    maxima[:, 0] = torch.inf
    maxima, taken = maxima.topk(num_taken, dim=-1)
    starts = taken.sort(dim=-1).values * _BLOCK  # columns in the order of their ids
    within = torch.arange(_BLOCK, device=rows.device)
    columns = (starts[..., None] + within).flatten(1)
    if cut < vocab:
        rest = torch.arange(cut, vocab, device=rows.device)
        columns = torch.cat([columns, rest.expand(len(rows), -1)], dim=-1)
    found = rows.gather(-1, columns)
    place = _sorted_top(found, num_top)
    last = found.gather(-1, place[:, -1:])
    if bool(((maxima[:, -1:] < last) | (last == -torch.inf)).all()):
        return columns.gather(-1, place)
    return _sorted_top(rows, num_top)


def _sorted_top(rows: Tensor, num_top: int) -> Tensor:
    """[N, V] -> [N, L] columns by value, ties by column, which torch.topk leaves open.

    A few candidates more than asked for hold every tie across the cut, bfloat16 logits having many
    of them. Where they do not, as among what is masked, the first columns that tie are looked up.
    """
    vocab = rows.shape[-1]
    values, ids = rows.topk(min(num_top + _SPARE_CANDIDATES, vocab), dim=-1)
    last = values[:, num_top - 1 : num_top]
    if values.shape[-1] < vocab and not bool((values[:, -1:] < last).all()):
        values, ids = values[:, :num_top], ids[:, :num_top]
        order = -torch.arange(vocab, dtype=rows.dtype, device=rows.device)
        tied = torch.where(rows == last, order, -torch.inf).topk(num_top, dim=-1).indices
        above = values > last
        place = torch.arange(num_top, device=rows.device) - above.sum(-1, keepdim=True)
        ids = torch.where(above, ids, tied.gather(-1, place.clamp_min(0)))
    by_id = ids.argsort(dim=-1)
    by_value = values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_id).gather(-1, by_value)[:, :num_top]
