"""Real implementations of the target, drafter and planner protocols, each an explicit function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emberline.batch import (
    Admission,
    CommittedTokens,
    DraftContext,
    DraftProposal,
    DrawKeys,
    ForwardBatch,
    KVSpec,
    StepShape,
    TargetOutput,
)
from emberline.layout import Scored
from emberline.sampling.keys import draw
from emberline.verify.planner import Planner

Prefix = tuple[int, ...]


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Callable[[Prefix], Tensor]:
    """Logits as a function of the whole prefix: [V] float64, fixed by the seed."""
    rows: dict[Prefix, Tensor] = {}

    def table(prefix: Prefix) -> Tensor:
        if prefix not in rows:
            number = seed
            for token in prefix:
                number = (number * 1_000_003 + token + 1) % (2**31 - 1)
            generator = torch.Generator().manual_seed(number)
            rows[prefix] = scale * torch.randn(vocab, generator=generator, dtype=torch.float64)
        return rows[prefix]

    return table


class TableTarget:
    """Logits = table(prefix). Its KV is the token ids by slot, read back through the pages."""

    row_granule = 1
    max_model_len = 64
    hidden_size = 0  # it has no layers to tap

    def __init__(
        self, table: Callable[[Prefix], Tensor], vocab_size: int, num_slots: int, page_size: int
    ) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.kv_spec = KVSpec(1, 1, 1)
        self.slots = torch.full((num_slots,), -1, dtype=torch.int64)

    def forward(self, batch: ForwardBatch) -> TargetOutput:
        layout = batch.layout.check()
        self.slots[batch.slot_mapping] = batch.token_ids
        by_page = self.slots.view(-1, self.page_size)
        sequences = by_page[batch.page_table].flatten(1).tolist()
        reqs = layout.score(layout.req_of_token).tolist()  # type: ignore[arg-type]
        positions = layout.score(batch.positions).tolist()
        rows = [
            self.table(tuple(sequences[req][: position + 1]))
            for req, position in zip(reqs, positions, strict=True)
        ]
        return TargetOutput(Scored(torch.stack(rows)), None)

    def embed(self, token_ids: Tensor) -> Tensor:
        raise NotImplementedError("a table has no embeddings")

    def head(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("a table has no head")


class ScriptedDrafter:
    """Drafts from any function of the tokens so far, its own drafts included.

    Args:
        num_drafts: K.
        table: q's logits after a prefix; None: point masses on `guess`.
        guess: the draft after a prefix, where there is no table.
        confidence: of the draft after a prefix; None: the drafter has none.
        goes_on: whether there is a draft after a prefix; the first refusal ends the block.
    """

    taps = ()
    kv_spec = None

    def __init__(
        self,
        num_drafts: int,
        table: Callable[[Prefix], Tensor] | None,
        guess: Callable[[Prefix], int] = lambda prefix: sum(prefix) % 3,
        confidence: Callable[[Prefix], float] | None = None,
        goes_on: Callable[[Prefix], bool] = lambda prefix: True,
    ) -> None:
        self.max_draft_tokens = num_drafts
        self.table = table
        self.guess = guess
        self.confidence = confidence
        self.goes_on = goes_on

    def propose(self, context: DraftContext) -> DraftProposal:
        tokens = context.history[context.req_index].tolist()
        ends = context.positions.tolist()
        prefixes = [tuple(row[: end + 1]) for row, end in zip(tokens, ends, strict=True)]
        ids, logits, confidence, goes_on = [], [], [], []
        for index in range(context.num_drafts):
            goes_on.append([self.goes_on(prefix) for prefix in prefixes])
            if self.confidence is not None:
                confidence.append([self.confidence(prefix) for prefix in prefixes])
            if self.table is None:
                drawn = torch.tensor([self.guess(prefix) for prefix in prefixes])
            else:
                rows = torch.stack([self.table(prefix) for prefix in prefixes])
                drawn, used = draw(
                    context.allowed(rows, ids),
                    context.temperatures,
                    self._keys(context, index),
                    context.draws,
                )
                logits.append(used)
            ids.append(drawn)
            prefixes = [
                (*prefix, token) for prefix, token in zip(prefixes, drawn.tolist(), strict=True)
            ]
        return DraftProposal(
            token_ids=torch.stack(ids, 1),
            num_drafted=torch.tensor(goes_on).long().cumprod(0).sum(0),
            logits=torch.stack(logits, 1) if logits and context.need_logits else None,
            confidence=torch.tensor(confidence).T if confidence else None,
        )

    @staticmethod
    def _keys(context: DraftContext, index: int) -> DrawKeys:
        return DrawKeys(context.seeds, context.positions + 1 + index, context.purposes)

    def observe(self, committed: CommittedTokens) -> None:
        pass


class PerRequest:
    """A planner of its own for each request, in the order of the rows: requests that never meet."""

    def __init__(self, planners: Sequence[Planner]) -> None:
        self.planners = planners

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        return tuple(
            planner.depths(one)[0] for planner, one in zip(self.planners, alone(shape), strict=True)
        )

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        lens = []
        for row, (planner, one) in enumerate(zip(self.planners, alone(shape), strict=True)):
            if not one.draft_limits[0]:
                lens.append(0)
                continue
            sure = proposal.confidence
            mine = DraftProposal(
                token_ids=proposal.token_ids[row : row + 1],
                num_drafted=proposal.num_drafted[row : row + 1],
                logits=None,
                confidence=None if sure is None else sure[row : row + 1],
            )
            lens.append(planner.admit(mine, one).num_draft_tokens)
        return Admission(torch.tensor(lens), sum(lens))

    def abandon(self) -> None:
        for planner in self.planners:
            planner.abandon()


def alone(shape: StepShape) -> list[StepShape]:
    """Each request of a decode step as a step of its own."""
    return [
        StepShape(1, 1, (serial,), (limit,))
        for serial, limit in zip(shape.serials, shape.draft_limits, strict=True)
    ]


class ScriptedPlanner:
    """Verifies as many drafts as a function of (drafts, confidences) says, of what is drafted."""

    def __init__(self, rule: Callable[[Sequence[int], Sequence[float]], int]) -> None:
        self.rule = rule

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        return shape.draft_limits

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        ids = proposal.token_ids.tolist()
        blank: list[list[float]] = [[]] * len(ids)
        sure = blank if proposal.confidence is None else proposal.confidence.tolist()
        lens = torch.tensor([self.rule(*row) for row in zip(ids, sure, strict=True)])
        admitted = torch.minimum(lens, proposal.num_drafted)
        return Admission(admitted, int(admitted.sum()))

    def abandon(self) -> None:
        pass
