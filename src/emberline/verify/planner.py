"""How many drafts are drawn, and how many of them are verified.

Owns the policies. Must not know layouts, requests or models: a policy turns confidences, limits and
costs into lengths.

Whatever the policy, the accept rules stay exact only if the admission of draft k depends neither on
the value of draft k nor on that of a later one. Given the drafts before k, the window then reaches
k or not independently of what draft k is, and the token emitted at k has the target's law
either way. (The confidence of draft k itself may be read: a drafter computes it before it draws k,
from the drafts before.) How deep a block is drawn is settled before any of it is drawn, so no depth
can depend on a draft of its own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.batch import Admission, DraftProposal, StepShape
from emberline.verify.outlook import (
    Confidences,
    Outlook,
    Ranked,
    first_decline,
    highest,
    tokens_per_second,
)
from emberline.verify.prices import Padding, Prices
from emberline.verify.step_cost import StepCosts

Numbers = NDArray[Any]


class Planner(Protocol):
    """A policy of verification."""

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """Choose how many drafts of each block to draw at most, before anything is drawn.

        Asked once a step, whether or not anybody may draft.

        Returns:
            [B], each within `shape.draft_limits`; all 0: nobody drafts in this step.
        """
        ...

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        """Choose how many leading drafts of each request to verify.

        Args:
            proposal: drafts of B requests with their confidences, drawn within `depths`.
            shape: of the same step, its draft limits being those depths.
        """
        ...

    def abandon(self) -> None:
        """Steps that were planned have failed: what did not come of them will not."""
        ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An admission that is left to the device: `ops.triton.plan.allocate` with these two numbers.

    A draft is verified if it is among the `budget` likeliest of the step to survive and its
    survival is at least `threshold`. Where the drafter has no confidences all are taken for sure,
    and the budget goes to the first of every block.
    """

    budget: int  # drafts of all requests together; never more than were drawn
    threshold: float = 0.0  # 0: whatever its survival is


@runtime_checkable
class DevicePlanner(Planner, Protocol):
    """A policy that needs no confidence of a step on the host before the step runs.

    Its steps may be planned while the one before still runs: `depths`, then `device_plan`, then
    the next step's, and `learn` when a step's confidences have come back, which is before the
    second step after it is planned.
    """

    def device_plan(self, shape: StepShape) -> DevicePlan:
        """What the device does in this step; `shape` has the draft limits that `depths` gave."""
        ...

    def learn(self, shape: StepShape, confidence: Numbers | None, num_drafted: Numbers) -> None:
        """Take what came back from the oldest step with drafts that has not been learnt.

        Asked once for every step in which `depths` let anybody draft.

        Args:
            shape: of that step.
            confidence: [B, K] float32, kept and never changed again; None: the drafter has none.
            num_drafted: [B] int64, likewise.
        """
        ...

    def step_takes_at_least(self, seconds: float) -> None:
        """What the host needs for a step by itself, as steps before this one have shown."""
        ...


class VerifyAll:
    """Verify every draft.

    Does not look at the token it admits: it looks at no token and no confidence at all.
    """

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """As deep as allowed."""
        return shape.draft_limits

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:  # noqa: ARG002
        """All that was drafted."""
        return _admission(proposal.num_drafted)

    def device_plan(self, shape: StepShape) -> DevicePlan:
        """Room for all."""
        return DevicePlan(sum(shape.draft_limits))

    def learn(self, shape: StepShape, confidence: Numbers | None, num_drafted: Numbers) -> None:
        """Nothing is remembered."""

    def step_takes_at_least(self, seconds: float) -> None:
        """Nothing is weighed against it."""

    def abandon(self) -> None:
        """Nothing is awaited."""


class Threshold:
    """Verify the longest prefix whose survival stays at or over a threshold.

    Survival of draft k is the product of the confidences up to k, so it only falls, and the prefix
    is the set of drafts over the threshold. A confidence that is NaN counts as 0: unknown is not
    worth verifying. A drafter without confidences has every draft verified.

    Does not look at the token it admits: whether k is in reads the confidences 0 .. k, and those
    were computed from the anchor and the drafts before k. Confidences after k cannot take it
    out again, because a prefix is ended by its first failure only.
    """

    def __init__(self, threshold: float) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        # Confidences are float32: at the threshold is in, also where it has no exact number.
        self._threshold = float(np.float32(threshold))

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """As deep as allowed."""
        return shape.draft_limits

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:  # noqa: ARG002
        """The prefix over the threshold."""
        if proposal.confidence is None:
            return _admission(proposal.num_drafted)
        known = proposal.confidence.double().nan_to_num(0.0).clamp(0.0, 1.0)
        prefix = (known.cumprod(-1) >= self._threshold).long().cumprod(-1).sum(-1)
        return _admission(torch.minimum(prefix, proposal.num_drafted))

    def device_plan(self, shape: StepShape) -> DevicePlan:
        """Room for all; what survives is known there."""
        return DevicePlan(sum(shape.draft_limits), self._threshold)

    def learn(self, shape: StepShape, confidence: Numbers | None, num_drafted: Numbers) -> None:
        """Nothing is remembered."""

    def step_takes_at_least(self, seconds: float) -> None:
        """Nothing is weighed against it."""

    def abandon(self) -> None:
        """Nothing is awaited."""


class CausalGreedy:
    """Admit drafts by falling survival for as long as that raises the tokens a second.

    Drafts enter one by one, the likeliest of all requests first, and the first one that would
    lower Theta (`outlook.tokens_per_second`) ends it: DSpark, Algorithm 1. How deep blocks are
    drawn, and whether at all, is the `Outlook`'s to say. Without confidences every draft is
    verified. Where costs rise in steps (padded graphs), it stops before each of them: `LaggedTopK`
    looks across.

    Does not look at the token it admits: survival falls along a block, so whether k is in reads
    confidences up to k of its own block (computed before k is drawn) and those of other requests,
    whose draws are independent of it. **The stop is what makes it so.** A search past the first
    decline would admit k because of what comes after it, the later survivals of its own block among
    them, and those know which token k is (appendix A of the paper; a test shows the bias).
    """

    def __init__(self, costs: StepCosts) -> None:
        self._prices = Prices(costs)
        self._outlook = Outlook(self._prices, first_decline)

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """The depth that the outlook favours."""
        return self._outlook.depths(shape)

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        """By current survival, up to the first decline."""
        if proposal.confidence is None:
            self._outlook.learn(shape, None)
            return _admission(proposal.num_drafted)
        now = Confidences.of(proposal.confidence, proposal.num_drafted)
        self._outlook.learn(shape, now)
        ranked = now.ranked()
        budget = first_decline(tokens_per_second(ranked, shape, self._prices))
        return _allocation(ranked, budget, proposal)

    def abandon(self) -> None:
        """The outlook waits for nothing any more."""
        self._outlook.abandon()


class LaggedTopK:
    """A budget from confidences two steps old, spent on the likeliest drafts of now.

    The budget is the m of the highest Theta over all m, for the survivals that the `Outlook`
    expects: what an engine can know whose host runs a step behind its device. It counts steps, and
    knows of time only what earlier steps took the host. The allocation is by current survival, ties
    to the earlier position, then to the earlier request. Without confidences every draft is
    verified. Where steps are padded to sizes, the budgets that win fill one. With `every` it looks
    at every so many steps only, and keeps depth and share for those between. With a `margin` it is
    everything or nothing, unless something between is expected to bring so much more: costs are
    known to a few percent.

    Does not look at the token it admits: the budget and the depth were settled before anything was
    drawn. Given them, k of a block is in if fewer than m drafts rank before it. Of its own block
    those are the earlier ones, never a later one (survival never rises along a block, and a tie
    goes to the earlier position). So whether k is in reads confidences up to k of its own block.
    """

    def __init__(
        self,
        costs: StepCosts,
        padding: Padding | None = None,
        every: int = 1,
        margin: float = 0.0,
    ) -> None:
        self._prices = Prices(costs, padding)
        self._outlook = Outlook(self._prices, highest, every, margin)

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """The depth that the outlook favours."""
        return self._outlook.depths(shape)

    def budget(self, shape: StepShape) -> int:
        """The best number of drafts to verify, before any is drawn.

        Args:
            shape: of the step, its draft limits being the depths. How many drafts there are may
                depend on them: the budget looks at what was asked for.
        """
        return self._outlook.budget(shape)

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        """The expected best budget, by current survival."""
        if proposal.confidence is None:
            self._outlook.learn(shape, None)
            return _admission(proposal.num_drafted)
        now = Confidences.of(proposal.confidence, proposal.num_drafted)
        self._outlook.learn(shape, now)
        return _allocation(now.ranked(), self.budget(shape), proposal)

    def device_plan(self, shape: StepShape) -> DevicePlan:
        """The budget; the device knows the survivals of now."""
        return DevicePlan(self.budget(shape))

    def learn(self, shape: StepShape, confidence: Numbers | None, num_drafted: Numbers) -> None:
        """Remember a step's confidences; they count from the second step after it."""
        now = None if confidence is None else Confidences(confidence, num_drafted)
        self._outlook.learn(shape, now)

    def step_takes_at_least(self, seconds: float) -> None:
        """Drafts that a device verifies while it would wait for its host cost nothing."""
        self._prices.at_least(seconds)

    def abandon(self) -> None:
        """The outlook waits for nothing any more."""
        self._outlook.abandon()


def _allocation(ranked: Ranked, budget: int, proposal: DraftProposal) -> Admission:
    return _admission(torch.from_numpy(ranked.lens(budget)).to(proposal.num_drafted.device))


def _admission(num_admitted: Tensor) -> Admission:
    return Admission(num_admitted, int(num_admitted.sum()))
