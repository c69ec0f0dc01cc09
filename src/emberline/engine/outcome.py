"""What a step did, on the host: the one form in which synchronous and overlapped steps come back.

Owns that form, and who of a step has failed. Must not know how requests go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from emberline.engine.request_state import RequestState
from emberline.engine.scheduler import ScheduledRequest
from emberline.engine.scoring import Records, annotate, score_emitted
from emberline.engine.step import StepResult
from emberline.engine.step_inputs import StepInputs
from emberline.layout import Scored
from emberline.types import NO_TOKEN_ERROR, StepCounts
from emberline.verify.planner import DevicePlanner

BROKEN_ERROR = "no token can be drawn: the model produced NaN or infinite logits"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One entry a request of the step's plan, before runs are cut at stops."""

    emitted: list[list[int]]  # ids, in order
    counts: list[StepCounts]
    records: Records  # log-probabilities of what was emitted, where they were asked for
    broken: dict[int, str]  # requests from whose logits nothing can be drawn, and why


class Flight(Protocol):
    """A step on its way."""

    @property
    def plan(self) -> Sequence[ScheduledRequest]:
        """What it runs."""
        ...

    def read(self) -> Outcome:
        """Wait until it has run. Once a flight."""
        ...


class Runner(Protocol):
    """Runs steps without waiting for them. Steps run in the order in which they are launched."""

    planner: DevicePlanner  # to be changed while nothing is in flight

    def takes(self, state: RequestState) -> bool:
        """Whether it can run a request's steps, once its prompt is scored if that is asked for."""
        ...

    def launch(self, plan: Sequence[ScheduledRequest]) -> Flight:
        """Start a step of B >= 1 requests, all of which it takes.

        The requests' states are those before the step, but for what is still on its way.
        """
        ...


def outcome_of(plan: Sequence[ScheduledRequest], inputs: StepInputs, result: StepResult) -> Outcome:
    """That of a synchronous step."""
    emitted = result.verdict.token_ids.tolist()
    bounds = result.verdict.emitted_start_loc.tolist()
    runs = [emitted[begin:end] for begin, end in pairwise(bounds)]
    counts = zip(
        result.num_drafted.tolist(),
        result.num_admitted.tolist(),
        result.verdict.num_accepted.tolist(),
        map(len, runs),
        map(bool, inputs.predicted),
        strict=True,
    )
    return Outcome(
        emitted=runs,
        counts=list(counts),
        records=annotate(plan, result, score_emitted(plan, result)),
        broken=_broken(result),
    )


def _broken(result: StepResult) -> dict[int, str]:
    """Requests whose logits are no distribution fail, whoever stands beside them; and why.

    NaN or an infinity from the model, or options that leave no token.
    """
    errors: dict[int, str] = {}
    if result.processed_logits is not result.raw_logits:
        errors = dict.fromkeys(_no_distribution(result, result.processed_logits), NO_TOKEN_ERROR)
    return errors | dict.fromkeys(_no_distribution(result, result.raw_logits), BROKEN_ERROR)


def _no_distribution(result: StepResult, logits: Scored) -> list[int]:
    """Requests of which some row has no finite best logit.

    Only rows that something was read from count: what the target says after a rejected draft is
    nobody's.
    """
    fine = torch.isfinite(logits.amax(-1))
    if bool(fine.all()):
        return []
    layout = result.layout
    bad = (~fine).nonzero().squeeze(-1)
    req = torch.searchsorted(layout.scored_start_loc[1:].contiguous(), bad, right=True)
    emitted = torch.isin(bad, result.verdict.scored_index)
    wrong: list[int] = req[emitted | (bad < layout.window_start[req])].tolist()
    return wrong
