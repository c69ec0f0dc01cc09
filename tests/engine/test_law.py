"""The law: three tokens out of the step have the target's joint distribution, to 1e-12.

Every branch of every draw is taken with its exact probability, through the engine's own `run_step`.
Noise that a step looked at and did not use up is carried into the next one, so a draw that reuses
what has already decided something would show.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from emberline.batch import Admission, DraftProposal, Purpose, StepShape
from emberline.config import LayoutKind
from emberline.drafters.base import Drafter
from emberline.engine.request_state import RequestState
from emberline.engine.scheduler import ScheduledRequest
from emberline.engine.step import StepParts, run_step
from emberline.engine.step_inputs import build_inputs
from emberline.types import Request, SamplingParams
from emberline.verify.outlook import Confidences, tokens_per_second
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.doubles import (
    PerRequest,
    Prefix,
    ScriptedDrafter,
    ScriptedPlanner,
    TableTarget,
    random_table,
)
from support.enumeration import Branch, EnumeratingDraws, Noise, freeze
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


def target_law(params: SamplingParams, horizon: int = HORIZON) -> Law:
    """The product of the target's conditionals, options applied by hand."""
    law: Law = {(): 1.0}
    for _ in range(horizon):
        longer: Law = {}
        for output, weight in law.items():
            logits = TARGET_TABLE((*PROMPT, *output)).tolist()
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
    ) -> None:
        self.drafter = drafter
        self.planner = planner
        self.params = params
        self.layout = layout
        self.horizon = horizon  # tokens whose law is looked at
        self.length = length  # of the whole answer

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
                stop_ids=EOS,
                token_ids=tokens,
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
            eos_ids=EOS,
        )
        verdict = run_step(parts, build_inputs(plan, EOS, "cpu")).verdict
        ids, bounds = verdict.token_ids.tolist(), verdict.emitted_start_loc.tolist()
        return [
            (*output, *ids[bounds[index] : bounds[index + 1]])
            for index, output in enumerate(outputs)
        ]

    def limit(self, output: Prefix) -> int:
        """Most drafts that may follow an output."""
        return min(self.drafter.max_draft_tokens, self.length - len(output) - 1)

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
    expected = target_law(speculation.params, speculation.horizon)
    assert largest_error(speculation.law(), expected) < 1e-12


# Drafters by what their draft depends on, and confidences that depend on the drafts before.

WHOLE = random_table(3, seed=9, scale=1.5)


def previous_only(prefix: Prefix) -> torch.Tensor:
    return WHOLE(prefix[-1:])


def position_only(prefix: Prefix) -> torch.Tensor:
    return WHOLE((0,) * len(prefix))


def never_one(prefix: Prefix) -> torch.Tensor:
    return WHOLE(prefix).index_fill(0, torch.tensor([1]), -torch.inf)


def confidence(prefix: Prefix) -> float:
    return (0.95, 0.35, 0.7)[(sum(prefix) + len(prefix)) % 3]


DRAFTERS: dict[str, Callable[[], ScriptedDrafter]] = {
    "markov": lambda: ScriptedDrafter(2, previous_only, confidence=confidence),
    "recurrent": lambda: ScriptedDrafter(2, WHOLE, confidence=confidence),
    "parallel": lambda: ScriptedDrafter(2, position_only),
    "point mass": lambda: ScriptedDrafter(2, None, confidence=confidence),
    "short blocks": lambda: ScriptedDrafter(
        2, WHOLE, confidence=confidence, goes_on=lambda prefix: sum(prefix) % 3 != 1
    ),
    "masked": lambda: ScriptedDrafter(2, never_one, confidence=confidence),
    "three drafts": lambda: ScriptedDrafter(3, WHOLE, confidence=confidence),
    "one draft": lambda: ScriptedDrafter(1, WHOLE, confidence=confidence),
}


def by_confidence(_drafts: Sequence[int], sure: Sequence[float]) -> int:
    """Verify up to the first doubt, but never a lone draft of high confidence."""
    if not sure:
        return 1
    return 0 if sure[0] > 0.9 else next((k for k, c in enumerate(sure) if c < 0.4), len(sure))


def by_first_draft(drafts: Sequence[int], _sure: Sequence[float]) -> int:
    """Causal: whether the second draft is verified looks at the first only."""
    return 2 if drafts[0] == 0 else 1


DIPS = StepCosts(target=((1, 1, 1.0), (1, 2, 1.6), (1, 3, 1.65), (1, 4, 3.0)), draft=())
"""One draft does not pay but two may: where a search past the first decline would go wrong."""
HARD = StepCosts(target=((1, 1, 1.0), (1, 2, 1.5), (1, 3, 2.2), (1, 4, 3.0)), draft=((1, 1, 0.1),))


def experienced(planner: CausalGreedy | LaggedTopK) -> Planner:
    """A planner that has seen some steps, so that its outlook is not the first one."""
    proposal = DraftProposal(
        torch.zeros(1, 3, dtype=torch.int64),
        torch.tensor([3]),
        None,
        torch.tensor([[0.9, 0.8, 0.3]]),
    )
    for serial in (0, -1, 0):
        planner.admit(proposal, StepShape(1, 1, (serial,), (3,)))
    return planner


PLANNERS: dict[str, Planner] = {
    "verify all": VerifyAll(),
    "threshold": Threshold(0.5),
    "causal greedy": CausalGreedy(DIPS),
    "causal greedy, dear": experienced(CausalGreedy(HARD)),
    "lagged top-k": experienced(LaggedTopK(DIPS)),
    "lagged top-k, dear": experienced(LaggedTopK(HARD)),
    "by confidence": ScriptedPlanner(by_confidence),
    "by first draft": ScriptedPlanner(by_first_draft),
}

Rule = Literal["rejection", "coupled"]
RULES: tuple[Rule, ...] = ("rejection", "coupled")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_three_tokens_have_the_targets_law(drafter: str, planner: str, rule: Rule) -> None:
    params = SamplingParams(accept=rule)
    assert_lawful(Speculation(DRAFTERS[drafter](), PLANNERS[planner], params))


OPTIONS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.4),
    "bias": SamplingParams(logit_bias={0: 1.5, 2: -1.0}),
    "minimum": SamplingParams(min_tokens=2),
    "penalties": SamplingParams(
        repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=-0.5
    ),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=2,
        top_p=0.95,
        min_p=0.05,
        logit_bias={1: -0.3},
        min_tokens=1,
        repetition_penalty=0.8,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_holds_at_every_position(options: str, rule: Rule) -> None:
    params = replace(OPTIONS[options], accept=rule)
    assert_lawful(Speculation(DRAFTERS["recurrent"](), PLANNERS["threshold"], params))


def test_options_change_the_law_they_are_tested_with() -> None:
    plain = target_law(SamplingParams())
    for name, params in OPTIONS.items():
        assert largest_error(target_law(params), plain) > 1e-2, name


@pytest.mark.parametrize("rule", RULES)
def test_the_law_does_not_know_the_layout(rule: Rule) -> None:
    params = SamplingParams(accept=rule)
    speculations = [
        Speculation(DRAFTERS["recurrent"](), Threshold(0.5), params, layout)
        for layout in ("compact", "static")
    ]
    compact, static = (speculation.law() for speculation in speculations)
    assert compact == static


def test_greedy_has_one_outcome() -> None:
    params = SamplingParams(temperature=0)
    law = Speculation(DRAFTERS["recurrent"](), VerifyAll(), params).law()
    output: Prefix = ()
    for _ in range(HORIZON):
        output = (*output, int(TARGET_TABLE((*PROMPT, *output)).argmax()))
    assert law == {output: 1.0}


# The test can fail.


def peeking(drafts: Sequence[int], _sure: Sequence[float]) -> int:
    """Not causal: a draft is verified if it is token 0."""
    return next((k for k, token in enumerate(drafts) if token != 0), len(drafts))


def test_a_planner_that_looks_at_the_token_it_admits_breaks_the_law() -> None:
    speculation = Speculation(
        DRAFTERS["recurrent"](), ScriptedPlanner(peeking), SamplingParams(accept="rejection")
    )
    assert largest_error(speculation.law(), target_law(speculation.params)) > 1e-2


class SearchesOn(CausalGreedy):
    """What Algorithm 1 must not be: the best of all budgets for the survivals of this very step.

    Whether draft 0 is in then depends on the confidence of draft 1, and that knows draft 0.
    """

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        ranked = Confidences.of(proposal).ranked()
        budget = int(tokens_per_second(ranked, shape, self._costs).argmax())
        return Admission(torch.from_numpy(ranked.lens(budget)), budget)


def test_a_search_past_the_first_decline_breaks_the_law() -> None:
    """The paper's appendix A: the stop is what keeps the greedy schedule from peeking."""
    speculation = Speculation(
        DRAFTERS["recurrent"](), SearchesOn(DIPS), SamplingParams(accept="rejection")
    )
    assert largest_error(speculation.law(), target_law(speculation.params)) > 1e-3


# Planners remember confidences of earlier blocks. What one block drafted in vain the next drafts
# again: it must not be known beforehand.

ALL_OR_NOTHING = StepCosts(target=((1, 1, 1.0), (1, 9, 1.0)), draft=((1, 1, 1.94), (1, 4, 1.94)))
"""Verifying is free, drafting is dear: whether to draft at all hangs on what was remembered."""


def tells_the_last_token(prefix: Prefix) -> float:
    return 0.95 if prefix[-1] != 0 else 0.55


class SameNoiseAgain(ScriptedDrafter):
    """Draws a position of every block with the same noise."""

    def propose(self, context):  # type: ignore[no-untyped-def]
        purposes = torch.full_like(context.purposes, int(Purpose.DRAFT))
        return super().propose(replace(context, purposes=purposes))


def remembering(drafter: type[ScriptedDrafter], planner: Planner) -> Speculation:
    return Speculation(
        drafter(4, position_only, confidence=tells_the_last_token),
        planner,
        SamplingParams(accept="rejection"),
        length=8,
    )


@pytest.mark.parametrize("planner", [CausalGreedy(ALL_OR_NOTHING), LaggedTopK(ALL_OR_NOTHING)])
def test_what_a_planner_remembers_says_nothing_of_the_drafts_to_come(planner: Planner) -> None:
    assert_lawful(remembering(ScriptedDrafter, planner))


def test_noise_that_comes_again_breaks_the_law() -> None:
    speculation = remembering(SameNoiseAgain, CausalGreedy(ALL_OR_NOTHING))
    expected = target_law(speculation.params, speculation.horizon)
    assert largest_error(speculation.law(), expected) > 1e-6


def test_coupled_acceptance_is_lawful_whatever_the_planner_looked_at() -> None:
    speculation = Speculation(
        DRAFTERS["recurrent"](), ScriptedPlanner(peeking), SamplingParams(accept="coupled")
    )
    assert_lawful(speculation)


class TellsWrongQ(ScriptedDrafter):
    """Hands over other logits than it drew from."""

    def propose(self, context):  # type: ignore[no-untyped-def]
        proposal = super().propose(context)
        assert proposal.logits is not None
        return replace(proposal, logits=proposal.logits / 1.1)


def test_a_drafter_that_misstates_q_breaks_the_law() -> None:
    speculation = Speculation(
        TellsWrongQ(2, WHOLE), VerifyAll(), SamplingParams(accept="rejection")
    )
    assert largest_error(speculation.law(), target_law(speculation.params)) > 1e-3
