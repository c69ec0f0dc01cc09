"""One step of the engine: propose, admit, lay out, forward, process, accept, observe.

Prefill, decode and verify are one case: a request forwards known tokens, maybe drafts, and samples
from a trailing window. Everything after the forward is blind to the layout. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.batch import (
    Admission,
    CommittedTokens,
    DraftProposal,
    Draws,
    ForwardBatch,
    StepShape,
    TargetOutput,
    Verdict,
)
from emberline.cache.kv_pool import KVPool
from emberline.config import LayoutKind
from emberline.drafters.base import Drafter
from emberline.engine.propose import propose
from emberline.engine.step_inputs import StepInputs
from emberline.layout import Scored, TokenLayout, Tokens
from emberline.models.target import Target
from emberline.sampling import processors, rejection
from emberline.verify.planner import Planner


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts that a step is made of. The same for every step of an engine."""

    target: Target
    drafter: Drafter | None
    planner: Planner
    draws: Draws
    history: Tensor  # [S, max_model_len] int64, tokens by slot
    page_size: int
    layout: LayoutKind
    eos_ids: frozenset[int]
    kv_pools: tuple[
        KVPool, ...
    ] = ()  # of target and draft: what a broken request leaves is cleared


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step decided, before the host has cut it at stops."""

    layout: TokenLayout
    num_drafted: Tensor  # [B] int64
    draft_ids: Tensor | None  # [B, K] int64; None: nobody drafted
    confidence: Tensor | None  # [B, K] float32
    num_admitted: Tensor  # [B] int64
    verdict: Verdict
    raw_logits: Scored  # [Q, V]
    processed_logits: Scored  # [Q, V]


@torch.inference_mode()
def run_step(parts: StepParts, inputs: StepInputs) -> StepResult:
    """Run one step for B >= 1 requests."""
    shape = choose_depths(parts, inputs.shape)
    proposal = propose(parts.drafter, inputs, shape, parts.history, parts.draws)
    admission = admit(parts, inputs, proposal, shape)
    masks = None
    if inputs.grammar is not None:
        masks = inputs.grammar.masks(proposal, admission.num_admitted)
    layout = lay_out(parts, inputs, admission, shape)
    batch = forward_batch(parts, inputs, proposal, layout)
    output = parts.target.forward(batch)
    raw = Scored(wide(output.logits))
    processed = processors.process(raw, layout, batch.token_ids, inputs.sampling, masks)
    verdict = rejection.accept(
        layout,
        batch.token_ids,
        processed,
        proposal.logits if proposal is not None else None,
        greedy=inputs.greedy,
        coupled=inputs.coupled,
        seeds=inputs.seeds,
        first_positions=inputs.start_positions + inputs.known_lens,
        draws=parts.draws,
    )
    if parts.drafter is not None:
        parts.drafter.observe(committed_tokens(inputs, batch, output, verdict))
    nothing = torch.zeros_like(inputs.known_lens)
    return StepResult(
        layout=layout,
        num_drafted=proposal.num_drafted if proposal is not None else nothing,
        draft_ids=proposal.token_ids if proposal is not None else None,
        confidence=proposal.confidence if proposal is not None else None,
        num_admitted=admission.num_admitted,
        verdict=verdict,
        raw_logits=raw,
        processed_logits=processed,
    )


def wide(logits: Tensor) -> Tensor:
    """Logits in float32 at least: options are applied in no narrower numbers."""
    return logits if logits.dtype == torch.float64 else logits.float()


def choose_depths(parts: StepParts, shape: StepShape) -> StepShape:
    """The shape with limits no wider than the planner wants blocks drawn.

    Settled before anything is drawn, so that what the planner does not want costs no draft work.
    """
    if not any(shape.draft_limits) and parts.drafter is None:
        return shape
    return replace(shape, draft_limits=parts.planner.depths(shape))


def admit(
    parts: StepParts, inputs: StepInputs, proposal: DraftProposal | None, shape: StepShape
) -> Admission:
    """How many of its drafts each request verifies."""
    if proposal is None:
        return Admission(torch.zeros_like(inputs.known_lens), 0)
    return parts.planner.admit(proposal, shape)


def lay_out(
    parts: StepParts, inputs: StepInputs, admission: Admission, shape: StepShape
) -> TokenLayout:
    """Known tokens, then admitted drafts. A verify window is the anchor and its drafts."""
    admitted = admission.num_admitted
    num_draft_tokens = admission.num_draft_tokens
    most_drafts = parts.drafter.max_draft_tokens if parts.drafter is not None else 0
    most_drafts = max(most_drafts, *shape.draft_limits)  # a prediction's blocks may be longer
    return TokenLayout.build(
        inputs.known_lens + admitted,
        torch.where(inputs.samples, admitted + 1, 0),
        scored_lens=inputs.scored_lens + admitted,
        num_tokens=inputs.shape.num_known + num_draft_tokens,
        num_scored=inputs.num_scored_known + num_draft_tokens,
        kind=parts.layout,
        width=1 + most_drafts,
        row_granule=parts.target.row_granule,
        max_query_len=inputs.max_known_len + max(shape.draft_limits),
    )


def forward_batch(
    parts: StepParts, inputs: StepInputs, proposal: DraftProposal | None, layout: TokenLayout
) -> ForwardBatch:
    """Ids, positions and slots of every live token."""
    req, offset = layout.req_of_token, layout.offset_of_token
    if proposal is None:
        token_ids = inputs.known_ids
    else:
        draft_index = offset - inputs.known_lens[req]
        is_draft = draft_index >= 0
        token_ids = proposal.token_ids[req, draft_index.clamp_min(0)]
        token_ids[~is_draft] = inputs.known_ids
    positions = inputs.start_positions[req] + offset
    page = inputs.page_table[req, positions // parts.page_size]
    return ForwardBatch(
        layout=layout,
        token_ids=Tokens(token_ids),
        positions=Tokens(positions),
        slot_mapping=Tokens(page * parts.page_size + positions % parts.page_size),
        page_table=inputs.page_table,
        seq_lens=inputs.start_positions + layout.query_start_loc.diff(),
    )


def committed_tokens(
    inputs: StepInputs, batch: ForwardBatch, output: TargetOutput, verdict: Verdict
) -> CommittedTokens:
    """Known and accepted tokens: their KV is final. Rejected drafts are overwritten later."""
    layout = batch.layout
    req, offset = layout.req_of_token, layout.offset_of_token
    num_final = inputs.known_lens + verdict.num_accepted
    token = (offset < num_final[req]).nonzero().squeeze(-1)
    # The token after the last final one: just emitted, or the prompt's next.
    emitted_end = verdict.emitted_start_loc[1:]
    emits = emitted_end > verdict.emitted_start_loc[:-1]
    if len(verdict.token_ids):
        last_emitted = verdict.token_ids[(emitted_end - 1).clamp_min(0)]
        after = torch.where(emits, last_emitted, inputs.next_known)
    else:
        after = inputs.next_known
    final_req = req[token]
    is_last = offset[token] == num_final[final_req] - 1
    within = batch.token_ids[(token + 1).clamp_max(layout.num_tokens - 1)]
    return CommittedTokens(
        lens=num_final,
        page_table=batch.page_table,
        token_ids=batch.token_ids[token],
        following_ids=torch.where(is_last, after[final_req], within),
        positions=batch.positions[token],
        slot_mapping=batch.slot_mapping[token],
        req_index=inputs.req_index[final_req],
        taps=None if output.taps is None else output.taps[token],
    )
