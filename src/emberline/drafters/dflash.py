"""DFlash: every slot of the block is drawn on its own, from the backbone's base logits.

Owns the independent draw only. No sequential head and no confidence: a DSpark of Markov rank 0.
"""

from __future__ import annotations

import torch

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, DrawKeys, KVSpec
from emberline.drafters.block import BlockBackbone, HeadFn
from emberline.drafters.dspark import draft_purposes, limit_drafts
from emberline.sampling.keys import draw


class DFlashDrafter:
    """Drafts a block at once, each token from softmax(base / temperature).

    Args:
        backbone: gives the slots' hidden states and keeps the draft's KV.
        head: [N, D] -> [N, V] float32 logits.
        num_draft_tokens: only the first so many drafts of a block are drawn; None = all. The
            backbone still runs the whole block, as in training.
    """

    def __init__(
        self, backbone: BlockBackbone, head: HeadFn, num_draft_tokens: int | None = None
    ) -> None:
        self._backbone = backbone
        self._head = head
        self._num_drafts = limit_drafts(backbone.config.max_draft_tokens, num_draft_tokens)

    @property
    def max_draft_tokens(self) -> int:
        """K, the drafts of a block."""
        return self._num_drafts

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output is the context."""
        return self._backbone.config.taps

    @property
    def kv_spec(self) -> KVSpec | None:
        """The backbone's KV."""
        return self._backbone.config.kv_spec

    def observe(self, committed: CommittedTokens) -> None:
        """Write the context of committed tokens into the draft's KV."""
        self._backbone.observe(committed)

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request in one draw."""
        num_reqs, num_drafts = context.anchors.shape[0], self._num_drafts
        hidden = self._backbone.forward(context.anchors, context.positions, context.page_table)
        logits = self._head(hidden[:, :num_drafts].flatten(0, 1))
        ahead = torch.arange(1, num_drafts + 1, device=context.positions.device)
        keys = DrawKeys(
            seeds=context.seeds.repeat_interleave(num_drafts),
            positions=(context.positions[:, None] + ahead).flatten(),
            purposes=draft_purposes(context).repeat_interleave(num_drafts),
        )
        temperatures = context.temperatures.repeat_interleave(num_drafts)
        token_ids, drawn = draw(logits, temperatures, keys, context.draws)
        return DraftProposal(
            token_ids=token_ids.view(num_reqs, num_drafts),
            num_drafted=torch.full_like(context.anchors, num_drafts),
            logits=drawn.view(num_reqs, num_drafts, -1) if context.need_logits else None,
            confidence=None,
        )
