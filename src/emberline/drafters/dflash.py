"""DFlash: every slot of the block is drawn on its own, from the backbone's base logits.

Owns the independent draw only. No sequential head and no confidence: a DSpark of Markov rank 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import DraftContext, DraftProposal, DrawKeys
from emberline.drafters.block_drafter import BlockDrafter
from emberline.sampling.keys import draw


class DFlashDrafter(BlockDrafter):
    """Drafts a block, each token from softmax(base / temperature), whatever the others are."""

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request. In order: a grammar knows what may follow the drafts before."""
        _, base = self.run_block(context)
        token_ids: list[Tensor] = []
        drawn = []
        for slot in range(context.num_drafts):
            keys = DrawKeys(context.seeds, context.positions + (slot + 1), context.purposes)
            logits = context.allowed(base[:, slot], token_ids)
            ids, drawn_logits = draw(logits, context.temperatures, keys, context.draws)
            token_ids.append(ids)
            if context.need_logits:
                drawn.append(drawn_logits)
        return DraftProposal(
            token_ids=torch.stack(token_ids, dim=1),
            num_drafted=torch.full_like(context.anchors, context.num_drafts),
            logits=torch.stack(drawn, dim=1) if drawn else None,
            confidence=None,
        )
