"""Prompt lookup: the tokens that followed the last few tokens the previous time they occurred.

Owns the search in a request's history. No model, no KV, no randomness: a draft is a point mass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, KVSpec


class NGramDrafter:
    """Drafts what followed the longest repeated suffix, at its most recent earlier occurrence.

    Args:
        num_draft_tokens: K, most drafts a block.
        max_match: longest suffix looked for; longer ones are rarer and say more.
        min_match: shortest suffix that is evidence enough to draft on.
    """

    def __init__(self, num_draft_tokens: int = 8, max_match: int = 4, min_match: int = 2) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        if not 1 <= min_match <= max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, got {min_match}, {max_match}")
        self._num_drafts = num_draft_tokens
        self._max_match = max_match
        self._min_match = min_match

    @property
    def max_draft_tokens(self) -> int:
        """K, most drafts a block."""
        return self._num_drafts

    @property
    def taps(self) -> tuple[int, ...]:
        """None: it never looks at the target's states."""
        return ()

    @property
    def kv_spec(self) -> KVSpec | None:
        """None: its memory is the token list."""
        return None

    def observe(self, committed: CommittedTokens) -> None:
        """Nothing to do: `DraftContext.history` already holds the committed tokens."""

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft up to K tokens a request; requests without a match draft none."""
        token_ids = context.anchors.new_zeros(context.anchors.shape[0], context.num_drafts)
        num_drafted = torch.zeros_like(context.anchors)
        for row, (slot, position) in enumerate(
            zip(context.req_index.tolist(), context.positions.tolist(), strict=True)
        ):
            tokens = context.history[slot, : position + 1]
            continuation = self._continuation(tokens, context.num_drafts)
            token_ids[row, : len(continuation)] = continuation
            num_drafted[row] = len(continuation)
        return DraftProposal(token_ids, num_drafted, logits=None, confidence=None)

    def _continuation(self, tokens: Tensor, num_drafts: int) -> Tensor:
        """What followed the longest earlier match of the end of `tokens` [L], up to a limit."""
        length = tokens.shape[0]
        # ends[i]: the n tokens up to and with i equal the last n; narrowed as n grows.
        ends = torch.ones(length - 1, dtype=torch.bool, device=tokens.device)
        best = None
        for size in range(1, min(self._max_match, length - 1) + 1):
            ends[: size - 1] = False
            ends[size - 1 :] &= tokens[: length - size] == tokens[length - size]
            found = ends.nonzero()
            if not len(found):
                break
            if size >= self._min_match:
                best = int(found[-1]) + 1
        if best is None:
            return tokens[:0]
        return tokens[best : best + num_drafts]
