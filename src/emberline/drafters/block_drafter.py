"""What the drafters on the block backbone share: its facts, its context, its base logits.

Owns everything of the `Drafter` protocol but `propose`, and the loop of a draw slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emberline.batch import BlockContext, CommittedTokens, DraftContext, DrawKeys, Draws, KVSpec
from emberline.cache.kv_pool import KVPool
from emberline.drafters.block import BlockBackbone
from emberline.drafters.tables import HeadFn
from emberline.models.weights import ModelError
from emberline.ops.kernels import Kernels
from emberline.sampling.keys import draw

Allowed = Callable[[Tensor, Sequence[Tensor]], Tensor]  # logits [B, V], drafts before -> logits


class BlockDrafter:
    """A drafter but for `propose` and `propose_block`.

    Args:
        backbone: gives the slots' hidden states and keeps the draft's KV.
        head: [N, D] -> [N, V] logits.
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

    def follow(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """`observe` for a graph to capture."""
        self._backbone.follow(taps, positions, slot_mapping)

    @property
    def kernels(self) -> Kernels:
        """Those of the backbone.

        Raises:
            ValueError: it has none.
        """
        if self._backbone.kernels is None:
            raise ValueError("a graph captures kernels only: load the draft with them")
        return self._backbone.kernels

    def run_block(self, context: DraftContext | BlockContext) -> Tensor:
        """Hidden states [B, K, D] of the slots that draft."""
        hidden = self._backbone.forward(context.anchors, context.positions, context.page_table)
        return hidden[:, : context.num_drafts].contiguous()

    def base_logits(self, hidden: Tensor) -> Tensor:
        """The head's logits. [X, Y, D] -> [X, Y, V]."""
        return self._head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


def draw_slots(
    context: DraftContext | BlockContext,
    base: Tensor,
    keys: DrawKeys,
    draws: Draws,
    *,
    bias: Callable[[int, Tensor], Tensor] | None = None,
    allowed: Allowed | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Draw a block left to right.

    Args:
        context: says for whom.
        base: [B, K, V] logits.
        keys: [B], at the anchor's position.
        draws: the source of randomness.
        bias: what a slot and the ids [B] before it add to the slot's logits, [B, V].
        allowed: see `DraftContext.allowed`.

    Returns:
        ids [B, K], and what they were drawn from [B, K, V] if anybody will read it.
    """
    previous, token_ids = context.anchors, list[Tensor]()
    kept = []
    for slot in range(context.num_drafts):
        logits = base[:, slot] if bias is None else base[:, slot] + bias(slot, previous)
        if allowed is not None:
            logits = allowed(logits, token_ids)
        at = DrawKeys(keys.seeds, keys.positions + (slot + 1), keys.purposes)
        previous, drawn = draw(logits, context.temperatures, at, draws)
        token_ids.append(previous)
        if context.need_logits:
            kept.append(drawn)
    return torch.stack(token_ids, dim=1), torch.stack(kept, dim=1) if kept else None


def normalisers_of(drawn: Tensor | None) -> Tensor | None:
    """The largest of each row of logits, and the sum of exp(they - it). [..., V] -> [..., 2]."""
    if drawn is None:
        return None
    peak = drawn.amax(-1)
    mass = (drawn - peak.nan_to_num(neginf=0.0)[..., None]).exp().sum(-1)
    return torch.stack((peak, mass), dim=-1)


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
