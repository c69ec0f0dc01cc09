"""Log-probabilities: the only log-softmax of the package.

Prompt, first token, decode and verify are all scored here; they differ only in which row scores
which id. Must not know what a row is for, nor what a request asked.

A row's numbers are a function of that row alone, bit for bit: torch's log-softmax over the last
dimension reduces each row by itself, in an order that depends on V only, whatever the number of
rows or threads (a plain sum does not: it splits a lone row over threads). At most `_CHUNK_ROWS`
rows of log-probabilities exist at a time, so the memory is bounded whatever N.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.batch import TokenScores
from emberline.layout import Scored

_CHUNK_ROWS = 8
_SPARE_CANDIDATES = 16


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
    for lo in range(0, num_tokens, _CHUNK_ROWS):
        part = slice(lo, lo + _CHUNK_ROWS)
        rows = _log_probs(logits, index[part])
        chosen = rows.gather(-1, token_ids[part, None])
        logprobs[part] = chosen.squeeze(-1)
        ranks[part] = (rows > chosen).sum(-1) + 1
        if num_top:
            top_ids[part] = _top_ids(rows, num_top)
            top_logprobs[part] = rows.gather(-1, top_ids[part])
    return TokenScores(token_ids, logprobs, ranks, top_ids, top_logprobs)


def chosen_logprobs(
    logits: Scored, index: Tensor, chosen_ids: Sequence[Sequence[int]]
) -> list[tuple[float, ...]]:
    """Score given ids under row `index[n]` ([N] int64): for each n, in the order of its ids.

    The same floats as `score_tokens` gives for these ids.
    """
    scores: list[tuple[float, ...]] = [()] * len(index)
    wanted = [n for n, ids in enumerate(chosen_ids) if ids]
    for lo in range(0, len(wanted), _CHUNK_ROWS):
        part = wanted[lo : lo + _CHUNK_ROWS]
        rows = _log_probs(logits, index[torch.tensor(part, device=index.device)])
        for n, row in zip(part, rows, strict=True):
            ids = torch.tensor(list(chosen_ids[n]), device=logits.device)
            scores[n] = tuple(row[ids].tolist())
    return scores


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _log_probs(logits: Tensor, index: Tensor) -> Tensor:
    return torch.log_softmax(logits[index], dim=-1, dtype=_dtype(logits))


def _top_ids(rows: Tensor, num_top: int) -> Tensor:
    """[N, V] -> [N, L] ids by value, ties by id. torch.topk leaves the choice among ties open.

    A few candidates more than asked for hold every tie across the cut, bfloat16 logits having many
    of them; only where they do not is the whole row sorted.
    """
    vocab = rows.shape[-1]
    values, ids = rows.topk(min(num_top + _SPARE_CANDIDATES, vocab), dim=-1)
    whole = values.shape[-1] == vocab
    if not whole and not bool((values[:, -1] < values[:, num_top - 1]).all()):
        return rows.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    by_id = ids.argsort(dim=-1)
    by_value = values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_id).gather(-1, by_value)[:, :num_top]
