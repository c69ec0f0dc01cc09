"""Acceptance by a script: models run as they are, but what they say is laid down.

A model of random weights agrees with no draft. Here the token of every place of every request is a
function of its position; the target's logits are raised at it, and a draft is either it or another
token, by chance. The chances differ by request and place and are the drafts' confidences, so they
are calibrated, and a planner has something to go by. It adds a few small kernels to a step.

Owns the script. Must not know engines or clocks. Greedy requests only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from emberline.batch import (
    BlockContext,
    DraftContext,
    DraftProposal,
    DrawnBlock,
    ForwardBatch,
    TargetOutput,
)

CERTAIN = 1e4  # a logit above any other, finite in every dtype
STEP = 7919  # from a position's token to the next one's
PLACES, SEEDS = 4096, 512  # positions and seeds after which the script repeats
MOST_DRAFTS = 64


@dataclass(frozen=True)
class Script:
    """What every position holds, and how likely a draft of it is right.

    A chance is `least` to 1, half of it the request's, half the place's. All is looked up, so that
    a step costs what its models cost; the tables repeat after so many positions and seeds.
    """

    vocab: int
    least: float = 0.4
    tables: dict[torch.device, _Tables] = field(default_factory=dict)

    def tokens(self, positions: Tensor) -> Tensor:
        """[...] int64 -> [...] int64."""
        return self._on(positions.device).tokens[positions % PLACES]

    def block(self, seeds: Tensor, positions: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Drafts of the places behind anchors, and their chances.

        Args:
            seeds: [B] int64, of the requests.
            positions: [B] int64, the anchors'.
            num_drafts: K.

        Returns:
            [B, K] int64 ids, [B, K] float32 chances.
        """
        tables = self._on(positions.device)
        at = ((seeds % SEEDS) * PLACES + positions % PLACES)[:, None] + tables.steps[:num_drafts]
        return tables.drafts.take(at), tables.chances.take(at)

    def _on(self, device: torch.device) -> _Tables:
        if device not in self.tables:
            self.tables[device] = _Tables.make(self, device)
        return self.tables[device]

    def speaking(self, forward: Callable[[ForwardBatch], TargetOutput]) -> Callable[..., Any]:
        """A target's `forward` that says the script."""

        def run(batch: ForwardBatch) -> TargetOutput:
            output = forward(batch)
            places = batch.positions[batch.layout.token_of_scored] + 1
            output.logits.scatter_(1, self.tokens(places)[:, None], CERTAIN)
            return output

        return run

    def proposing(self, propose: Callable[[DraftContext], DraftProposal]) -> Callable[..., Any]:
        """A drafter's `propose` that drafts by the script."""

        def run(context: DraftContext) -> DraftProposal:
            proposal = propose(context)
            ids, chances = self.block(context.seeds, context.positions, context.num_drafts)
            return replace(proposal, token_ids=ids, confidence=chances)

        return run

    def drawing(self, propose: Callable[[BlockContext], DrawnBlock]) -> Callable[..., Any]:
        """A drafter's `propose_block` that drafts by the script."""

        def run(context: BlockContext) -> DrawnBlock:
            drawn = propose(context)
            ids, chances = self.block(context.keys.seeds, context.positions, context.num_drafts)
            return replace(drawn, token_ids=ids, confidence=chances)

        return run


@dataclass(frozen=True, slots=True)
class _Tables:
    """A script on a device. Rows of places overlap: a block may go on past the last of a row."""

    tokens: Tensor  # [PLACES] int64, of every position
    drafts: Tensor  # [SEEDS * PLACES + a block] int64, of every seed and position
    chances: Tensor  # float32, likewise
    steps: Tensor  # [a block] int64, 1, 2, ...

    @classmethod
    def make(cls, script: Script, device: torch.device) -> _Tables:
        """Lay a script down."""
        places = torch.arange(PLACES, device=device)
        tokens = (places * STEP + 1) % script.vocab
        at = torch.arange(SEEDS * PLACES + MOST_DRAFTS + 1, device=device)
        seeds, places = at // PLACES, at % PLACES
        ease = (_uniform(seeds, 0 * places, 1) + _uniform(seeds, places, 2)) / 2
        chances = script.least + (1 - script.least) * ease
        right = _uniform(seeds, places, 3) < chances
        drafts = torch.where(right, tokens[places], (tokens[places] + 1) % script.vocab)
        return cls(tokens, drafts, chances, torch.arange(1, MOST_DRAFTS + 1, device=device))


def scripted_models(script: Script) -> Any:
    """While it lasts, engines are built of models that follow the script."""
    from emberline.engine import build

    load = build.load_models

    def run(*args: Any, **kwargs: Any) -> Any:
        target, drafter = load(*args, **kwargs)
        target.forward = script.speaking(target.forward)
        if drafter is not None:
            drafter.propose = script.proposing(drafter.propose)
            drafter.propose_block = script.drawing(drafter.propose_block)
        return target, drafter

    return mock.patch.object(build, "load_models", run)


def _uniform(seeds: Tensor, places: Tensor, purpose: int) -> Tensor:
    """Numbers in [0, 1), float32, that follow from the integers: a hash's upper bits."""
    x = seeds * 6364136223846793005 + places * 1442695040888963407 + purpose * 2654435761
    x = (x ^ (x >> 29)) * 3202034522624059733
    x = (x ^ (x >> 32)) * 3935559000370003845
    return ((x >> 40) & 0xFFFFFF).float() / 2.0**24
