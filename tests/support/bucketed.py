"""The doubles of `support.paged` where steps run in buckets: padding at the tail of everything.

What nobody may read is poison: KV of padding tokens, logits of entries that belong to no request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import BlockContext, DrawKeys, DrawnBlock, ForwardBatch, TargetOutput
from emberline.drafters.block_drafter import normalisers_of
from emberline.layout import Scored, Tokens
from emberline.sampling.keys import KeyedDraws, draw

from support.paged import PrefixDrafter, PrefixTarget

POISON = -7  # no token's id


class BucketTarget(PrefixTarget):
    """Takes plain steps and buckets alike."""

    def forward(self, batch: ForwardBatch) -> TargetOutput:
        layout = batch.layout
        live = layout.req_of_token >= 0
        self._check_places(batch, live)
        self.slots[batch.slot_mapping[~live]] = POISON
        self.slots[batch.slot_mapping[live]] = batch.token_ids[live]
        logits = torch.full((layout.num_scored, self.vocab_size), torch.nan)
        for entry in range(int(layout.scored_start_loc[-1])):
            token = int(layout.token_of_scored[entry])
            req, position = int(layout.req_of_token[token]), int(batch.positions[token])
            logits[entry] = self.logits_after(self._known(batch.page_table[req], position))
        # As the rows went: what a static layout does to tokens shows in the taps.
        rows = layout.pack(Tokens(batch.token_ids[:, None].float()), torch.nan)
        return TargetOutput(Scored(logits), layout.unpack(rows))

    def _check_places(self, batch: ForwardBatch, live: Tensor) -> None:
        layout, size = batch.layout, self.page_size
        lens = layout.query_start_loc.diff()
        assert int(lens.max()) <= layout.max_query_len
        assert int(lens.sum()) == int(live.sum()), "tokens were lost"
        assert int(batch.positions.max()) < self.max_model_len, "a window past the context limit"
        assert bool((batch.slot_mapping[live] >= size).all()), "the scratch page was written"
        assert bool((batch.slot_mapping[~live] < size).all()), "padding was written to a page"
        assert len(set(batch.slot_mapping[live].tolist())) == int(live.sum()), "a page of two"

    def _known(self, pages: Tensor, position: int) -> list[int]:
        """What KV says of the tokens up to a position."""
        at = torch.arange(self.first_seen(position), position + 1)
        page = pages[at // self.page_size]
        prefix: list[int] = self.slots[page * self.page_size + at % self.page_size].tolist()
        assert int(page.min()) > 0, "the scratch page was read"
        assert min(prefix) >= 0, "what was read was never written"
        return prefix


class BucketDrafter(PrefixDrafter):
    """Drafts for buckets as well, from what its own KV says; `doubts`: with confidences."""

    def __init__(self, target: PrefixTarget, *, doubts: bool = True, **options: float) -> None:
        super().__init__(target, **options)  # type: ignore[arg-type]
        self.doubts = doubts

    def propose_block(self, context: BlockContext) -> DrawnBlock:
        # Of requests that do not live nothing is known: their pages may be anybody's by now.
        prefixes = [self._context(context, b) for b in range(len(context.anchors))]
        ids: list[Tensor] = []
        logits, confidence = [], []
        for k in range(context.num_drafts):
            at = context.positions + k + 1
            rows = [self._row(prefix, i) for prefix, i in zip(prefixes, at.tolist(), strict=True)]
            keys = DrawKeys(context.keys.seeds, at, context.keys.purposes)
            drawn, used = draw(torch.stack(rows), context.temperatures, keys, KeyedDraws())
            ids.append(drawn)
            logits.append(used)
            sure = [bool(self.doubt_every) and i % self.doubt_every == 0 for i in at.tolist()]
            confidence.append([0.1 if doubt else 0.9 for doubt in sure])
            prefixes = [[*prefix, i] for prefix, i in zip(prefixes, drawn.tolist(), strict=True)]
        q = torch.stack(logits, dim=1).contiguous() if context.need_logits else None
        return DrawnBlock(
            torch.stack(ids, dim=1),
            q,
            normalisers_of(q),
            torch.tensor(confidence).T.contiguous() if self.doubts else None,
        )

    def _context(self, context: BlockContext, b: int) -> list[int]:
        position, size = int(context.positions[b]), self.target.page_size
        at = torch.arange(self.target.first_seen(position), position)
        page = context.page_table[b, at // size]
        return [*self.slots[page * size + at % size].tolist(), int(context.anchors[b])]

    def follow(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        self.slots[slot_mapping] = taps[:, 0].long()
