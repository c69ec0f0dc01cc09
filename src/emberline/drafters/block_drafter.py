"""What the drafters on the block backbone share: its facts, its context, its base logits.

Owns everything of the `Drafter` protocol but the draw itself.
"""

from __future__ import annotations

from torch import Tensor

from emberline.batch import CommittedTokens, DraftContext, KVSpec
from emberline.cache.kv_pool import KVPool
from emberline.drafters.block import BlockBackbone
from emberline.drafters.tables import HeadFn
from emberline.models.weights import ModelError


class BlockDrafter:
    """A drafter but for `propose`.

    Args:
        backbone: gives the slots' hidden states and keeps the draft's KV.
        head: [N, D] -> [N, V] float32 logits.
        num_draft_tokens: only the first so many drafts of a block are drawn; None = all. The
            backbone still runs the whole block: the slots see each other, and training saw them
            all.
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

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """The backbone's keys and values."""
        return (self._backbone.kv_pool,)

    def observe(self, committed: CommittedTokens) -> None:
        """Write the context of committed tokens into the draft's KV."""
        self._backbone.observe(committed)

    def run_block(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Hidden states [B, K, D] and base logits [B, K, V] of the slots that draft."""
        hidden = self._backbone.forward(context.anchors, context.positions, context.page_table)
        hidden = hidden[:, : context.num_drafts]
        base = self._head(hidden.flatten(0, 1))
        return hidden, base.view(hidden.shape[0], context.num_drafts, -1)


def limit_drafts(most: int, wanted: int | None) -> int:
    """How many drafts to draw of the `most` a block yields.

    Raises:
        ModelError: more are wanted than the block has.
    """
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise ModelError(
            f"num_draft_tokens must be in [1, {most}], the drafts of this draft model's block, "
            f"got {wanted}"
        )
    return wanted
