"""An ordinary small language model as drafter: same vocabulary, KV of its own in the same pages.

Owns the batches that the small model runs. It must not know how that model computes, only the
target protocol that it implements like any other.

Every committed token runs through the model once more when it is final: what was drafted and
accepted is written again with the same numbers, so that no book is kept of which entries are
still right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.batch import (
    CommittedTokens,
    DraftContext,
    DraftProposal,
    DrawKeys,
    ForwardBatch,
    KVSpec,
)
from emberline.cache.kv_pool import KVPool
from emberline.layout import TokenLayout, Tokens
from emberline.models.load import load_target
from emberline.models.target import Target
from emberline.models.weights import ModelError
from emberline.ops.kernels import Kernels
from emberline.sampling.keys import draw

DEFAULT_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class StandaloneConfig:
    """What the engine must know of a drafter that is a model of its own."""

    taps: tuple[int, ...] = ()
    max_draft_tokens: int = DEFAULT_DRAFTS


class StandaloneDrafter:
    """Drafts a block left to right, each token from softmax(logits / temperature) of a model.

    A request drafts as long as the model's own context lasts, and then no more.

    Args:
        model: the small model, over pages of `page_size` tokens.
        num_draft_tokens: K, most drafts a block.
    """

    def __init__(
        self, model: Target, page_size: int, num_draft_tokens: int = DEFAULT_DRAFTS
    ) -> None:
        self._model = model
        self._page_size = page_size
        self._num_drafts = num_draft_tokens

    @property
    def max_draft_tokens(self) -> int:
        """K, the drafts of a block."""
        return self._num_drafts

    @property
    def taps(self) -> tuple[int, ...]:
        """None: it never looks at the target's states."""
        return ()

    @property
    def kv_spec(self) -> KVSpec | None:
        """The model's KV."""
        return self._model.kv_spec

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """The model's keys and values."""
        return self._model.kv_pools

    def observe(self, committed: CommittedTokens) -> None:
        """Run committed tokens, as far as the model's context reaches."""
        inside = committed.positions < self._model.max_model_len
        req = torch.repeat_interleave(
            torch.arange(len(committed.lens), device=inside.device), committed.lens
        )[inside]
        lens = torch.bincount(req, minlength=len(committed.lens))
        if not len(req):
            return
        self._forward(
            committed.token_ids[inside],
            committed.positions[inside],
            committed.slot_mapping[inside],
            committed.page_table[lens > 0],
            lens[lens > 0],
            windows=torch.zeros_like(lens[lens > 0]),
        )

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request, the anchor run first; its pages have room for the drafts."""
        ones = torch.ones_like(context.anchors)
        limit = self._model.max_model_len
        token_ids: list[Tensor] = []
        drawn = []
        for slot in range(context.num_drafts):
            at = context.positions + slot
            logits = self._forward(
                token_ids[-1] if token_ids else context.anchors,
                at.clamp_max(limit - 1),
                self._slots(at, context.page_table),
                context.page_table,
                ones,
                windows=ones,
            )
            keys = DrawKeys(context.seeds, at + 1, context.purposes)
            ids, drawn_logits = draw(
                context.allowed(logits, token_ids), context.temperatures, keys, context.draws
            )
            token_ids.append(ids)
            if context.need_logits:
                drawn.append(drawn_logits)
        return DraftProposal(
            token_ids=torch.stack(token_ids, dim=1),
            num_drafted=(limit - context.positions).clamp(0, context.num_drafts),
            logits=torch.stack(drawn, dim=1) if drawn else None,
            confidence=None,
        )

    def _slots(self, positions: Tensor, page_table: Tensor) -> Tensor:
        """Where tokens at `positions` [B] go: past a request's pages or the context, to scratch.

        A request that drafts less than its neighbours has fewer pages; what it drafts beyond is
        dropped.
        """
        index, last = positions // self._page_size, page_table.shape[1] - 1
        page = page_table.gather(1, index.clamp_max(last)[:, None])[:, 0]
        beyond = (index > last) | (positions >= self._model.max_model_len)
        return page.masked_fill(beyond, 0) * self._page_size + positions % self._page_size

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        page_table: Tensor,
        lens: Tensor,
        *,
        windows: Tensor,
    ) -> Tensor:
        """Run tokens, request-major; logits [sum of `windows`, V] of each request's last ones."""
        layout = TokenLayout.build(
            lens,
            windows,
            num_tokens=len(token_ids),
            num_scored=int(windows.sum()),
            kind="compact",
            width=1,
            row_granule=self._model.row_granule,
        )
        batch = ForwardBatch(
            layout=layout,
            token_ids=Tokens(token_ids),
            positions=Tokens(positions),
            slot_mapping=Tokens(slot_mapping),
            page_table=page_table,
            seq_lens=positions[lens.cumsum(0) - 1] + 1,
        )
        return self._model.forward(batch).logits


def is_language_model(raw: Mapping[str, Any]) -> bool:
    """Whether a config is of an ordinary causal language model, by its architecture's name."""
    names = raw.get("architectures") or [None]
    return str(names[0]).endswith("ForCausalLM")


def load_standalone(
    folder: Path,
    target: Target,
    *,
    dtype: torch.dtype,
    device: str,
    num_pages: int,
    page_size: int,
    num_draft_tokens: int | None = None,
    kernels: Kernels | None = None,
) -> StandaloneDrafter:
    """The model in `folder` as drafter for `target`, with KV for `num_pages` pages.

    Raises:
        ModelError: it is not a model that can run here, or its vocabulary is not the target's.
    """
    model = load_target(
        folder,
        dtype=dtype,
        device=device,
        num_pages=num_pages,
        page_size=page_size,
        kernels=kernels,
    )
    if model.vocab_size != target.vocab_size:
        raise ModelError(
            f"{folder}: has a vocabulary of {model.vocab_size}, the target of "
            f"{target.vocab_size}: a model drafts only for a target with the same tokenizer"
        )
    return StandaloneDrafter(model, page_size, num_draft_tokens or DEFAULT_DRAFTS)
