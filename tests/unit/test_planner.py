"""Verify lengths: cumulative, bounded, and blind to the token they admit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from emberline.batch import Admission, DraftProposal, StepShape
from emberline.verify import outlook
from emberline.verify.outlook import (
    LAG,
    PROBE_EVERY,
    STILL_STEPS,
    Confidences,
    Outlook,
    Ranked,
    highest,
    tokens_per_second,
    tokens_per_second_by_depth,
)
from emberline.verify.planner import (
    CausalGreedy,
    DevicePlan,
    DevicePlanner,
    LaggedTopK,
    Planner,
    Threshold,
    VerifyAll,
)
from emberline.verify.prices import Padding, Prices, in_granules_of
from emberline.verify.step_cost import StepCosts

NAN = float("nan")


def propose(
    confidence: list[list[float]] | None, num_drafted: list[int], width: int = 4
) -> DraftProposal:
    return DraftProposal(
        token_ids=torch.zeros(len(num_drafted), width, dtype=torch.int64),
        num_drafted=torch.tensor(num_drafted),
        logits=None,
        confidence=None if confidence is None else torch.tensor(confidence),
    )


def admitted(planner: Planner, proposal: DraftProposal, limits: list[int]) -> list[int]:
    shape = StepShape(len(limits), len(limits), tuple(range(len(limits))), tuple(limits))
    assert planner.depths(shape) == tuple(limits)
    drawn = torch.minimum(proposal.num_drafted, torch.tensor(limits))
    admission = planner.admit(replace(proposal, num_drafted=drawn), shape)
    lens: list[int] = admission.num_admitted.tolist()
    assert admission.num_draft_tokens == sum(lens)
    return lens


def test_verify_all_stops_at_the_limit_and_at_the_drafts() -> None:
    proposal = propose([[0.0] * 4] * 4, [4, 4, 2, 0])
    assert admitted(VerifyAll(), proposal, [4, 1, 3, 4]) == [4, 1, 2, 0]


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ([0.9, 0.2, 0.95, 0.9], 1),  # the prefix rule is cumulative: 0.95 is not looked at alone
        ([0.8, 0.8, 0.8, 0.8], 3),  # 0.8, 0.64, 0.512, 0.4096
        ([0.5, 1.0, 1.0, 1.0], 4),  # at the threshold is in
        ([0.4999, 1.0, 1.0, 1.0], 0),
        ([1.0, 1.0, 1.0, 1.0], 4),
        ([0.0, 1.0, 1.0, 1.0], 0),
        ([1.0, NAN, 1.0, 1.0], 1),
        ([NAN, NAN, NAN, NAN], 0),
    ],
)
def test_threshold_keeps_the_prefix_that_survives(confidence: list[float], expected: int) -> None:
    assert admitted(Threshold(0.5), propose([confidence], [4]), [4]) == [expected]


def test_threshold_ends() -> None:
    proposal = propose([[NAN, 0.0, 0.3, 0.1], [1.0, 1.0, 0.999, 1.0]], [4, 4])
    assert admitted(Threshold(0.0), proposal, [4, 4]) == [4, 4]
    assert admitted(Threshold(1.0), proposal, [4, 4]) == [0, 2]


def test_threshold_respects_limits_and_drafts() -> None:
    proposal = propose([[0.9] * 4] * 3, [4, 2, 0])
    assert admitted(Threshold(0.1), proposal, [3, 4, 4]) == [3, 2, 0]


def test_threshold_verifies_all_without_confidence() -> None:
    assert admitted(Threshold(0.9), propose(None, [4, 3]), [4, 1]) == [4, 1]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, NAN])
def test_a_threshold_out_of_range_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Threshold(threshold)


FLAT = StepCosts(target=((1, 1, 1.0), (1, 100, 1.0)), draft=())
"""Verifying is free."""
LINEAR = StepCosts(target=((1, 0, 1.0), (1, 100, 101.0)), draft=())
"""A step costs 1 + its tokens."""
CLIFF = StepCosts(target=((1, 1, 1.0), (1, 4, 1.03), (1, 5, 9.0), (1, 100, 99.0)), draft=())
"""Up to four tokens are nearly free."""
DEAR_DRAFTS = StepCosts(target=((1, 1, 1.0), (1, 100, 1.0)), draft=((1, 1, 3.0), (1, 4, 12.0)))
SCHEDULED: tuple[type[CausalGreedy] | type[LaggedTopK], ...] = (CausalGreedy, LaggedTopK)


def step(
    planner: Planner, confidence: dict[int, list[float]], num_known: int | None = None
) -> list[int]:
    """One decode step of the requests with these serials; the drafts verified of each."""
    width = max(len(row) for row in confidence.values())
    limits = tuple(len(row) for row in confidence.values())
    count = len(limits)
    shape = StepShape(num_known or count, count, tuple(confidence), limits)
    shape = replace(shape, draft_limits=planner.depths(shape))
    if not any(shape.draft_limits):
        return [0] * count
    padded = [[*row, *[NAN] * (width - len(row))] for row in confidence.values()]
    proposal = DraftProposal(
        torch.zeros(count, width, dtype=torch.int64),
        torch.tensor(shape.draft_limits),
        None,
        torch.tensor(padded),
    )
    admission = planner.admit(proposal, shape)
    lens: list[int] = admission.num_admitted.tolist()
    assert admission.num_draft_tokens == sum(lens)
    assert all(n <= limit for n, limit in zip(lens, shape.draft_limits, strict=True))
    return lens


@pytest.mark.parametrize("kind", SCHEDULED)
def test_free_verification_verifies_everything(kind: type[CausalGreedy]) -> None:
    planner = kind(FLAT)
    for _ in range(5):
        assert step(planner, {1: [0.5, 0.01, 0.3], 2: [0.001, 0.1]}) == [3, 2]


@pytest.mark.parametrize("kind", SCHEDULED)
def test_a_drafter_without_confidences_has_every_draft_verified(kind: type[CausalGreedy]) -> None:
    assert admitted(kind(FLAT), propose(None, [4, 3]), [4, 4]) == [4, 3]


def test_causal_greedy_admits_by_survival_until_it_declines() -> None:
    """(R + sum) / (1 + R + m): R = 2 gives 2/3; a draft pays while its survival is over Theta."""
    planner = CausalGreedy(LINEAR)
    # Survivals: a 0.9, 0.72, 0.36; b 0.8, 0.56.
    # Theta: 2/3, 2.9/4, 3.7/5 = .74, 4.42/6 = .7367 declines.
    assert step(planner, {1: [0.9, 0.8, 0.5], 2: [0.8, 0.7]}) == [1, 1]


def test_causal_greedy_stops_at_the_first_decline() -> None:
    dip = StepCosts(target=((1, 1, 1.0), (1, 2, 1.6), (1, 3, 1.65)), draft=())
    assert step(CausalGreedy(dip), {1: [0.5, 1.0]}) == [0]


def test_lagged_budgets_are_searched_past_a_decline() -> None:
    dip = StepCosts(target=((1, 1, 1.0), (1, 2, 1.6), (1, 3, 1.65)), draft=())
    planner = LaggedTopK(dip)
    for _ in range(4):
        last = step(planner, {1: [0.5, 1.0]})
    assert last == [2]


def test_a_budget_is_exactly_two_steps_old() -> None:
    planner = LaggedTopK(CLIFF)
    sure, doubtful = [1.0] * 4, [0.001] * 4
    # Nothing known yet: everything is expected to survive, and 4 tokens are nearly free.
    assert step(planner, {1: doubtful}) == [3]
    assert step(planner, {1: sure}) == [3]
    # The doubtful step is two old now: not even nearly free drafts pay.
    assert step(planner, {1: sure}) == [0]


def test_the_share_is_by_the_confidences_of_now() -> None:
    """E07: the budget lags, the allocation does not."""
    planner = LaggedTopK(StepCosts(target=((2, 2, 1.0), (2, 6, 1.1), (2, 7, 9.0)), draft=()))
    easy, hard = [1.0, 1.0, 1.0, 1.0], [0.4, 0.4, 0.4, 0.4]
    for _ in range(3):
        assert step(planner, {1: easy, 2: hard}) == [4, 0]
    assert step(planner, {1: hard, 2: easy}) == [0, 4]


def test_ties_go_to_the_earlier_position_then_to_the_earlier_request() -> None:
    for allowed in range(7):
        seconds = {3: 1.0, 3 + allowed: 1.0 + allowed * 1e-6, 4 + allowed: 99.0}
        costs = StepCosts(target=tuple((3, n, s) for n, s in seconds.items()), draft=())
        expected = [sum(i % 3 == req for i in range(allowed)) for req in range(3)]
        for kind in SCHEDULED:
            assert step(kind(costs), {5: [1.0, 1.0], 6: [1.0, 1.0], 4: [1.0, 1.0]}) == expected


def test_survival_is_cumulative_and_nan_is_worth_nothing() -> None:
    """E14: 0.95 after a 0.2 is not likelier than it; NaN, 0 and 1 have a meaning."""
    costs = StepCosts(target=((2, 2, 1.0), (2, 5, 1.01), (2, 6, 99.0)), draft=())
    assert step(CausalGreedy(costs), {1: [0.9, 0.2, 0.95], 2: [0.3, 0.99, 0.99]}) == [1, 2]
    assert step(CausalGreedy(LINEAR), {1: [NAN, 1.0], 2: [1.0, 0.0]}) == [0, 1]


def test_a_request_without_history_is_expected_to_do_as_the_others() -> None:
    """A new request, or one in a slot that was another's: its serial is new."""
    shape = StepShape(2, 2, (1, 2), (2, 2))
    first = [[0.8, 0.5], [0.4, 0.5]]
    seen = Outlook(Prices(FLAT), highest)
    assert seen.expected(shape).values.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    pass_step(seen, shape, first)
    assert seen.expected(shape).values.tolist() == [[1.0, 1.0], [1.0, 1.0]]  # one step old
    pass_step(seen, shape, [[0.1, 0.1], [0.2, 0.2]])
    new = StepShape(2, 2, (2, 3), (2, 2))
    seen.depths(new)
    known, assumed = seen.expected(new).values.tolist()
    assert known == [0.4, 0.5]
    assert assumed == pytest.approx([0.6, (0.8 * 0.5 + 0.4 * 0.5) / 1.2])
    # A block that hardly reaches a position says little about it.
    seen = Outlook(Prices(FLAT), highest)
    pass_step(seen, shape, [[1.0, 0.9], [0.01, 0.1]])
    pass_step(seen, shape, [[0.1, 0.1], [0.2, 0.2]])
    seen.depths(new)
    assert seen.expected(new).values[1, 1] == pytest.approx((0.9 + 0.01 * 0.1) / 1.01)


def pass_step(seen: Outlook, shape: StepShape, confidence: list[list[float]]) -> None:
    """A step that is planned and learnt."""
    seen.depths(shape)
    values = np.array(confidence)
    seen.learn(shape, Confidences(values, np.full(len(values), values.shape[1])))


def test_deeper_positions_than_were_drawn_are_expected_as_the_mean() -> None:
    seen = Outlook(Prices(FLAT), highest)
    shape = StepShape(1, 1, (1,), (3,))
    for _ in range(3):
        pass_step(seen, shape, [[0.8, 0.5, 0.25]])
    for _ in range(2):
        pass_step(seen, shape, [[0.9]])
    seen.depths(shape)
    assert seen.expected(shape).values[0].tolist() == pytest.approx([0.9, 0.5, 0.25])


def test_what_comes_after_steps_without_drafts_counts_for_more() -> None:
    """A probe stands for the steps before it: else it would take thousands to unlearn."""
    means = []
    for num_missed in (0, 3, 100):
        seen = Outlook(Prices(FLAT), highest)
        drawn, nobody = StepShape(1, 1, (1,), (1,)), StepShape(1, 1, (1,), (0,))
        for _ in range(100):
            pass_step(seen, drawn, [[0.9]])
        for _ in range(num_missed):
            seen.depths(nobody)
        pass_step(seen, drawn, [[0.1]])
        for serial in (2, 3, 4):  # of others: they are expected to do as the mean
            shape = StepShape(1, 1, (serial,), (1,))
            pass_step(seen, shape, [[0.9]])
        means.append(float(seen.expected(StepShape(1, 1, (9,), (1,))).values[0, 0]))
    assert means == sorted(means, reverse=True)
    assert means[0] - means[2] > 0.05


def test_the_last_of_a_batch_say_no_more_than_they_were() -> None:
    """They are those that accept the least, and often alone for as long as the batch was."""
    seen = Outlook(Prices(FLAT), highest)
    for _ in range(30):
        pass_step(seen, StepShape(8, 8, tuple(range(8)), (1,) * 8), [[0.9]] * 8)
    for _ in range(30):
        pass_step(seen, StepShape(1, 1, (7,), (1,)), [[0.1]])
    for _ in range(LAG):
        pass_step(seen, StepShape(1, 1, (8,), (1,)), [[0.5]])
    blocks = [(0.9, 8)] * 30 + [(0.1, 1)] * 30
    weights = [count * (1 - outlook.FORGOTTEN) ** i for i, (_, count) in enumerate(blocks[::-1])]
    mean = np.average([value for value, _ in blocks[::-1]], weights=weights)
    assert seen.expected(StepShape(1, 1, (9,), (1,))).values[0, 0] == pytest.approx(mean)


def test_what_a_prediction_drafts_teaches_nothing() -> None:
    seen = Outlook(Prices(FLAT), highest)
    shape = StepShape(2, 2, (1, 2), (2, 2), predicted=(0.75, 0.0))
    for _ in range(3):
        pass_step(seen, shape, [[0.75, 0.75], [0.5, 0.5]])
    assert seen.expected(shape).values.tolist() == [[0.75, 0.75], [0.5, 0.5]]
    plain = StepShape(2, 2, (1, 2), (2, 2))
    assert seen.expected(plain).values.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("kind", SCHEDULED)
def test_nobody_drafts_where_drafting_does_not_pay(kind: type[CausalGreedy]) -> None:
    """E08: no budget means no draft work; a probe now and then keeps the outlook true."""
    planner = kind(DEAR_DRAFTS)
    shape = StepShape(2, 2, (1, 2), (4, 4))
    drawn = []
    for _ in range(6 * PROBE_EVERY + 8):
        depths = planner.depths(shape)
        drawn.append(depths)
        if any(depths):
            proposal = propose([[0.9] * 4] * 2, list(depths))
            planner.admit(proposal, replace(shape, draft_limits=depths))
    assert set(drawn[:2]) == {(0, 0)}  # even certain drafts cost more than they bring
    probes = [depths for depths in drawn if any(depths)]
    assert probes == [(4, 0), (0, 4)] * 3
    assert len(drawn) // len(probes) >= PROBE_EVERY


def test_blocks_are_drawn_as_deep_as_pays() -> None:
    """The draft's cost grows with its depth, the gain shrinks."""
    costs = StepCosts(
        target=((1, 1, 1.0), (1, 100, 1.0)), draft=((1, 1, 0.1), (1, 2, 0.2), (1, 3, 1.2))
    )
    planner = CausalGreedy(costs)
    shape = StepShape(1, 1, (1,), (3,))
    for _ in range(4):
        depths = planner.depths(shape)
        proposal = propose([[0.9, 0.8, 0.5]], list(depths), width=3)
        planner.admit(proposal, replace(shape, draft_limits=depths))
    assert depths == (2,)


@pytest.mark.parametrize("kind", SCHEDULED)
def test_a_prompt_beside_does_not_make_drafts_cheap(kind: type[CausalGreedy]) -> None:
    """The chunk takes what it takes: what counts is what drafts add, and the step without it."""
    dear = StepCosts(target=((2, 1, 1.0), (2, 9, 9.0), (2, 600, 600.0)), draft=())
    cheap_beside = StepCosts(target=((2, 1, 1.0), (2, 9, 9.0), (2, 600, 9.0)), draft=())
    for costs, expected in ((dear, [0, 0]), (cheap_beside, [2, 1])):
        alone, beside = kind(costs), kind(costs)
        for _ in range(4):
            lens = [
                step(alone, {1: [0.5, 0.5], 2: [0.5]}),
                step(beside, {1: [0.5, 0.5], 2: [0.5]}, num_known=500),
            ]
        assert lens == [[0, 0], expected]


@pytest.mark.parametrize("kind", SCHEDULED)
def test_the_same_steps_give_the_same_lengths(kind: type[CausalGreedy]) -> None:
    """Nothing depends on time: two planners fed alike decide alike."""
    generator = np.random.default_rng(0)
    steps = [
        {serial: generator.random(4).tolist() for serial in range(n, n + 3)} for n in range(30)
    ]
    first, second = kind(CLIFF), kind(CLIFF)
    assert [step(first, s) for s in steps] == [step(second, s) for s in steps]


def confidences(token_ids: Tensor) -> Tensor:
    """A drafter's: entry k is any function of the tokens before k. [B, K] -> [B, K]."""
    before = torch.cat([torch.zeros_like(token_ids[:, :1]), token_ids[:, :-1] + 1], dim=1)
    return 1.0 / (1.0 + (before.cumsum(-1) * 37 % 11) / 10)


POLICIES: dict[str, Callable[[], Planner]] = {
    "verify all": VerifyAll,
    "threshold": lambda: Threshold(0.5),
    "causal greedy, linear": lambda: CausalGreedy(LINEAR),
    "causal greedy, cliff": lambda: CausalGreedy(CLIFF),
    "lagged top-k, linear": lambda: LaggedTopK(LINEAR),
    "lagged top-k, cliff": lambda: LaggedTopK(CLIFF),
}


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from(list(POLICIES)),
    st.integers(0, 2),
)
def test_an_admission_never_looks_at_the_token_it_admits(
    ids: list[int], index: int, other: int, policy: str, mine: int
) -> None:
    """Change draft `index`: whether drafts 0 .. index are in does not move.

    Beside two neighbours, after two steps of history.
    """
    neighbours = [[1, 5, 0, 2], [3, 3, 3, 3]]

    def reached(token_ids: list[int]) -> list[bool]:
        planner = POLICIES[policy]()
        shape = StepShape(3, 3, (0, 1, 2), (4, 4, 4))
        blocks = [*neighbours[:mine], token_ids, *neighbours[mine:]]
        for tokens in (torch.tensor([[2, 1, 0, 4]] * 3), torch.tensor([[0] * 4] * 3), blocks):
            tokens = torch.as_tensor(tokens)
            depths = planner.depths(shape)
            drawn = torch.tensor(depths)
            proposal = DraftProposal(tokens, drawn, None, confidences(tokens))
            lens = planner.admit(proposal, replace(shape, draft_limits=depths)).num_admitted
        return [int(lens[mine]) > k for k in range(index + 1)]

    changed = [*ids[:index], other, *ids[index + 1 :]]
    assert reached(ids) == reached(changed)


class Peeking:
    """What a policy must not be: it drops drafts by their value."""

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        return shape.draft_limits

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        keep = (proposal.token_ids < 3).long().cumprod(-1).sum(-1)
        return Admission(keep, int(keep.sum()))


def test_the_property_above_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "peeking", Peeking)
    with pytest.raises(AssertionError):
        test_an_admission_never_looks_at_the_token_it_admits.hypothesis.inner_test(
            [0, 0, 0, 0], 1, 5, "peeking", 0
        )


# Planned ahead: the host runs a step behind the device.


def eighths(num_reqs: int, depth: int) -> list[int]:
    """Sizes that depend on how much there is to verify."""
    return sorted({num_reqs + num_reqs * depth * part // 8 for part in range(9)})


def scripted_steps(seed: int) -> list[dict[int, list[float]]]:
    """Confidences by serial, step by step; requests come, go and change places."""
    generator = np.random.default_rng(seed)
    steps = []
    for n in range(120):
        serials = generator.permutation(np.arange(n // 10, n // 10 + 4))[: generator.integers(1, 5)]
        ease = 0.15 if 40 <= n < 90 else 0.95  # a time in which it pays nobody to draft
        steps.append({int(s): (generator.random(4) * ease).tolist() for s in serials})
    return steps


@pytest.mark.parametrize(("seed", "every"), [(0, 1), (1, 1), (2, 1), (3, 4)])
def test_a_host_that_is_a_step_behind_plans_the_same(seed: int, every: int) -> None:
    costs = StepCosts(
        target=((1, 1, 1.0), (1, 4, 1.1), (1, 8, 2.0), (1, 9, 9.0), (4, 4, 2.0), (4, 20, 5.0)),
        draft=((1, 1, 0.15), (1, 4, 0.35), (4, 4, 0.5)),
    )
    in_time, behind = LaggedTopK(costs, eighths, every), LaggedTopK(costs, eighths, every)
    waiting: list[tuple[StepShape, Tensor, Tensor]] = []
    plans, num_undrafted = set(), 0
    for confidence in scripted_steps(seed):
        count = len(confidence)
        shape = StepShape(count, count, tuple(confidence), (4,) * count)
        depths = in_time.depths(shape)
        assert behind.depths(shape) == depths
        shape = replace(shape, draft_limits=depths)
        says, drawn = torch.tensor(list(confidence.values())), torch.tensor(depths)
        if any(depths):
            plan = behind.device_plan(shape)
            proposal = DraftProposal(torch.zeros(count, 4, dtype=torch.int64), drawn, None, says)
            assert in_time.admit(proposal, shape).num_draft_tokens == plan.budget <= sum(depths)
            plans.add(plan.budget)
        num_undrafted += not any(depths)
        if waiting:
            behind.learn(*waiting.pop())
        if any(depths):
            waiting.append((shape, says.numpy(), drawn.numpy()))
    assert len(plans) > 3
    assert num_undrafted > 10


def test_steps_are_learnt_in_their_order_and_in_time() -> None:
    planner = LaggedTopK(FLAT)
    shapes = [StepShape(1, 1, (serial,), (2,)) for serial in range(4)]
    says, drawn = np.array([[0.5, 0.5]]), np.array([2])
    planner.depths(shapes[0])
    planner.depths(shapes[1])
    with pytest.raises(RuntimeError, match="does not wait"):
        planner.learn(shapes[1], says, drawn)
    with pytest.raises(RuntimeError, match="have not come"):
        planner.depths(shapes[2])
    planner = LaggedTopK(FLAT)
    planner.depths(shapes[0])
    planner.learn(shapes[0], says, drawn)
    with pytest.raises(RuntimeError, match="does not wait"):
        planner.learn(shapes[0], says, drawn)


def test_budgets_fill_the_size_that_a_step_is_padded_to() -> None:
    steep = ((1, 0, 0.5), (1, 64, 32.5))
    step_of_nine = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]]
    shape = StepShape(1, 1, (1,), (8,))
    drafts = torch.zeros(1, 8, dtype=torch.int64)
    proposal = DraftProposal(drafts, torch.tensor([8]), None, torch.tensor(step_of_nine))
    budgets = {}
    for sizes in ((), (1, 4, 16), (1, 6, 16), (2,)):
        planner = LaggedTopK(StepCosts(steep, ()), lambda _reqs, _depth, sizes=sizes: sizes)
        for _ in range(4):
            assert planner.depths(shape) == (8,)
            budgets[sizes] = planner.admit(proposal, shape).num_draft_tokens
    assert budgets == {(): 2, (1, 4, 16): 3, (1, 6, 16): 5, (2,): 2}


def test_what_the_device_would_wait_for_its_host_anyway_costs_nothing() -> None:
    """Of eight drafts at half a second each as many as fit into the host's time, and back."""
    shape = StepShape(1, 1, (1,), (8,))
    survivals = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]]
    proposal = DraftProposal(
        torch.zeros(1, 8, dtype=torch.int64), torch.tensor([8]), None, torch.tensor(survivals)
    )
    planner = LaggedTopK(StepCosts(((1, 0, 0.5), (1, 64, 32.5)), ()))
    budgets = []
    for least in (0.0, 3.0, 3.0, 3.0, 9.0, 0.0):
        planner.step_takes_at_least(least)
        planner.depths(shape)
        budgets.append(planner.admit(proposal, shape).num_draft_tokens)
    assert budgets[2:] == [4, 4, 8, 2]  # five tokens take 3 s, nine 5 s


@pytest.mark.parametrize("padding", [None, eighths])
@pytest.mark.parametrize("points", [99, 8])
def test_a_depth_is_worth_what_its_drafts_are(
    monkeypatch: pytest.MonkeyPatch, points: int, padding: Padding | None
) -> None:
    """All depths at once give what each gives alone; at fewer points, nearly."""
    generator = np.random.default_rng(5)
    values = generator.random((6, 5)).round(1)
    limits = np.array([5, 3, 0, 4, 5, 2])
    shape = StepShape(9, 6, tuple(range(6)), tuple(limits.tolist()), (0, 0, 0, 0, 0.9, 0))
    values[4] = 0.9
    costs = StepCosts(((6, 6, 1.0), (6, 40, 3.0)), ((1, 1, 0.1), (5, 5, 0.4)))
    monkeypatch.setattr(outlook, "MOST_POINTS", points)
    ranked = Confidences(values, limits).ranked()
    every = tokens_per_second_by_depth(ranked, shape, Prices(costs, padding))
    assert every.shape[0] == 6
    assert every.shape[1] <= points + 1
    for depth, theta in enumerate(every):
        lens = np.minimum(limits, [depth] * 4 + [5, depth])
        drawn = replace(shape, draft_limits=tuple(lens.tolist()))
        alone = tokens_per_second(ranked.within(lens), drawn, Prices(costs, padding))
        if points == 99:
            assert set(theta) == set(alone)
        assert theta[-1] == pytest.approx(alone[-1], rel=1e-12)
        assert 0.98 * alone.max() <= theta.max() <= alone.max() * (1 + 1e-12)


def note_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests of every step that is looked at by itself from now on."""
    looks: list[int] = []
    look = outlook.tokens_per_second_by_depth

    def counted(ranked: Ranked, shape: StepShape, prices: Prices) -> NDArray[np.float64]:
        looks.append(len(shape.serials))
        return look(ranked, shape, prices)

    monkeypatch.setattr(outlook, "tokens_per_second_by_depth", counted)
    return looks


def test_a_plan_is_kept_while_about_as_many_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = note_looks(monkeypatch)
    planner = LaggedTopK(CLIFF, every=5)
    sure = dict.fromkeys(range(16), [1.0] * 4)
    first = [sum(step(planner, sure)) for _ in range(13)]
    assert looks == [16] * 4  # again when something is known, then every fifth
    assert len(set(first)) == 1
    # One request more has the same share verified; a third fewer are looked at by themselves.
    assert sum(step(planner, {**sure, 99: [1.0] * 4})) == -(-first[0] * 17 // 16)
    assert looks == [16] * 4
    step(planner, dict.fromkeys(range(11), [1.0] * 4))
    assert looks[4:] == [11]


def test_whole_blocks_are_not_weighed_again_while_requests_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fewer there are, the less a draft costs beside the rest; more are looked at anew."""
    looks = note_looks(monkeypatch)
    costs = StepCosts(target=((16, 16, 1.0), (16, 80, 1.5)), draft=((16, 4, 0.1),))
    planner = LaggedTopK(costs, every=16, margin=0.03)
    num_reqs = [16] * 4 + [12, 9, 6, 4, 2, 1] + [24]
    lens = [sum(step(planner, dict.fromkeys(range(n), [0.9] * 4))) for n in num_reqs]
    assert lens == [4 * n for n in num_reqs]
    assert looks == [16, 16, 24]


def test_a_plan_for_strangers_is_kept_until_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others did is all there is to plan a batch by at first: whole blocks, if any at all."""
    looks = note_looks(monkeypatch)
    costs = StepCosts(target=((8, 8, 1.0), (8, 40, 2.5)), draft=((8, 1, 0.1), (8, 4, 0.2)))
    planner = LaggedTopK(costs, every=16, margin=0.03)
    poor = {serial: [0.9, 0.1, 0.1, 0.1] for serial in range(8)}
    lens = [sum(step(planner, poor)) for _ in range(40)]
    assert lens == [32] * LAG + [8] * (40 - LAG)
    step(planner, {0: [0.1] * 4})  # the last of them
    looks.clear()
    sure = dict.fromkeys(range(10, 18), [1.0] * 4)
    assert [sum(step(planner, sure)) for _ in range(16)] == [32] * 16
    assert looks == [8, 8]


def test_where_the_host_takes_longer_than_a_whole_step_nothing_is_weighed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = note_looks(monkeypatch)
    planner = LaggedTopK(LINEAR, in_granules_of(4))
    for seconds, is_free in ((9.0, True), (8.9, False), (9.0, True)):  # five tokens run as eight
        looks.clear()
        planner.step_takes_at_least(seconds)
        lens = [sum(step(planner, {1: [0.5, 0.1, 0.1, 0.1]})) for _ in range(4)]
        assert (not looks) == is_free
        assert (lens == [4] * 4) == is_free


def test_a_plan_not_to_draft_is_kept_while_the_same_number_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = note_looks(monkeypatch)
    dear = StepCosts(target=((4, 4, 1.0), (4, 8, 2.0), (4, 24, 9.0)), draft=((4, 5, 5.0),))
    planner = LaggedTopK(dear)
    poor = dict.fromkeys(range(4), [0.1] * 4)
    while any(step(planner, poor)):
        pass
    for _ in range(LAG):
        step(planner, poor)
    looks.clear()
    for _ in range(2 * STILL_STEPS):
        assert not any(step(planner, poor))
    assert looks == [4, 4]
    assert not any(step(planner, {**poor, 9: [0.1] * 4}))  # one more may not be, so far on
    assert looks[2:] == [5]


@pytest.mark.parametrize("kind", SCHEDULED)
def test_a_bad_stretch_is_no_reason_to_go_on_without_drafts(kind: type[CausalGreedy]) -> None:
    """What was expected of it is forgotten with it: by the mean drafting pays again."""
    costs = StepCosts(target=((1, 1, 1.0), (1, 5, 1.4)), draft=((1, 4, 0.2),))
    planner = kind(costs)
    for _ in range(40):
        assert any(step(planner, {1: [0.9] * 4}))
    lens = [sum(step(planner, {1: [0.0] * 4})) for _ in range(LAG + 1)]
    for _ in range(6):
        lens.append(sum(step(planner, {1: [0.9] * 4})))
    assert 0 in lens
    assert 0 not in lens[-2:]


def test_what_the_device_is_left_to_do() -> None:
    shape = StepShape(2, 2, (1, 2), (4, 3))
    everything, by_survival = VerifyAll(), Threshold(0.3)
    assert everything.device_plan(shape) == DevicePlan(7, 0.0)
    assert by_survival.device_plan(shape) == DevicePlan(7, float(np.float32(0.3)))
    for planner in (everything, by_survival, LaggedTopK(FLAT)):
        assert isinstance(planner, DevicePlanner)
    assert not isinstance(CausalGreedy(FLAT), DevicePlanner)


@pytest.mark.parametrize(("dear", "expected"), [(1.02, [4]), (1.2, [2])])
def test_drafts_are_left_out_for_more_than_a_measurement_s_errors(
    dear: float, expected: list[int]
) -> None:
    """Two tokens of five are worth the most by 2 %, or by a fifth."""
    costs = StepCosts(target=((1, 1, 1.0), (1, 3, 1.0), (1, 4, dear), (1, 5, dear)), draft=())
    choosy, plain = LaggedTopK(costs, margin=0.03), LaggedTopK(costs)
    for _ in range(4):
        lens = [step(planner, {1: [0.9, 0.9, 0.001, 0.001]}) for planner in (choosy, plain)]
    assert lens == [expected, [2]]


def test_whole_blocks_are_drawn_unless_less_is_better_by_the_margin() -> None:
    costs = StepCosts(target=FLAT.target, draft=((1, 2, 0.1), (1, 4, 0.13)))
    shape = StepShape(1, 1, (1,), (4,))
    for margin, depth in ((0.03, 4), (0.0, 2)):
        planner = LaggedTopK(costs, margin=margin)
        for _ in range(4):
            depths = planner.depths(shape)
            drawn = replace(shape, draft_limits=depths)
            planner.admit(propose([[0.9, 0.9, 0.001, 0.001]], list(depths)), drawn)
        assert depths == (depth,)


@pytest.mark.parametrize(("saved", "depth"), [(0.02, 0), (0.1, 4)])
def test_nobody_drafts_for_less_than_the_margin(saved: float, depth: int) -> None:
    """Two drafts that both come bring three tokens for one, at three times the time or less."""
    costs = StepCosts(
        target=((1, 1, 1.0), (1, 3, 3.0 * (1 - saved)), (1, 5, 9.0)), draft=((1, 4, 1e-9),)
    )
    planner = LaggedTopK(costs, margin=0.03)
    shape = StepShape(1, 1, (1,), (4,))
    for _ in range(4):
        depths = planner.depths(shape)
        if any(depths):
            drawn = replace(shape, draft_limits=depths)
            planner.admit(propose([[1.0, 1.0, 0.001, 0.001]], list(depths)), drawn)
    assert depths == (depth,)


@pytest.mark.parametrize("kind", SCHEDULED)
def test_steps_that_failed_are_not_waited_for(kind: type[CausalGreedy]) -> None:
    planner = kind(FLAT)
    shape = StepShape(1, 1, (1,), (2,))
    for _ in range(2):
        planner.depths(shape)
    planner.abandon()
    for _ in range(4):
        assert step(planner, {1: [0.5, 0.4]}) == [2]


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_any_shape_may_follow_each_other(seed: int) -> None:
    """Requests come, end and fail; limits fall near an end; depths and budgets change."""
    chance = np.random.default_rng(seed)
    costs = StepCosts(
        target=((1, 1, 1.0), (1, 8, 1.2), (8, 8, 1.1), (8, 40, 1.6), (8, 64, 4.0)),
        draft=((1, 4, 0.1), (1, 7, 0.3), (8, 4, 0.4), (8, 7, 1.0)),
    )
    every, margin = int(chance.choice([1, 3, 16])), float(chance.choice([0.0, 0.03]))
    planner = LaggedTopK(costs, eighths, every, margin)
    left, serial = dict[int, int](), 0  # tokens to go, by serial
    waiting: list[tuple[StepShape, Tensor, Tensor]] = []
    seen = set[tuple[int, int]]()
    for _ in range(400):
        while len(left) < 8 and (not left or chance.random() < 0.3):
            left[serial], serial = int(chance.integers(2, 60)), serial + 1
        limits = tuple(min(7, count - 1) for count in left.values())
        shape = StepShape(len(left), len(left), tuple(left), limits)
        depths = planner.depths(shape)
        assert all(0 <= depth <= limit for depth, limit in zip(depths, limits, strict=True))
        now = None
        if any(depths):
            shape = replace(shape, draft_limits=depths)
            budget = planner.device_plan(shape).budget
            assert 0 <= budget <= sum(depths)
            seen.add((max(depths), budget))
            width = int(chance.choice([max(depths), 7]))  # as deep, or what stands in for it
            sound = np.minimum(depths, chance.integers(0, 8, len(depths)) + 3)
            ease = chance.random() ** 2
            sure = chance.random((len(depths), width), dtype=np.float32) ** ease
            now = shape, sure, sound
        if waiting:
            planner.learn(*waiting.pop())
        if chance.random() < 0.03:  # this step has failed
            planner.abandon()
            now = None
        if now is not None:
            waiting.append(now)
        for request in tuple(left):
            left[request] -= int(chance.integers(1, 5))
            if left[request] <= 1:
                del left[request]
    assert len(seen) > 20
