"""Verify lengths: cumulative, bounded, and blind to the token they admit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emberline.batch import Admission, DraftProposal, StepShape
from emberline.verify.planner import Planner, Threshold, VerifyAll

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


def confidences(token_ids: Tensor) -> Tensor:
    """A drafter's: entry k is any function of the tokens before k. [B, K] -> [B, K]."""
    before = torch.cat([torch.zeros_like(token_ids[:, :1]), token_ids[:, :-1] + 1], dim=1)
    return 1.0 / (1.0 + (before.cumsum(-1) * 37 % 11) / 10)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from([VerifyAll(), Threshold(0.3), Threshold(0.6), Threshold(0.9)]),
)
def test_an_admission_never_looks_at_the_token_it_admits(
    ids: list[int], index: int, other: int, planner: Planner
) -> None:
    """Change draft `index`: whether drafts 0 .. index are in does not move."""

    def reached(token_ids: list[int]) -> list[bool]:
        tokens = torch.tensor([token_ids])
        proposal = DraftProposal(tokens, torch.tensor([4]), None, confidences(tokens))
        (num,) = admitted(planner, proposal, [4])
        return [num > k for k in range(index + 1)]

    changed = [*ids[:index], other, *ids[index + 1 :]]
    assert reached(ids) == reached(changed)


class Peeking:
    """What a policy must not be: it drops drafts by their value."""

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        return shape.draft_limits

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        keep = (proposal.token_ids < 3).long().cumprod(-1).sum(-1)
        return Admission(keep, int(keep.sum()))


def test_the_property_above_can_fail() -> None:
    with pytest.raises(AssertionError):
        test_an_admission_never_looks_at_the_token_it_admits.hypothesis.inner_test(
            [0, 0, 0, 0], 1, 5, Peeking()
        )
