"""A target whose KV is token ids, and drafters that know it: whole-engine tests without a model.

The logits of a token are a pure function of every token before it, read back through the page
table. A wrong page, a stale slot or a shifted row changes the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import (
    CommittedTokens,
    DraftContext,
    DraftProposal,
    DrawKeys,
    ForwardBatch,
    KVSpec,
    TargetOutput,
)
from emberline.layout import Scored, Tokens
from emberline.sampling.keys import draw


class PrefixTarget:
    """Logits = a hash of the last `order` tokens; KV holds the ids themselves.

    With a `window` it looks at no more tokens than that, and at every one of those.
    """

    row_granule = 1

    def __init__(
        self,
        vocab_size: int = 32,
        max_model_len: int = 128,
        num_slots: int = 4096,
        page_size: int = 4,
        order: int = 3,
        scale: float = 3.0,
        window: int | None = None,
    ) -> None:
        assert window is None or window >= order
        self.vocab_size = vocab_size
        self.hidden_size = 1
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.order = order
        self.scale = scale
        self.kv_spec = KVSpec(1, 1, 1, window=window)
        self.slots = torch.full((num_slots,), -1, dtype=torch.int64)
        self._rows: dict[tuple[int, ...], Tensor] = {}  # the last tokens -> logits
        self.num_rows_run: list[int] = []
        self.num_tokens_run: list[int] = []
        self.num_scored_run: list[int] = []
        self.overrides: dict[tuple[int, ...], Tensor] = {}  # whole prefix -> logits

    def logits_after(self, prefix: list[int]) -> Tensor:
        """[V] float32 logits of the token after `prefix`."""
        if tuple(prefix) in self.overrides:
            return self.overrides[tuple(prefix)]
        last = tuple(prefix[-self.order :])
        if last not in self._rows:
            seed = 17
            for token in last:
                seed = (seed * 1_000_003 + token + 1) % (2**31 - 1)
            generator = torch.Generator().manual_seed(seed)
            self._rows[last] = torch.randn(self.vocab_size, generator=generator) * self.scale
        return self._rows[last]

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` looks at."""
        return max(0, position + 1 - (self.kv_spec.window or position + 1))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens of plain greedy decoding."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits_after(tokens).argmax()))
        return tokens[len(prompt) :]

    def forward(self, batch: ForwardBatch) -> TargetOutput:
        layout = batch.layout.check()
        self.num_rows_run.append(layout.num_rows)
        self.num_tokens_run.append(layout.num_tokens)
        self.num_scored_run.append(layout.num_scored)
        assert int(batch.positions.max()) < self.max_model_len, "a window past the context limit"
        self.slots[batch.slot_mapping] = batch.token_ids
        rows = []
        for token in layout.token_of_scored.tolist():
            req, position = int(layout.req_of_token[token]), int(batch.positions[token])
            at = torch.arange(self.first_seen(position), position + 1)
            page = batch.page_table[req, at // self.page_size]
            prefix = self.slots[page * self.page_size + at % self.page_size].tolist()
            assert page.min() > 0, "the scratch page was read"
            rows.append(self.logits_after(prefix))
        logits = torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)
        return TargetOutput(Scored(logits), Tokens(batch.token_ids[:, None].float()))

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids[..., None].float()

    def head(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class PrefixDrafter:
    """Knows the target. At every `wrong_every`-th position it drafts something else on purpose.

    Its confidence is 0.9, but 0.1 at every `doubt_every`-th position. Its KV is the token ids, in
    the same pages; with a `lookahead` of 1 the next token's id as well.
    """

    taps = (0,)

    def __init__(
        self,
        target: PrefixTarget,
        num_drafts: int = 7,
        wrong_every: int = 0,
        noise: float = 0.0,
        doubt_every: int = 0,
        lookahead: int = 0,
    ) -> None:
        self.target = target
        self.kv_spec = KVSpec(1, 1, 1, lookahead, target.kv_spec.window)
        self.max_draft_tokens = num_drafts
        self.wrong_every = wrong_every
        self.noise = noise
        self.doubt_every = doubt_every
        self.num_proposals = 0
        self.slots = torch.full_like(target.slots, -1)
        self.observed: dict[int, tuple[int, int]] = {}  # position -> id, the next id

    def propose(self, context: DraftContext) -> DraftProposal:
        self.num_proposals += len(context.anchors)
        prefixes = [self._known(context, b) for b in range(len(context.anchors))]
        ids: list[Tensor] = []
        logits, confidence = [], []
        for k in range(context.num_drafts):
            places = (context.positions + k + 1).tolist()
            rows = [self._row(prefix, at) for prefix, at in zip(prefixes, places, strict=True)]
            keys = DrawKeys(context.seeds, context.positions + k + 1, context.purposes)
            allowed = context.allowed(torch.stack(rows), ids)
            drawn, used = draw(allowed, context.temperatures, keys, context.draws)
            ids.append(drawn)
            logits.append(used)
            doubts = [bool(self.doubt_every) and at % self.doubt_every == 0 for at in places]
            confidence.append([0.1 if doubt else 0.9 for doubt in doubts])
            prefixes = [[*prefix, i] for prefix, i in zip(prefixes, drawn.tolist(), strict=True)]
        return DraftProposal(
            token_ids=torch.stack(ids, dim=1),
            num_drafted=torch.full((len(prefixes),), context.num_drafts),
            logits=torch.stack(logits, dim=1) if context.need_logits else None,
            confidence=torch.tensor(confidence).T,
        )

    def _known(self, context: DraftContext, b: int) -> list[int]:
        """The tokens of a request, its anchor included; its draft KV must say the same."""
        position = int(context.positions[b])
        prefix: list[int] = context.history[int(context.req_index[b]), : position + 1].tolist()
        assert prefix[-1] == int(context.anchors[b])
        first, size = self.target.first_seen(position), self.target.page_size
        at = torch.arange(first, position)
        page = context.page_table[b, at // size]
        expected = self._kv(torch.tensor(prefix[first:-1]), torch.tensor(prefix[first + 1 :]))
        assert torch.equal(self.slots[page * size + at % size], expected), "stale draft KV"
        return prefix

    def _row(self, prefix: list[int], where: int) -> Tensor:
        """[V] logits of the draft at a position."""
        row = self.target.logits_after(prefix)
        if self.wrong_every and where % self.wrong_every == 0:
            row = -row
        if self.noise:
            generator = torch.Generator().manual_seed(where)
            row = row + self.noise * torch.randn(row.shape, generator=generator)
        return row

    def _kv(self, token_ids: Tensor, following_ids: Tensor) -> Tensor:
        return token_ids + following_ids * (1000 if self.kv_spec.lookahead else 0)

    def observe(self, committed: CommittedTokens) -> None:
        assert committed.taps is not None
        assert torch.equal(committed.taps[:, 0].long(), committed.token_ids)
        kv = self._kv(committed.token_ids, committed.following_ids)
        self.slots[committed.slot_mapping] = kv
        for position, token, after in zip(
            committed.positions.tolist(),
            committed.token_ids.tolist(),
            committed.following_ids.tolist(),
            strict=True,
        ):
            self.observed[position] = (token, after)


class ConstantDrafter:
    """Always proposes the same id: almost nothing is accepted."""

    taps = ()
    kv_spec = None

    def __init__(self, token_id: int = 0, num_drafts: int = 4) -> None:
        self.token_id = token_id
        self.max_draft_tokens = num_drafts

    def propose(self, context: DraftContext) -> DraftProposal:
        num_reqs = len(context.anchors)
        return DraftProposal(
            token_ids=torch.full((num_reqs, context.num_drafts), self.token_id),
            num_drafted=torch.full((num_reqs,), context.num_drafts),
            logits=None,
            confidence=None,
        )

    def observe(self, committed: CommittedTokens) -> None:
        pass
