"""The joint law of an engine's first tokens, every branch of every draw taken.

Through the engine's own `run_step`, with exact probabilities. Noise that a step looked at and did
not use up is carried into the next one, so a draw that reuses what has already decided something
would show.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch

from emberline.batch import StepShape
from emberline.config import LayoutKind
from emberline.drafters.base import Drafter
from emberline.engine.plan import ScheduledRequest
from emberline.engine.prediction import Prediction
from emberline.engine.request_state import RequestState
from emberline.engine.step import StepParts, run_step
from emberline.engine.step_inputs import build_inputs
from emberline.types import Request, SamplingParams
from emberline.verify.planner import Planner

from support.doubles import PerRequest, Prefix, TableTarget, random_table
from support.enumeration import Branch, EnumeratingDraws, Noise, freeze
from support.grammars import Allowed, RuleMatcher
from support.reference_sampling import processed_by_hand

PROMPT: Prefix = (2, 0)
HORIZON = 3
PAGE = 16
EOS = frozenset({2})
TARGET_TABLE = random_table(3, seed=5)

Law = dict[Prefix, float]


def softmax(row: list[float]) -> list[float]:
    values: list[float] = torch.tensor(row, dtype=torch.float64).softmax(-1).tolist()
    return values


def anything(_output: Prefix) -> set[int]:
    return {0, 1, 2}


def target_law(params: SamplingParams, horizon: int = HORIZON, allowed: Allowed = anything) -> Law:
    """The product of the target's conditionals, options applied by hand."""
    law: Law = {(): 1.0}
    for _ in range(horizon):
        longer: Law = {}
        for output, weight in law.items():
            logits = TARGET_TABLE((*PROMPT, *output)).tolist()
            may = allowed(output)
            logits = [x if i in may else -math.inf for i, x in enumerate(logits)]
            row = processed_by_hand(logits, params, PROMPT, output, EOS)
            for token, prob in enumerate(softmax(row)):
                longer[(*output, token)] = weight * prob
        law = longer
    return law


@dataclass(frozen=True)
class Reached:
    """Where some of the branches stand between two steps, and how likely that is."""

    output: Prefix
    noise: Noise
    planner: Planner  # with what it remembers
    weight: float

    @property
    def future(self) -> object:
        """All that what comes next depends on."""
        noise = freeze(self.noise, len(PROMPT) + len(self.output))
        return self.output, noise, pickle.dumps(self.planner)


class Speculation:
    """Runs one step for many branches at once. They are worlds apart: no planner sees two."""

    def __init__(
        self,
        drafter: Drafter,
        planner: Planner,
        params: SamplingParams,
        layout: LayoutKind = "compact",
        horizon: int = HORIZON,
        length: int = HORIZON,
        allowed: Allowed | None = None,
        prediction: Prefix = (),
    ) -> None:
        self.drafter = drafter
        self.planner = planner
        self.params = params
        self.layout = layout
        self.horizon = horizon  # tokens whose law is looked at
        self.length = length  # of the whole answer
        self.allowed = allowed  # what a grammar lets come after an output; nothing ends it
        self.prediction = prediction
        self.eos = EOS if allowed is None else frozenset[int]()

    def step(
        self, outputs: list[Prefix], branches: list[Branch], planners: list[Planner]
    ) -> list[Prefix]:
        """The outputs after one step; everything before the anchor is in KV already."""
        count = len(outputs)
        target = TableTarget(TARGET_TABLE, 3, (count + 1) * PAGE, PAGE)
        history = torch.zeros(count, PAGE, dtype=torch.int64)
        plan = []
        for index, output in enumerate(outputs):
            tokens = [*PROMPT, *output]
            history[index, : len(tokens)] = torch.tensor(tokens)
            at = (index + 1) * PAGE
            target.slots[at : at + len(tokens) - 1] = torch.tensor(tokens[:-1])
            state = RequestState(
                request=Request(str(index), PROMPT, self.params),
                text=None,
                seed=index,
                length_limit=PAGE,
                stop_ids=self.eos,
                token_ids=tokens,
                matcher=self.allowed and RuleMatcher(self.allowed, 3, output),
                prediction=self.predicted(output),
                num_computed=len(tokens) - 1,
                pages=[index + 1],
                slot=index,
            )
            plan.append(ScheduledRequest(state, 1, self.limit(output), 1, samples=True))
        parts = StepParts(
            target=target,
            drafter=self.drafter,
            planner=PerRequest(planners),
            draws=EnumeratingDraws(branches),
            history=history,
            page_size=PAGE,
            layout=self.layout,
            eos_ids=self.eos,
        )
        verdict = run_step(parts, build_inputs(plan, self.eos, torch.device("cpu"))).verdict
        ids, bounds = verdict.token_ids.tolist(), verdict.emitted_start_loc.tolist()
        return [
            (*output, *ids[bounds[index] : bounds[index + 1]])
            for index, output in enumerate(outputs)
        ]

    def limit(self, output: Prefix) -> int:
        """Most drafts that may follow an output."""
        prediction = self.predicted(output)
        ahead = prediction.ahead(self.length) if prediction is not None else ()
        return min(len(ahead) or self.drafter.max_draft_tokens, self.length - len(output) - 1)

    def predicted(self, output: Prefix) -> Prediction | None:
        """Where an output stands in the prediction."""
        if not self.prediction:
            return None
        prediction = Prediction(self.prediction)
        for token in output:
            prediction.push(token)
        return prediction

    def law(self) -> Law:
        """The joint law of the first tokens."""
        law: dict[Prefix, float] = defaultdict(float)
        frontier = [Reached((), {}, self.planner, 1.0)]
        while frontier:
            merged: dict[object, Reached] = {}
            for end in self._ends(frontier):
                if len(end.output) >= self.horizon:
                    law[end.output[: self.horizon]] += end.weight
                    continue
                before = merged[end.future].weight if end.future in merged else 0.0
                merged[end.future] = replace(end, weight=before + end.weight)
            frontier = list(merged.values())
        return law

    def _ends(self, starts: list[Reached]) -> list[Reached]:
        """Every end of one step from every start.

        Starts that draw equally deep run together: a drafter draws as deep for all, and a branch
        must find the same draws whenever it is run.
        """
        by_depth: dict[int, list[Reached]] = defaultdict(list)
        for start in starts:
            shape = StepShape(1, 1, (0,), (self.limit(start.output),))
            by_depth[deepcopy(start.planner).depths(shape)[0]].append(start)
        return [end for group in by_depth.values() for end in self._ends_together(group)]

    def _ends_together(self, starts: list[Reached]) -> list[Reached]:
        """Found by following one branch after another."""
        ends = []
        todo: list[tuple[int, list[int]]] = [(index, []) for index in range(len(starts))]
        while todo:
            branches = [Branch(dict(starts[index].noise), script) for index, script in todo]
            planners = [deepcopy(starts[index].planner) for index, _ in todo]
            outputs = self.step([starts[index].output for index, _ in todo], branches, planners)
            following = []
            for (index, _), branch, output, planner in zip(
                todo, branches, outputs, planners, strict=True
            ):
                weight = starts[index].weight * branch.probability
                ends.append(Reached(output, branch.noise, planner, weight))
                following += [(index, script) for script in branch.others()]
            todo = following
        return ends


def largest_error(law: Law, expected: Law) -> float:
    assert set(law) <= set(expected)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(law.get(output, 0.0) - prob) for output, prob in expected.items())


def assert_lawful(speculation: Speculation) -> None:
    expected = target_law(speculation.params, speculation.horizon, speculation.allowed or anything)
    assert largest_error(speculation.law(), expected) < 1e-12
