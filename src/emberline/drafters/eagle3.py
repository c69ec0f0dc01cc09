"""EAGLE-3: tokens drafted one after another by a small model that reads the target's states.

Owns the autoregressive draw only. No confidence head: planners take its blocks as DFlash's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, DrawKeys, KVSpec
from emberline.cache.kv_pool import KVPool
from emberline.drafters.eagle3_backbone import Eagle3Backbone
from emberline.drafters.tables import HeadFn
from emberline.sampling.keys import draw


class Eagle3Drafter:
    """Drafts a block left to right, each token from softmax(head(norm(output)) / temperature).

    Args:
        backbone: gives the outputs and keeps the draft's KV; its config says how many drafts.
        head: [N, D] -> [N, V] float32 logits over the target's vocabulary.
    """

    def __init__(self, backbone: Eagle3Backbone, head: HeadFn) -> None:
        self._backbone = backbone
        self._head = head

    @property
    def max_draft_tokens(self) -> int:
        """K, the drafts of a block."""
        return self._backbone.config.max_draft_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output is fused into the context."""
        return self._backbone.config.taps

    @property
    def kv_spec(self) -> KVSpec | None:
        """The backbone's KV."""
        return self._backbone.config.kv_spec

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """The backbone's keys and values."""
        return (self._backbone.kv_pool,)

    def observe(self, committed: CommittedTokens) -> None:
        """Write the entries of committed tokens into the draft's KV."""
        self._backbone.observe(committed)

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request; the last of them needs no entry of its own."""
        outputs, known = self._backbone.begin(context.positions, context.page_table)
        token_ids: list[Tensor] = []
        drawn = []
        for slot in range(context.num_drafts):
            if slot:
                at = context.positions + (slot - 1)
                outputs = self._backbone.step(slot - 1, outputs, token_ids[-1], at, known)
            keys = DrawKeys(context.seeds, context.positions + (slot + 1), context.purposes)
            logits = context.allowed(self._head(self._backbone.normed(outputs)), token_ids)
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
