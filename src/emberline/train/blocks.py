"""Which blocks a step trains on, and who may attend to whom.

Owns anchors, labels, validity and the attention mask of packed blocks. It must not know the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE = 128  # rows and keys of a flex attention tile


@dataclass(frozen=True, slots=True)
class Blocks:
    """n blocks of K slots in each of S sequences. R = n * K rows, block-major."""

    anchors: Tensor  # [S, n] int64, rising; the anchor's position
    inputs: Tensor  # [S, R] int64: the anchor token, then mask tokens or the text's own
    positions: Tensor  # [S, R] int64
    previous: Tensor  # [S, n, K] int64: the token before the one that a slot predicts
    labels: Tensor  # [S, n, K] int64: slot k predicts the token at anchor + k + 1
    valid: Tensor  # [S, n, K] bool: the label was written by the model in the anchor's turn

    def of(self, rows: slice) -> Blocks:
        """The blocks of some of the sequences."""
        return Blocks(*(getattr(self, name)[rows] for name in self.__slots__))


def sample_anchors(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different positions a row, with chances in proportion to `weights`.

    Exponential races (Efraimidis and Spirakis 2006): the smallest E / w win.

    Args:
        weights: [S, L] float, 0 where no anchor may be.
        count: at most L.

    Returns:
        [S, count] int64, rising. Positions of weight 0 fill up rows that have too few others.
    """
    noise = torch.rand(weights.shape, generator=generator, device=weights.device)
    race = -torch.log(noise.clamp(1e-20, 1 - 1e-7)) / weights.clamp(min=1e-20)
    return race.topk(count, dim=1, largest=False).indices.sort(dim=1).values


def make_blocks(
    tokens: Tensor, roles: Tensor, anchors: Tensor, block_size: int, mask_token_id: int | None
) -> Blocks:
    """Cut blocks out of sequences.

    Args:
        tokens: [S, L] int64.
        roles: [S, L] integer, 0 for tokens that nobody has to predict.
        anchors: [S, n] int64, each at most L - 1 - block_size.
        mask_token_id: what open slots hold; None: the text's own tokens, for drafts that read
            what they drew.
    """
    num_seqs, count = anchors.shape
    slots = torch.arange(block_size, device=tokens.device)
    at = anchors[..., None] + slots  # [S, n, K]

    def gather(source: Tensor, index: Tensor) -> Tensor:
        return source.gather(1, index.flatten(1)).view_as(index)

    previous, labels = gather(tokens, at), gather(tokens, at + 1)
    label_roles = gather(roles.to(torch.int64), at + 1)
    same_turn = (label_roles == label_roles[..., :1]) & (label_roles > 0)
    inputs = previous.clone()
    if mask_token_id is not None:
        inputs[..., 1:] = mask_token_id
    has_context = (anchors > 0)[..., None]
    return Blocks(
        anchors=anchors,
        inputs=inputs.view(num_seqs, count * block_size),
        positions=at.view(num_seqs, count * block_size),
        previous=previous,
        labels=labels,
        # A block ends with its turn: what follows is the template's, not a prediction. Without a
        # token before the anchor there is nothing of the target to draft from.
        valid=same_turn.cumprod(-1).bool() & has_context,
    )


def may_attend(
    anchors: Tensor, length: int, block_size: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule: a row sees context before its anchor, and its own block in both directions.

    Keys 0 .. length - 1 are the context, the following ones the block rows.
    """

    def rule(seq: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block = row // block_size
        in_context = (key < length) & (key < anchors[seq, block])
        own_block = (key >= length) & ((key - length) // block_size == block)
        return in_context | own_block

    return rule


def dense_mask(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """The rule as a bool tensor [S, 1, R, L + R], for attention without flex kernels."""
    num_seqs, count = anchors.shape
    rows = count * block_size
    device = anchors.device
    rule = may_attend(anchors, length, block_size)
    seq = torch.arange(num_seqs, device=device)[:, None, None]
    row = torch.arange(rows, device=device)[None, :, None]
    key = torch.arange(length + rows, device=device)[None, None, :]
    return rule(seq, seq, row, key)[:, None]


def flex_mask(anchors: Tensor, length: int, block_size: int) -> Any:
    """The rule as a BlockMask; tiles without a visible key are skipped.

    Anchors rise, so a tile of rows sees the context up to its last block's anchor, and the keys of
    its own blocks: the tiles follow from that without evaluating the rule on every pair.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, device = anchors.shape[1] * block_size, anchors.device
    total = length + rows
    row_start = torch.arange(0, rows, TILE, device=device)[:, None]
    key_start = torch.arange(0, total, TILE, device=device)
    first = row_start // block_size
    last = ((row_start + TILE - 1) // block_size).clamp(max=anchors.shape[1] - 1)
    reach = anchors[:, last.squeeze(1)].clamp(max=length)[..., None]  # [S, row tiles, 1]
    begin, end = length + first * block_size, length + (last + 1) * block_size
    own = (key_start < end) & (key_start + TILE > begin)
    visible = (key_start < reach) | own  # [S, row tiles, key tiles]
    order = visible.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        visible.sum(-1, dtype=torch.int32)[:, None],
        order.to(torch.int32)[:, None],
        BLOCK_SIZE=TILE,
        mask_mod=may_attend(anchors, length, block_size),
        seq_lengths=(rows, total),
    )
