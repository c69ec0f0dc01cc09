"""One training batch: from token rows to everything that the losses read.

A step is planned as a whole (anchors, labels, weights that sum to 1) and done in parts: by several
processes, or one part after another. What is drawn depends on the step and the row, never on the
part, and the losses of the parts add up to the step's.

Target features are computed anew each step unless they come from `feature_cache.py`: the frozen
target is cheap beside the losses over the vocabulary, and hidden states of tens of millions of
tokens fit no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from emberline.train.blocks import Blocks, dense_mask, flex_mask, make_blocks, sample_anchors
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import Role, TokenRows
from emberline.train.frozen import TrainingTarget
from emberline.train.objectives import position_weights

Features = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rows' places in their split [S], tokens [S, L]) -> taps [S, L, A], last hidden [S, L, D]."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step, or a part of it, trains on. n blocks of K slots in each of S sequences."""

    index: Tensor  # [S] int64, the rows' places in their split
    tokens: Tensor  # [S, L] int64
    blocks: Blocks
    weights: Tensor  # [S, n, K] float32; those of a whole step sum to 1

    def part(self, rows: slice) -> Plan:
        """The plan of some of the sequences; the weights stay those of the whole step."""
        return Plan(self.index[rows], self.tokens[rows], self.blocks.of(rows), self.weights[rows])


@dataclass(frozen=True, slots=True)
class Batch:
    """S sequences with n blocks of K slots each; R = n * K."""

    blocks: Blocks
    weights: Tensor  # [S, n, K]
    taps: Tensor  # [S, L, A]
    target_hidden: Tensor  # [S * R, D] the target's last hidden state where a slot predicts
    embedded: Tensor  # [S, R, D] embeddings of the block's inputs
    context: Any  # block drafts: the mask, a BlockMask on CUDA; EAGLE-3: embedded rows [S, L, D]


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


def plan_step(
    rows: TokenRows,
    index: Tensor,
    draft: DraftConfig,
    config: TrainConfig,
    generator: torch.Generator,
) -> Plan:
    """Choose anchors in the rows at `index` [S] and cut blocks there.

    Rows with too few positions of any weight are filled up with others, whose blocks are invalid.
    """
    tokens, roles = rows.tokens[index].to(torch.int64), rows.roles[index]
    usable = tokens.shape[1] - draft.block_size
    chances = anchor_weights(roles, draft.block_size, config)[:, :usable]
    anchors = sample_anchors(chances, min(config.anchors, usable), generator)
    blocks = make_blocks(tokens, roles, anchors, draft.block_size, draft.mask_token_id)
    wanted = chances.gather(1, anchors) > 0
    blocks = replace(blocks, valid=blocks.valid & wanted[..., None])
    factors = draft.position_factors(config.loss.decay)
    return Plan(index, tokens, blocks, position_weights(blocks.valid, factors))


def make_batch(
    plan: Plan,
    target: TrainingTarget,
    draft: DraftConfig,
    features: Features,
    build_mask: Callable[[Tensor, int, int], Any] | None = None,
) -> Batch:
    """Features, inputs and mask of a plan. `build_mask` replaces the device's usual form."""
    blocks, length = plan.blocks, plan.tokens.shape[1]
    taps, last = features(plan.index, plan.tokens)
    where = blocks.positions[..., None].expand(-1, -1, last.shape[-1])
    context: Any
    if draft.algorithm == "eagle3":
        context = target.embedding[plan.tokens]
    else:
        build_mask = build_mask or (flex_mask if plan.tokens.is_cuda else dense_mask)
        context = build_mask(blocks.anchors, length, draft.block_size)
    return Batch(
        blocks=blocks,
        weights=plan.weights,
        taps=taps,
        target_hidden=last.gather(1, where).flatten(0, 1),
        embedded=target.embedding[blocks.inputs],
        context=context,
    )


def fresh_features(target: TrainingTarget, taps: Sequence[int]) -> Features:
    """Features computed by the target at every call."""
    return lambda _, tokens: target.features(tokens, taps)


class GraphedFeatures:
    """`TrainingTarget.features` captured as a CUDA graph for one shape of tokens.

    The small target is bound by launching its kernels; replaying them costs the host nothing. The
    result lives in the graph's memory and is overwritten by the next call.
    """

    def __init__(self, target: TrainingTarget, taps: tuple[int, ...], shape: torch.Size) -> None:
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=target.device)
        target.features(self.tokens, taps)  # compiles outside the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = target.features(self.tokens, taps)

    def __call__(self, index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Taps [S, L, A] and last hidden states [S, L, D] of tokens [S, L]."""
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.result


def tap_scale(rows: TokenRows, target: TrainingTarget, draft: DraftConfig, batch: int) -> Tensor:
    """One over each tap channel's root mean square over up to 256 rows, [A] float32.

    `batch` rows go through the target at once.
    """
    total = torch.zeros(draft.tap_width, device=target.device)
    count = 0
    for start in range(0, min(rows.num_rows, 256), batch):
        some = slice(start, min(start + batch, 256))
        part = TokenRows(rows.tokens[some], rows.roles[some]).to(target.device)
        taps, _ = target.features(part.tokens.to(torch.int64), draft.target_layer_ids)
        # The first token is an attention sink with states a hundred times larger than any other,
        # and padding is no text.
        at = torch.arange(1, part.tokens.shape[1], device=target.device)
        seen = taps[:, 1:][at < part.lens[:, None]].float()
        total += seen.square().sum(dim=0)
        count += len(seen)
    return torch.rsqrt(total / count + 1e-8)
