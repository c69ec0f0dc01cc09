"""One training batch: from token rows to everything that the losses read.

Target features are computed anew each step: the frozen target is cheap beside the losses over the
vocabulary, and hidden states of tens of millions of tokens fit no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emberline.train.blocks import Blocks, dense_mask, flex_mask, make_blocks, sample_anchors
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import Role, TokenRows
from emberline.train.target import FrozenTarget


@dataclass(frozen=True, slots=True)
class Batch:
    """S sequences with n blocks of K slots each; R = n * K."""

    blocks: Blocks
    taps: Tensor  # [S, L, A]
    target_hidden: Tensor  # [S * R, D] the target's last hidden state where a slot predicts
    embedded: Tensor  # [S, R, D] embeddings of the block's inputs
    mask: Any  # BlockMask on CUDA, dense bool elsewhere


def anchor_weights(roles: Tensor, block_size: int, config: TrainConfig) -> Tensor:
    """Relative chance of each position to be an anchor, by who wrote the token after it.

    roles [S, L] -> [S, L] float32; 0 where the block would leave the sequence.
    """
    by_role = torch.zeros(len(Role), device=roles.device)
    by_role[Role.USER] = config.user_weight
    by_role[Role.ANSWER] = config.answer_weight
    by_role[Role.PLAIN] = config.plain_weight
    weights = torch.zeros(roles.shape, device=roles.device)
    usable = roles.shape[1] - block_size
    weights[:, :usable] = by_role[roles[:, 1 : usable + 1].to(torch.int64)]
    return weights


def make_batch(
    rows: TokenRows,
    target: FrozenTarget,
    draft: DraftConfig,
    config: TrainConfig,
    generator: torch.Generator,
    features: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    build_mask: Callable[[Tensor, int, int], Any] | None = None,
) -> Batch:
    """Choose anchors, run the target, cut blocks, build the mask.

    `features` and `build_mask` replace the plain forms by captured or compiled ones.
    """
    tokens = rows.tokens.to(torch.int64)
    length = tokens.shape[1]
    weights = anchor_weights(rows.roles, draft.block_size, config)
    usable = length - draft.block_size
    count = min(config.anchors, usable)
    anchors = sample_anchors(weights[:, :usable], count, generator)
    blocks = make_blocks(tokens, rows.roles, anchors, draft.block_size, draft.mask_token_id)
    if features is None:
        taps, last = target.features(tokens, draft.target_layer_ids)
    else:
        taps, last = features(tokens)
    where = blocks.positions[..., None].expand(-1, -1, last.shape[-1])
    if build_mask is None:
        build_mask = flex_mask if tokens.is_cuda else dense_mask
    return Batch(
        blocks=blocks,
        taps=taps,
        target_hidden=last.gather(1, where).flatten(0, 1),
        embedded=target.embedding[blocks.inputs],
        mask=build_mask(anchors, length, draft.block_size),
    )


class GraphedFeatures:
    """`FrozenTarget.features` captured as a CUDA graph for one shape of tokens.

    The small target is bound by launching its kernels; replaying them costs the host nothing. The
    result lives in the graph's memory and is overwritten by the next call.
    """

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...], shape: torch.Size) -> None:
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=target.device)
        target.features(self.tokens, taps)  # compiles outside the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = target.features(self.tokens, taps)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Taps [S, L, A] and last hidden states [S, L, D] of tokens [S, L]."""
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.result


def tap_scale(rows: TokenRows, target: FrozenTarget, draft: DraftConfig, batch: int = 32) -> Tensor:
    """One over each tap channel's root mean square over up to 256 rows, [A] float32."""
    total = torch.zeros(draft.tap_width, device=target.device)
    count = 0
    for start in range(0, min(rows.num_rows, 8 * batch) // batch * batch, batch):
        tokens = rows.tokens[start : start + batch].to(target.device, torch.int64)
        taps, _ = target.features(tokens, draft.target_layer_ids)
        # The first token is an attention sink with states a hundred times larger than any other.
        seen = taps[:, 1:].float()
        total += seen.square().sum(dim=(0, 1))
        count += seen.shape[0] * seen.shape[1]
    if not count:
        raise ValueError(f"fewer than {batch} rows to measure the taps on")
    return torch.rsqrt(total / count + 1e-8)
