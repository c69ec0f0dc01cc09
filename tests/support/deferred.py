"""A runner that computes at once and is read later: an overlapped engine without a device.

It keeps its own copy of every request, as a device keeps its slots: what the engine knows of a
request with a step in flight is one step old.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch

from emberline.engine.engine import Engine
from emberline.engine.outcome import Outcome, outcome_of, spread
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.step import StepParts, run_step
from emberline.engine.step_inputs import build_inputs


@dataclass
class DeferredFlight:
    plan: Sequence[ScheduledRequest]
    outcome: Outcome

    def read(self) -> Outcome:
        return self.outcome


@dataclass
class DeferredRunner:
    """Takes every request whose options look at nothing but the tokens."""

    engine: Engine
    copies: dict[int, RequestState] = field(default_factory=dict)  # by slot
    num_launched: int = 0
    num_dead: int = 0  # entries launched for requests that had ended

    @property
    def parts(self) -> StepParts:
        return self.engine.parts

    def takes(self, state: RequestState) -> bool:
        return not (state.matcher or state.prediction)

    def get_ready(self) -> bool:
        return False

    def launch(self, plan: Sequence[ScheduledRequest]) -> DeferredFlight:
        self.num_launched += 1
        entries = [self._own(entry) for entry in plan]
        live = [i for i, entry in enumerate(entries) if entry.state.num_remaining > 0]
        self.num_dead += len(plan) - len(live)
        outcome = self._run([entries[i] for i in live]) if live else None
        parts = [] if outcome is None else [(live, outcome)]
        return DeferredFlight(list(plan), spread(len(plan), parts))

    def _own(self, entry: ScheduledRequest) -> ScheduledRequest:
        state = entry.state
        if not state.placed:
            assert not state.num_unread
            own = self.copies[state.slot] = copy(state)
            own.token_ids = list(state.token_ids)
        own = self.copies[state.slot]
        assert own.serial == state.serial
        own.pages = list(state.pages)
        limit = max(0, min(entry.draft_limit, own.num_remaining - 1))
        return replace(entry, state=own, draft_limit=limit)

    def _run(self, entries: list[ScheduledRequest]) -> Outcome:
        for entry in entries:
            own = entry.state
            row = self.parts.history[own.slot]
            row[: len(own.token_ids)] = torch.tensor(own.token_ids)
        inputs = build_inputs(entries, self.parts.eos_ids, self.parts.history.device)
        outcome = outcome_of(entries, inputs, run_step(self.parts, inputs))
        for entry, run, counts in zip(entries, outcome.runs(), outcome.counts(), strict=True):
            entry.state.num_computed += entry.num_known + counts[2]
            entry.state.token_ids += run
            # Nobody looks at its text here; a device knows no stops.
        return outcome


def overlapped(engine: Engine, *, overlap: bool = True) -> DeferredRunner:
    """Have an engine's steps run by such a runner."""
    runner = DeferredRunner(engine)
    engine.use_runner(runner, overlap=overlap)
    return runner
