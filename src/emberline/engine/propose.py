"""The drafts of a step: the drafter's, those of predicted outputs, what a grammar leaves of them.

Owns which drafts a request gets, and the one proposal that all of them make. Must not know how
drafts are judged.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from emberline.batch import DraftContext, DraftProposal, Draws, StepShape
from emberline.drafters.base import Drafter
from emberline.engine.step_inputs import StepInputs
from emberline.sampling.keys import block_purposes


def propose(
    drafter: Drafter | None, inputs: StepInputs, shape: StepShape, history: Tensor, draws: Draws
) -> DraftProposal | None:
    """Drafts of all B requests, none for those that do not draft; None if nobody does.

    Args:
        drafter: drafts for every request that has no predicted tokens of its own in this step.
        inputs: of the step.
        shape: of the step, with the depths that the planner wants.
        history: [S, max_model_len] int64, tokens by slot.
        draws: the source of randomness.
    """
    depths = shape.draft_limits
    if not max(depths):
        return None
    predicted = [ids[:depth] for ids, depth in zip(inputs.predicted, depths, strict=True)]
    own = [i for i, depth in enumerate(depths) if depth and not predicted[i]]
    proposal = None
    if drafter is not None and own:
        proposal = _of_drafter(drafter, inputs, depths, own, history, draws)
    if any(predicted):
        proposal = _with_predicted(inputs, proposal, predicted)
    if proposal is not None and inputs.grammar is not None:
        proposal = replace(proposal, num_drafted=inputs.grammar.cut(proposal))
    return proposal


def _of_drafter(
    drafter: Drafter,
    inputs: StepInputs,
    depths: tuple[int, ...],
    own: list[int],
    history: Tensor,
    draws: Draws,
) -> DraftProposal:
    """What the drafter drafts for the requests `own`; [B, ...] all the same."""
    device = inputs.known_lens.device
    depth = torch.tensor(depths, dtype=torch.int64, device=device)
    some = torch.tensor(own, dtype=torch.int64, device=device)
    everyone = len(own) == len(depths)

    def of(x: Tensor) -> Tensor:
        return x if everyone else x[some]

    proposal = _sane(
        drafter.propose(
            DraftContext(
                num_drafts=min(max(depths[i] for i in own), drafter.max_draft_tokens),
                req_index=of(inputs.req_index),
                # A drafting request has one known token, its anchor.
                anchors=of(inputs.known_ids[torch.cumsum(inputs.known_lens, 0) - 1]),
                positions=of(inputs.start_positions),
                page_table=of(inputs.page_table),
                history=history,
                temperatures=of(inputs.temperatures),
                seeds=of(inputs.seeds),
                purposes=of(block_purposes(inputs.coupled, inputs.start_positions)),
                need_logits=inputs.need_draft_logits,
                draws=draws,
                constraint=inputs.grammar.of(own) if inputs.grammar is not None else None,
            )
        )
    )

    def spread(x: Tensor) -> Tensor:
        return x if everyone else x.new_zeros((len(depths), *x.shape[1:])).index_copy_(0, some, x)

    return DraftProposal(
        token_ids=spread(proposal.token_ids),
        num_drafted=torch.minimum(spread(proposal.num_drafted), depth),
        logits=None if proposal.logits is None else spread(proposal.logits),
        confidence=None if proposal.confidence is None else spread(proposal.confidence),
    )


def _sane(proposal: DraftProposal) -> DraftProposal:
    """The proposal up to each request's first draft whose logits are not finite.

    A ratio to a q that is NaN would accept anything: such a draft was drawn from nothing.
    """
    if proposal.logits is None:
        return proposal
    finite = torch.isfinite(proposal.logits.amax(-1)).long().cumprod(-1).sum(-1)
    return replace(proposal, num_drafted=torch.minimum(proposal.num_drafted, finite))


def _with_predicted(
    inputs: StepInputs, proposal: DraftProposal | None, predicted: list[tuple[int, ...]]
) -> DraftProposal:
    """The proposal with the rows of predicted drafts filled in. Each of those is a point mass.

    They have a confidence unless the drafter's drafts beside them have none.
    """
    device = inputs.known_lens.device
    num_reqs, longest = len(predicted), max(map(len, predicted))
    if proposal is None:
        nothing = torch.zeros((num_reqs, 0), dtype=torch.int64, device=device)
        proposal = DraftProposal(nothing, nothing.sum(-1), None, nothing.float())
    token_ids, num_drafted = _widen(proposal.token_ids, longest), proposal.num_drafted.clone()
    logits = None if proposal.logits is None else _widen(proposal.logits, longest)
    confidence = None if proposal.confidence is None else _widen(proposal.confidence, longest)
    for req, ids in enumerate(predicted):
        if not ids:
            continue
        drafts = torch.tensor(ids, dtype=torch.int64, device=device)
        token_ids[req, : len(ids)] = drafts
        num_drafted[req] = len(ids)
        if logits is not None:
            logits[req, : len(ids)] = -torch.inf
            logits[req, torch.arange(len(ids), device=device), drafts] = 0.0
        if confidence is not None:
            confidence[req, : len(ids)] = inputs.shape.chance(req)
    return DraftProposal(token_ids, num_drafted, logits, confidence)


def _widen(x: Tensor, width: int) -> Tensor:
    """A copy with at least `width` columns, zeros behind. [B, K, ...] -> [B, >= width, ...]."""
    more = x.new_zeros((x.shape[0], max(0, width - x.shape[1]), *x.shape[2:]))
    return torch.cat((x, more), dim=1)
