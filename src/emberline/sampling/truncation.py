"""Truncating a distribution: min-p, top-k, top-p. In place, on rows of logits.

Every rule keeps a prefix of one order: by logit, ties by id. The cut therefore never depends on a
sort's whims, and exactly k ids survive a top-k. Rows are independent of each other, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SHORTLIST = 1024  # ids that top-p looks at first; eight times as many while mass lies beyond


def keep_min_p_(logits: Tensor, min_p: float) -> None:
    """Mask ids whose probability is under `min_p` times the largest. [N, V]; min_p in (0, 1]."""
    least = logits.amax(-1, keepdim=True) + math.log(min_p)
    logits.masked_fill_(logits < least, -torch.inf)


def keep_top_(logits: Tensor, top_k: int, top_p: float) -> None:
    """Keep the `top_k` best ids, and of those the fewest whose mass reaches `top_p`. [N, V].

    Args:
        logits: changed in place; masked ids become -inf.
        top_k: 0 or less, or at least V: no limit.
        top_p: in (0, 1]; 1: no limit. Mass is relative to what is left of the row. The best id
            always stays.
    """
    vocab = logits.shape[-1]
    limits_k = 0 < top_k < vocab
    if not limits_k and top_p >= 1.0:
        return
    if limits_k:
        best = logits.topk(top_k, dim=-1).values
        count = torch.full_like(best[:, :1], top_k, dtype=torch.int64)
        if top_p < 1.0:
            count = _num_reaching(best.softmax(-1), top_p)[0]
        _keep_best_(logits, best, count)
        return
    probs = logits.softmax(-1)
    width = min(_SHORTLIST, vocab)
    while True:
        best, ids = logits.topk(width, dim=-1)
        count, reached = _num_reaching(probs.gather(-1, ids), top_p)
        if width == vocab or reached:
            break
        width = min(8 * width, vocab)
    _keep_best_(logits, best, count)


def _num_reaching(probs: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """How many leading entries of descending `probs` [N, L] reach the mass: [N, 1], at least 1.

    Also whether all rows reach it within L. Sums run in float64 from the left, so that the
    number does not depend on L.
    """
    mass = probs.cumsum(-1, dtype=torch.float64)
    before = mass - probs
    count = (before < top_p).sum(-1, keepdim=True).clamp_min(1)
    return count, bool((mass[:, -1] >= top_p).all())


def _keep_best_(logits: Tensor, best: Tensor, count: Tensor) -> None:
    """Mask all but the first `count` [N, 1] ids of each row; `best` [N, L] are its top values."""
    least = best.gather(-1, count - 1)
    above = logits > least
    level = logits == least
    room = count - above.sum(-1, keepdim=True)
    if bool((level.sum(-1, keepdim=True) > room).any()):
        level &= level.cumsum(-1) <= room
    logits.masked_fill_(~(above | level), -torch.inf)
