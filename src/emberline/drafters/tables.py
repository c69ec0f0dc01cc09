"""Embedding and head of a draft: the target's own tables, or those that its checkpoint brings.

Owns the comparison with the target's, so that a copy takes no memory, and the way from a reduced
draft vocabulary to the target's ids. Must not know any algorithm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.models.target import Target
from emberline.models.weights import ModelError, Weights

EmbedFn = Callable[[Tensor], Tensor]  # [...] int64 -> [..., D]
HeadFn = Callable[[Tensor], Tensor]  # [N, D] -> [N, V] float32, or as wide as the draft computes

HEAD_COLUMNS = 64
EMBED_ROWS = 16_384


def load_embed(
    weights: Weights, target: Target, hidden_size: int, dtype: torch.dtype, device: str
) -> EmbedFn:
    """The target's embedding, or the checkpoint's `embed_tokens` where that is another one.

    Raises:
        ModelError: it does not fit, or there is none and the target's has another width.
    """
    vocab = target.vocab_size
    width = target.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
    if not weights.has("embed_tokens.weight"):
        if width != hidden_size:
            raise ModelError(
                f"{weights.source}: made for a hidden size of {hidden_size}, the target has "
                f"{width}, and there is no embed_tokens.weight of its own"
            )
        return target.embed
    own = weights.take("embed_tokens.weight", (vocab, hidden_size)).to(device=device, dtype=dtype)
    rows = torch.arange(vocab, device=device)
    parts = [rows[start : start + EMBED_ROWS] for start in range(0, vocab, EMBED_ROWS)]
    if width == hidden_size and all(
        torch.equal(target.embed(part).to(dtype), own[part]) for part in parts
    ):
        return target.embed
    return lambda token_ids: F.embedding(token_ids, own)


def load_head(
    weights: Weights, target: Target, hidden_size: int, dtype: torch.dtype, device: str
) -> HeadFn:
    """The target's head, or the checkpoint's `lm_head` where that is another one.

    A head over fewer ids comes with `d2t` (target id = draft id + d2t): ids that it does not know
    get minus infinity, so that q is what is really drawn from.

    Raises:
        ModelError: it does not fit, or there is none and the target's has another width.
    """
    if not weights.has("lm_head.weight"):
        width = target.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
        if width != hidden_size:
            raise ModelError(
                f"{weights.source}: made for a hidden size of {hidden_size}, the target has "
                f"{width}, and there is no lm_head.weight of its own"
            )
        return target.head
    if weights.has("d2t"):
        ids = draft_ids(weights, target.vocab_size).to(device)
        known = weights.take("lm_head.weight", (len(ids), hidden_size))
        return reduced_head(known.to(device=device, dtype=dtype), ids, target.vocab_size)
    shape = (target.vocab_size, hidden_size)
    own = weights.take("lm_head.weight", shape).to(device=device, dtype=dtype)
    if _is_targets(own, target):
        return target.head
    return lambda hidden: F.linear(hidden, own).float()


def draft_ids(weights: Weights, vocab_size: int) -> Tensor:
    """The target id of every draft id, from `d2t`. [Vd] int64.

    `t2d`, which says the same the other way round, is compared where it is there.

    Raises:
        ModelError: an id is beyond the vocabulary or named twice, or the two maps disagree.
    """
    offsets = weights.take("d2t").long()
    ids = offsets + torch.arange(offsets.shape[0])
    if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(
            f"{weights.source}: d2t leads to id {int(ids.max()) if ids.numel() else None}, the "
            f"target's vocabulary has {vocab_size}"
        )
    if len(ids.unique()) != len(ids):
        raise ModelError(f"{weights.source}: d2t names a target id twice")
    if weights.has("t2d"):
        kept = weights.take("t2d", (vocab_size,)).bool()
        if not torch.equal(kept.nonzero()[:, 0], ids.sort().values):
            raise ModelError(
                f"{weights.source}: d2t leads to {len(ids)} ids, t2d keeps {int(kept.sum())}, and "
                "they are not the same"
            )
    return ids


def reduced_head(weight: Tensor, ids: Tensor, vocab_size: int) -> HeadFn:
    """A head [Vd, D] over the target's `ids` [Vd]: logits of the others are minus infinity."""

    def head(hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, ids, logits)

    return head


def _is_targets(own: Tensor, target: Target) -> bool:
    """Whether a head [V, D] is the target's.

    A target gives logits, not its matrix: unit vectors read columns of it back, exactly.
    """
    hidden_size = own.shape[1]
    probe = target.embed(torch.zeros(1, dtype=torch.int64, device=own.device))
    if probe.shape[-1] != hidden_size:
        return False
    columns = torch.linspace(0, hidden_size - 1, HEAD_COLUMNS, device=own.device).long()
    units = F.one_hot(columns, hidden_size).to(own.dtype)
    return torch.equal(target.head(units).to(own.dtype), own[:, columns].T)
