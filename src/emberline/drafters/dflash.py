"""DFlash: every slot of the block is drawn on its own, from the backbone's base logits.

Owns the independent draw only. No sequential head and no confidence: a DSpark of Markov rank 0.
"""

from __future__ import annotations

import torch

from emberline.batch import BlockContext, DraftContext, DraftProposal, DrawKeys, DrawnBlock
from emberline.drafters.block_drafter import BlockDrafter, draw_slots, normalisers_of
from emberline.sampling.keys import KeyedDraws


class DFlashDrafter(BlockDrafter):
    """Drafts a block, each token from softmax(base / temperature), whatever the others are."""

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request. In order: a grammar knows what may follow the drafts before."""
        base = self.base_logits(self.run_block(context))
        keys = DrawKeys(context.seeds, context.positions, context.purposes)
        ids, drawn = draw_slots(context, base, keys, context.draws, allowed=context.allowed)
        return DraftProposal(
            token_ids=ids,
            num_drafted=torch.full_like(context.anchors, context.num_drafts),
            logits=drawn,
            confidence=None,
        )

    def propose_block(self, context: BlockContext) -> DrawnBlock:
        """`propose` for a graph to capture: all slots in one draw."""
        base, draw = self.base_logits(self.run_block(context)), self.kernels.draw
        if draw is None:
            ids, drawn = draw_slots(context, base, context.keys, KeyedDraws())
            return DrawnBlock(ids, drawn, normalisers_of(drawn), None)
        reqs, num_drafts, vocab = base.shape
        keys = DrawKeys(context.keys.seeds, context.keys.positions + 1, context.keys.purposes)
        ids, normalisers = draw(base.view(-1, vocab), context.temperatures, keys, num_drafts)
        ids = ids.view(reqs, num_drafts)
        if not context.need_logits:
            return DrawnBlock(ids, None, None, None)
        greedy = context.temperatures == 0
        divisors = context.temperatures.masked_fill(greedy, 1.0)[:, None, None]
        return DrawnBlock(ids, base.float() / divisors, normalisers.view(reqs, -1, 2), None)
