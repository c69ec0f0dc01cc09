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
HeadFn = Callable[[Tensor], Tensor]  # [N, D] -> [N, V]; float32 or float64 without kernels

HEAD_COLUMNS = 64
EMBED_ROWS = 16_384
PROBE = 64  # a power of two: scaling by it is exact


def load_embed(
    weights: Weights,
    target: Target,
    hidden_size: int,
    dtype: torch.dtype,
    device: str,
    scale: float = 1.0,
) -> EmbedFn:
    """The target's embedding, or the checkpoint's `embed_tokens` where that is another one.

    `scale` multiplies the checkpoint's; a target's embedding has its own scale in it.

    Raises:
        ModelError: it does not fit, or there is none and the target's has another width.
    """
    vocab = target.vocab_size
    width = target.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
    if not weights.has("embed_tokens.weight"):
        if width != hidden_size:
            raise ModelError(
                f"{weights.source}: made for a hidden size of {hidden_size}, the target's "
                f"embedding has {width}, and there is no embed_tokens.weight of its own"
            )
        return target.embed
    own = weights.take("embed_tokens.weight", (vocab, hidden_size)).to(device=device, dtype=dtype)
    if scale != 1.0:
        own = own * torch.tensor(scale, dtype=dtype)
    rows = torch.arange(vocab, device=device)
    parts = [rows[start : start + EMBED_ROWS] for start in range(0, vocab, EMBED_ROWS)]
    if width == hidden_size and all(
        torch.equal(target.embed(part).to(dtype), own[part]) for part in parts
    ):
        return target.embed
    return lambda token_ids: F.embedding(token_ids, own)


def load_head(
    weights: Weights,
    target: Target,
    hidden_size: int,
    dtype: torch.dtype,
    device: str,
    softcap: float | None = None,
    *,
    widen: bool = True,
) -> HeadFn:
    """The target's head, or the checkpoint's `lm_head` where that is another one.

    A head over fewer ids comes with `d2t` (target id = draft id + d2t): ids that it does not know
    get minus infinity, so that q is what is really drawn from. `softcap` bounds the logits of the
    checkpoint's head: tanh(logits / softcap) * softcap; a target's head has its own cap in it.
    `widen` makes its logits float32; kernels read them as they are.

    Raises:
        ModelError: it does not fit, or there is none and the target's has another width.
    """
    vocab = target.vocab_size
    ids = draft_ids(weights, vocab).to(device) if weights.has("d2t") else None
    if not weights.has("lm_head.weight"):
        width = target.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
        if width != hidden_size:
            raise ModelError(
                f"{weights.source}: made for a hidden size of {hidden_size}, the target's head has "
                f"{width}, and there is no lm_head.weight of its own"
            )
        if ids is None:
            return target.head
        return lambda hidden: scatter(target.head(hidden)[:, ids], ids, vocab, -torch.inf)
    shape = (vocab if ids is None else len(ids), hidden_size)
    own = weights.take("lm_head.weight", shape).to(device=device, dtype=dtype)
    if ids is None and _is_targets(own, softcap, target):
        return target.head

    def head(hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, own)
        if widen or softcap is not None:
            logits = _capped(logits.float(), softcap)
        return logits if ids is None else scatter(logits, ids, vocab, -torch.inf)

    return head


def scatter(columns: Tensor, ids: Tensor, vocab_size: int, fill: float) -> Tensor:
    """A draft's own columns at the target's: `fill` for ids it does not know. [N, Vd] -> [N, V]."""
    wide = columns.new_full((*columns.shape[:-1], vocab_size), fill)
    return wide.index_copy_(-1, ids, columns)


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
    if len(torch.unique(ids)) != len(ids):
        raise ModelError(f"{weights.source}: d2t names a target id twice")
    if weights.has("t2d"):
        kept = weights.take("t2d", (vocab_size,)).bool()
        if not torch.equal(kept.nonzero()[:, 0], ids.sort().values):
            raise ModelError(
                f"{weights.source}: d2t leads to {len(ids)} ids, t2d keeps {int(kept.sum())}, and "
                "they are not the same"
            )
    return ids


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _is_targets(own: Tensor, softcap: float | None, target: Target) -> bool:
    """Whether a head [V, D] is the target's.

    A target gives logits, not its matrix: unit vectors read columns of it back, exactly. They are
    large, so that a cap would show.
    """
    hidden_size = own.shape[1]
    probe = target.embed(torch.zeros(1, dtype=torch.int64, device=own.device))
    if probe.shape[-1] != hidden_size:
        return False
    columns = torch.linspace(0, hidden_size - 1, HEAD_COLUMNS, device=own.device).long()
    units = PROBE * F.one_hot(columns, hidden_size).to(own.dtype)
    expected = _capped((PROBE * own[:, columns].T).float(), softcap)
    return torch.equal(target.head(units).to(own.dtype), expected.to(own.dtype))
