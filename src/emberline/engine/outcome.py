"""What a step did, on the host: the one form in which synchronous and overlapped steps come back.

Owns that form, and who of a step has failed. Must not know how requests go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.engine.logprob_run import Records, StepRecords
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import Ints, RequestState, step_codes
from emberline.engine.scoring import annotate, score_emitted
from emberline.engine.step import StepResult
from emberline.engine.step_inputs import StepInputs
from emberline.layout import Scored
from emberline.types import NO_TOKEN_ERROR, StepCounts
from emberline.verify.planner import DevicePlanner

BROKEN_ERROR = "no token can be drawn: the model produced NaN or infinite logits"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the B requests of a step's plan did, before runs are cut at stops. N tokens came."""

    token_ids: Ints  # [N], request-major
    start_loc: Ints  # [B + 1]
    num_drafted: Ints  # [B]
    num_admitted: Ints  # [B]
    num_accepted: Ints  # [B]
    broken: dict[int, str]  # requests from whose logits nothing can be drawn, and why
    records: Records | StepRecords | None = None  # of what was emitted; None: nobody asked
    predicted: NDArray[np.bool_] | None = None  # [B] whose drafts were its own prediction; None: no

    def runs(self) -> list[list[int]]:
        """Emitted ids of each request."""
        ids = self.token_ids.tolist()
        return [ids[begin:end] for begin, end in pairwise(self.start_loc.tolist())]

    def record_runs(self) -> Records:
        """Records of each request's, where asked for."""
        if self.records is None:
            return [None] * len(self.num_drafted)
        return self.records.runs() if isinstance(self.records, StepRecords) else self.records

    def counts(self) -> list[StepCounts]:
        """Of each request."""
        predicted = repeat(False) if self.predicted is None else self.predicted.tolist()
        columns = (self.num_drafted, self.num_admitted, self.num_accepted, np.diff(self.start_loc))
        return list(zip(*(column.tolist() for column in columns), predicted))  # noqa: B905

    def codes(self) -> Ints:
        """[B], as `step_codes` makes them; without predictions."""
        emitted = self.start_loc[1:] - self.start_loc[:-1]
        return step_codes(self.num_drafted, self.num_admitted, self.num_accepted, emitted)


def spread(count: int, parts: Sequence[tuple[Sequence[int], Outcome]]) -> Outcome:
    """That of a plan of which parts ran by themselves. Nothing came of the rest.

    Args:
        count: B.
        parts: the places of each one's requests, and what those did.
    """
    runs: list[list[int]] = [[] for _ in range(count)]
    numbers = np.zeros((3, count), dtype=np.int64)
    records: Records = [None] * count
    broken: dict[int, str] = {}
    for places, outcome in parts:
        at = np.array(places, dtype=np.int64)
        numbers[:, at] = outcome.num_drafted, outcome.num_admitted, outcome.num_accepted
        broken |= {places[i]: error for i, error in outcome.broken.items()}
        for place, run in zip(places, outcome.runs(), strict=True):
            runs[place] = run
        for place, record in zip(places, outcome.record_runs(), strict=True):
            records[place] = record
    return Outcome(
        token_ids=np.array([i for run in runs for i in run], dtype=np.int64),
        start_loc=np.cumsum([0, *map(len, runs)]),
        num_drafted=numbers[0],
        num_admitted=numbers[1],
        num_accepted=numbers[2],
        broken=broken,
        records=records,
    )


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

    def get_ready(self) -> bool:
        """While nothing runs: do one thing that steps would wait for; False: there is none."""
        ...

    def launch(self, plan: Sequence[ScheduledRequest]) -> Flight:
        """Start a step of B >= 1 requests, all of which it takes.

        The requests' states are those before the step, but for what is still on its way.
        """
        ...


def outcome_of(plan: Sequence[ScheduledRequest], inputs: StepInputs, result: StepResult) -> Outcome:
    """That of a synchronous step."""
    verdict = result.verdict
    return Outcome(
        token_ids=verdict.token_ids.cpu().numpy(),
        start_loc=verdict.emitted_start_loc.cpu().numpy(),
        num_drafted=result.num_drafted.cpu().numpy(),
        num_admitted=result.num_admitted.cpu().numpy(),
        num_accepted=verdict.num_accepted.cpu().numpy(),
        broken=_broken(result),
        records=annotate(plan, result, score_emitted(plan, result)),
        predicted=np.array([bool(ids) for ids in inputs.predicted]),
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
