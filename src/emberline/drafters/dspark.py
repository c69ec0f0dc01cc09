"""DSpark: a block backbone, a sequential head on its slots, and a confidence head.

Owns the left-to-right draw and the confidences. It must not know pages, the block's attention or
any checkpoint dialect.

The backbone gives every slot of the block its base logits at once; the sequential head then adds
a bias that depends on the token just drawn, so that the drafts of one block agree with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emberline.batch import (
    BlockContext,
    DraftContext,
    DraftProposal,
    DrawKeys,
    DrawnBlock,
    Draws,
)
from emberline.drafters.block import BlockBackbone
from emberline.drafters.block_drafter import Allowed, BlockDrafter, draw_slots, normalisers_of
from emberline.drafters.markov import ConfidenceHead, MarkovHead, VanillaHead
from emberline.drafters.tables import HeadFn
from emberline.sampling.keys import KeyedDraws


class DSparkDrafter(BlockDrafter):
    """Drafts a block left to right: base logits of all slots at once, then a bias a draw.

    Args:
        backbone, head, num_draft_tokens: see `BlockDrafter`.
        markov: the sequential head.
        confidence: None if the checkpoint has no confidence head.
    """

    def __init__(
        self,
        backbone: BlockBackbone,
        head: HeadFn,
        markov: MarkovHead,
        confidence: ConfidenceHead | None,
        num_draft_tokens: int | None = None,
    ) -> None:
        super().__init__(backbone, head, num_draft_tokens)
        self._markov = markov
        self._confidence = confidence

    @property
    def has_confidence(self) -> bool:
        """Whether proposals carry confidences."""
        return self._confidence is not None

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request, each from softmax((base + bias) / temperature)."""
        hidden = self.run_block(context)
        keys = DrawKeys(context.seeds, context.positions, context.purposes)
        ids, drawn, confidence = self._walk(context, hidden, keys, context.draws, context.allowed)
        return DraftProposal(
            token_ids=ids,
            num_drafted=torch.full_like(context.anchors, context.num_drafts),
            logits=drawn,
            confidence=confidence,
        )

    def propose_block(self, context: BlockContext) -> DrawnBlock:
        """`propose` for a graph to capture."""
        hidden = self.run_block(context)
        walk = self.kernels.markov_walk
        if walk is None:
            ids, drawn, confidence = self._walk(context, hidden, context.keys, KeyedDraws(), None)
            return DrawnBlock(ids, drawn, normalisers_of(drawn), confidence)
        if not isinstance(self._markov, VanillaHead):
            return self._walk_slots(context, hidden, walk)
        return walk(
            self.base_logits(hidden), hidden, context.anchors, self._markov.w1,
            self._markov.w2.weight, temperatures=context.temperatures, keys=context.keys,
            need_logits=context.need_logits, confidence=self._confidence,
        )  # fmt: skip

    def _walk(
        self,
        context: DraftContext | BlockContext,
        hidden: Tensor,
        keys: DrawKeys,
        draws: Draws,
        allowed: Allowed | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids [B, K], what they were drawn from [B, K, V] and confidences [B, K]."""
        state: Tensor | None = None
        embedded: list[Tensor] = []

        def bias(slot: int, previous_ids: Tensor) -> Tensor:
            nonlocal state
            previous = self._markov.embed(previous_ids)
            latent, state = self._markov.latent(hidden[:, slot], previous, state)
            embedded.append(previous)
            return self._markov.w2(latent)

        base = self.base_logits(hidden)
        ids, drawn = draw_slots(context, base, keys, draws, bias=bias, allowed=allowed)
        return ids, drawn, self._confidences(hidden, embedded)

    def _walk_slots(
        self, context: BlockContext, hidden: Tensor, walk: Callable[..., DrawnBlock]
    ) -> DrawnBlock:
        """A walk a slot: the latents of a head with a gate or a state are made in between."""
        by_slot = hidden.transpose(0, 1).contiguous()
        base = self.base_logits(by_slot)
        ids, keys = context.anchors, context.keys
        reqs = torch.arange(len(ids), device=ids.device)
        state: Tensor | None = None
        embedded, blocks = [], []
        for slot in range(context.num_drafts):
            previous = self._markov.embed(ids)
            latent, state = self._markov.latent(by_slot[slot], previous, state)
            block = walk(
                base[slot, :, None], by_slot[slot, :, None], reqs, latent, self._markov.w2.weight,
                temperatures=context.temperatures,
                keys=DrawKeys(keys.seeds, keys.positions + slot, keys.purposes),
                need_logits=context.need_logits, confidence=None,
            )  # fmt: skip
            ids = block.token_ids[:, 0]
            embedded.append(previous)
            blocks.append(block)
        return DrawnBlock(
            token_ids=torch.cat([block.token_ids for block in blocks], dim=1),
            logits=_joined([block.logits for block in blocks]),
            normalisers=_joined([block.normalisers for block in blocks]),
            confidence=self._confidences(hidden, embedded),
        )

    def _confidences(self, hidden: Tensor, embedded: Sequence[Tensor]) -> Tensor | None:
        if self._confidence is None:
            return None
        return self._confidence(hidden, torch.stack(list(embedded), dim=1))


def _joined(slots: Sequence[Tensor | None]) -> Tensor | None:
    """[B, 1, ...] of every slot to [B, K, ...]."""
    there = [slot for slot in slots if slot is not None]
    return torch.cat(there, dim=1) if there else None
