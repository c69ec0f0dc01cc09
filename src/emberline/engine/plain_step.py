"""A step that the host waits for, from a plan to what it did: whatever device the models are on.

Must not know schedulers, or what becomes of the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from emberline.engine.outcome import Outcome, outcome_of
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.scoring import score_prompts
from emberline.engine.step import StepParts, StepResult, run_step
from emberline.engine.step_inputs import StepInputs, build_inputs
from emberline.engine.trace import BlockTrace, Observer


def run_plain(parts: StepParts, plan: list[ScheduledRequest], observer: Observer | None) -> Outcome:
    """Run the step of a plan and wait for it.

    Args:
        parts: of the engine; its token table is brought up to date.
        plan: of this step alone.
        observer: told of every block that a drafter drew.
    """
    write_history(parts.history, (entry.state for entry in plan))
    inputs = build_inputs(plan, parts.eos_ids, parts.history.device)
    result = run_step(parts, inputs)
    outcome = outcome_of(plan, inputs, result)
    if observer is not None:
        observer(_blocks(plan, inputs, result))
    score_prompts(plan, result)
    return outcome


def write_history(history: Tensor, states: Iterable[RequestState]) -> None:
    """Bring the token table's rows up to date."""
    slots: list[int] = []
    positions: list[int] = []
    token_ids: list[int] = []
    for state in states:
        new = range(state.num_written, len(state.token_ids))
        slots += [state.slot] * len(new)
        positions += new
        token_ids += state.token_ids[state.num_written :]
        state.num_written = len(state.token_ids)
    if token_ids:
        places = torch.tensor([slots, positions], device=history.device)
        history[places[0], places[1]] = torch.tensor(token_ids).to(places.device)


def _blocks(
    plan: list[ScheduledRequest], inputs: StepInputs, result: StepResult
) -> list[BlockTrace]:
    """What the drafter drafted, verified and accepted, by request."""
    says = result.confidence
    columns = zip(
        plan,
        inputs.predicted,
        says.tolist() if says is not None else [()] * len(plan),
        result.num_drafted.tolist(),
        result.num_admitted.tolist(),
        result.verdict.num_accepted.tolist(),
        strict=True,
    )
    return [
        BlockTrace(entry.state.request.request_id, tuple(sure[:drafted]), admitted, accepted)
        for entry, predicted, sure, drafted, admitted, accepted in columns
        if drafted and not predicted
    ]
