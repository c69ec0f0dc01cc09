"""The law: three tokens out of the step have the target's joint distribution, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch

from emberline.batch import Admission, DraftProposal, Purpose, StepShape
from emberline.types import SamplingParams
from emberline.verify.outlook import Confidences, tokens_per_second
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.doubles import Prefix, ScriptedDrafter, ScriptedPlanner, random_table
from support.law import (
    HORIZON,
    PROMPT,
    TARGET_TABLE,
    Speculation,
    assert_lawful,
    largest_error,
    target_law,
)

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
        shape = StepShape(1, 1, (serial,), (3,))
        planner.depths(shape)
        planner.admit(proposal, shape)
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
        assert proposal.confidence is not None
        now = Confidences.of(proposal.confidence, proposal.num_drafted)
        self._outlook.learn(shape, now)
        ranked = now.ranked()
        budget = int(tokens_per_second(ranked, shape, self._prices).argmax())
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


# Under a grammar: the law is the target's, masked by what may follow the output so far.


def never_twice_in_a_row(output: Prefix) -> set[int]:
    return {0, 1, 2} - set(output[-1:])


def depends_on_all(output: Prefix) -> set[int]:
    """Sometimes one id only, sometimes two."""
    first = (sum(output) + len(output)) % 3
    return {first} if first == 2 else {first, (first + 1) % 3}


class KnowsNoMasks(ScriptedDrafter):
    """Drafts whatever it likes: what may not come is found out afterwards."""

    def propose(self, context):  # type: ignore[no-untyped-def]
        return super().propose(replace(context, constraint=None))


RULED_DRAFTERS = {
    "masked": DRAFTERS["recurrent"],
    "point mass": DRAFTERS["point mass"],
    "knows no masks": lambda: KnowsNoMasks(2, WHOLE, confidence=confidence),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("planner", ["verify all", "threshold", "causal greedy", "lagged top-k"])
@pytest.mark.parametrize("allowed", [never_twice_in_a_row, depends_on_all])
@pytest.mark.parametrize("drafter", RULED_DRAFTERS)
def test_a_grammar_masks_the_law(
    drafter: str, allowed: Callable[[Prefix], set[int]], planner: str, rule: Rule
) -> None:
    params = SamplingParams(accept=rule, temperature=0.8, presence_penalty=0.4)
    assert_lawful(
        Speculation(RULED_DRAFTERS[drafter](), PLANNERS[planner], params, allowed=allowed)
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prediction", [(0, 1, 2, 0), (2, 2, 1)])
@pytest.mark.parametrize("planner", ["verify all", "threshold", "causal greedy"])
def test_a_prediction_changes_no_law(planner: str, prediction: Prefix, rule: Rule) -> None:
    """Drafts come now from the prediction, now from the drafter beside it."""
    speculation = Speculation(
        DRAFTERS["recurrent"](),
        PLANNERS[planner],
        SamplingParams(accept=rule),
        prediction=prediction,
    )
    assert_lawful(speculation)


def test_a_prediction_under_a_grammar() -> None:
    speculation = Speculation(
        DRAFTERS["recurrent"](),
        VerifyAll(),
        SamplingParams(accept="rejection"),
        allowed=never_twice_in_a_row,
        prediction=(0, 1, 1, 2),
    )
    assert_lawful(speculation)


BANS = {
    "allowed ids": SamplingParams(allowed_token_ids=[0, 2]),
    "a bad word": SamplingParams(bad_words=[[1]]),
    "a bad pair": SamplingParams(bad_words=[[0, 1], [2, 2]]),
    "a bad triple": SamplingParams(bad_words=[[0, 0, 0], [1, 2, 0]]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ban", BANS)
def test_bans_hold_at_every_position(ban: str, rule: Rule) -> None:
    params = replace(BANS[ban], accept=rule, temperature=0.7)
    assert largest_error(target_law(params), target_law(SamplingParams(temperature=0.7))) > 1e-3
    assert_lawful(Speculation(DRAFTERS["recurrent"](), PLANNERS["threshold"], params))
