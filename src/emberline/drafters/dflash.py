"""DFlash: every slot of the block is drawn on its own, from the backbone's base logits.

Owns the independent draw only. No sequential head and no confidence: a DSpark of Markov rank 0.
"""

from __future__ import annotations

import torch

from emberline.batch import DraftContext, DraftProposal, DrawKeys
from emberline.drafters.block_drafter import BlockDrafter
from emberline.sampling.keys import draw


class DFlashDrafter(BlockDrafter):
    """Drafts a block at once, each token from softmax(base / temperature)."""

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request in one draw."""
        _, base = self.run_block(context)
        num_reqs, num_drafts = base.shape[:2]
        ahead = torch.arange(1, num_drafts + 1, device=context.positions.device)
        keys = DrawKeys(
            seeds=context.seeds.repeat_interleave(num_drafts),
            positions=(context.positions[:, None] + ahead).flatten(),
            purposes=context.purposes.repeat_interleave(num_drafts),
        )
        temperatures = context.temperatures.repeat_interleave(num_drafts)
        token_ids, drawn = draw(base.flatten(0, 1), temperatures, keys, context.draws)
        return DraftProposal(
            token_ids=token_ids.view(num_reqs, num_drafts),
            num_drafted=torch.full_like(context.anchors, num_drafts),
            logits=drawn.view(num_reqs, num_drafts, -1) if context.need_logits else None,
            confidence=None,
        )
