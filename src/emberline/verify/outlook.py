"""What survivals to expect before anything is drafted, and how deep drafting then pays.

Owns the memory of earlier confidences and the arithmetic of tokens a second. Must not know what is
done with it: admission is the planners'.

Everything here is settled by steps that lie `LAG` back or further, and by costs measured
beforehand. So it can depend on no draft of the step that it plans, and an engine whose host runs
one step behind its device knows it in time: step n's confidences come back once step n + 1 is on
its way, and are first used to plan step n + 2. Steps are told apart by their order: every one of
them is planned, and learnt unless nobody drafts in it. A plan may be kept for several steps: what
blocks are worth changes slowly, and looking costs the host as much as the rest of a step.

Planning is host time of every step, so everything is done in arrays, never request by request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from emberline.batch import StepShape
from emberline.verify.prices import Prices, chances_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BudgetRule = Callable[[Floats], int]
"""From tokens a second by budget ([N + 1], entry m with m drafts) to the budget."""

LAG = 2
"""How many steps old the confidences are that an expectation rests on."""
FORGOTTEN = 0.02
"""Part of what the means by position rest on that each step's blocks replace."""
MOST_MISSED = 8
"""Steps without confidences that the next ones may stand for, in that mean."""
PROBE_EVERY = 128
"""Steps without drafting after which one request drafts, so that the mean stays true."""
MOST_POINTS = 256
"""Budgets at which depths are compared: every one, or with more drafts every second, third .."""
STILL_STEPS = 16
"""For how many steps a plan not to draft is kept at least, with as many requests."""
MOST_CHANGE = 4
"""A kept plan is for as many requests, to within this part of them."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Drafts of a step by falling survival, ties by position, then by request. N drafts."""

    survival: Floats  # [N]
    positions: Ints  # [N]
    reqs: Ints  # [N]
    num_reqs: int  # B

    def lens(self, budget: int) -> Ints:
        """[B] drafts of each request among the first `budget`: a prefix of its block."""
        return np.bincount(self.reqs[:budget], minlength=self.num_reqs)

    def within(self, limits: Ints) -> Ranked:
        """The first `limits` [B] drafts of each block."""
        kept = self.positions < limits[self.reqs]
        return Ranked(self.survival[kept], self.positions[kept], self.reqs[kept], self.num_reqs)


@dataclass(frozen=True, slots=True)
class Confidences:
    """Confidence of each draft of B blocks, given that those before it survive."""

    values: NDArray[Any]  # [B, K] floats in [0, 1], once they are `sound`
    lens: Ints  # [B], drafts that there are of each block

    @classmethod
    def of(cls, confidence: Tensor, num_drafted: Tensor) -> Confidences:
        """Those of a proposal: [B, K] and [B], in memory of their own."""
        return cls(sound(confidence.cpu().numpy()), num_drafted.cpu().numpy().copy())

    def ranked(self) -> Ranked:
        """Every draft, the likeliest to survive first.

        Survival never rises along a block and ties go to the earlier position, so the first m
        drafts are a prefix of each block whatever m is.
        """
        num_reqs, width = self.values.shape
        # Laid position by position: a stable sort then leaves ties in the order they are to have.
        there = np.arange(width)[:, None] < self.lens
        positions, reqs = np.nonzero(there)
        survival = np.cumprod(self.values.T, axis=0, dtype=np.float64)[there]
        order = np.argsort(-survival, kind="stable")
        return Ranked(survival[order], positions[order], reqs[order], num_reqs)


def sound(values: NDArray[Any]) -> Floats:
    """Confidences within [0, 1]. NaN counts as 0: unknown is not worth verifying."""
    return np.fmin(np.fmax(values.astype(np.float64), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class _Learnt:
    """The confidences of a step, by request."""

    serials: tuple[int, ...]  # [B]
    values: NDArray[Any]  # [B, K], as they came: most steps' are never looked at
    lens: Ints  # [B], of the drafter's blocks

    def of(self, serials: tuple[int, ...]) -> _Learnt:
        """The same of the requests of another step; those that were not in this one have none."""
        if serials == self.serials:
            return self
        ours, theirs = np.array(self.serials), np.array(serials)
        order = ours.argsort()
        at = np.searchsorted(ours, theirs, sorter=order)
        rows = order[np.minimum(at, len(order) - 1)]
        return _Learnt(
            serials, self.values[rows], np.where(ours[rows] == theirs, self.lens[rows], 0)
        )


_NOTHING = _Learnt((-1,), np.ones((1, 0)), np.zeros(1, np.int64))
"""Of a step in which nobody drafted. (-1 is nobody's serial.)"""


@dataclass(slots=True)
class _Step:
    """A step that has been planned."""

    serials: tuple[int, ...]
    learnt: _Learnt | None = None  # None: its confidences have not come yet


class Outlook:
    """Survivals to expect, from the confidences of exactly `LAG` steps ago.

    A request that did not draft then (it is new, its slot was another's, it was preempted, or
    nobody drafted) is expected to do as blocks did so far, position by position. A position that
    nobody has ever drafted is expected to survive: the first steps verify everything.

    Depths and budgets are the best at some prices, `rule` saying what a budget's best is.

    Args:
        prices: of steps.
        rule: of budgets.
        every: steps for which depth and the verified share of all drafts are kept, while about as
            many requests run. 1: every step is looked at by itself.
        margin: part of the tokens a second by which anything between must be better than the
            better of whole blocks, all verified, and none. 0: any, were it the last digit of a
            measurement.
    """

    def __init__(
        self, prices: Prices, rule: BudgetRule, every: int = 1, margin: float = 0.0
    ) -> None:
        self._prices = prices
        self._rule = rule
        self._margin = margin
        self._every = every
        self._age = every  # steps since the plan that is kept; `every`: it is not good any more
        self._depth = 0  # of that plan
        self._share = 1.0  # of its drafts that are verified
        self._is_whole = False  # whether nothing is better than all of them by the margin
        self._num_reqs = 0  # that it was made for
        self._is_blind = False  # whether it was made by the means, for most of its requests
        self._steps: deque[_Step] = deque()  # the latest, at most `LAG` once one is planned
        self._known = _NOTHING  # of the step `LAG` before the one being planned
        self._mean = np.ones(0)  # by position
        self._weight = np.zeros(0)  # of the blocks in the mean, by position
        self._num_missed = 0  # steps without drafts since then
        self._ranked: Ranked | None = None  # drafts that the step being planned could draw
        self._num_undrafted = 0  # steps in a row
        self._num_probes = 0

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """[B] drafts to draw: the one depth for all at which the most tokens a second come.

        With the budget that the rule will give: what it would not verify is not worth drawing.
        Where that depth is 0 nobody drafts, but for a probe now and then: confidences come only
        from drafts, and what was true of other requests may not be of these.

        Asked once a step, in the order of the steps.

        Raises:
            RuntimeError: the step `LAG` before this one was never learnt.
        """
        self._begin(shape.serials)
        depths = shape.draft_limits
        if any(depths):
            self._age += 1
            depths = self._depths(shape) if self._is_due(shape) else self._kept_depths(shape)
        if not any(depths):
            self._steps[-1].learnt = _NOTHING
        return depths

    def budget(self, shape: StepShape) -> int:
        """Drafts to verify of those drawn in this step, all requests together.

        Asked after the depths of the step, which are the draft limits of `shape`.
        """
        drawn = sum(shape.draft_limits)
        if self._ranked is None:
            return math.ceil(self._share * drawn)
        if self._is_whole:
            self._share = 1.0
            return drawn
        ranked = self._ranked.within(np.array(shape.draft_limits))
        budget = self._rule(tokens_per_second(ranked, shape, self._prices))
        self._share = budget / drawn
        return budget

    def learn(self, shape: StepShape, now: Confidences | None) -> None:
        """Take the confidences of the oldest step that waits for its own.

        Args:
            shape: of that step. What is predicted teaches nothing about the drafter.
            now: `sound` or not, and never changed again; None: the drafter has none.

        Raises:
            RuntimeError: no step waits, or it is one of other requests.
        """
        step = next((step for step in self._steps if step.learnt is None), None)
        if step is None or step.serials != shape.serials:
            raise RuntimeError("confidences of a step that does not wait for any")
        if now is None:
            step.learnt = _NOTHING
        else:
            lens = np.where(chances_of(shape) > 0, 0, now.lens) if shape.predicted else now.lens
            step.learnt = _Learnt(shape.serials, now.values, lens)

    def abandon(self) -> None:
        """Wait for no confidences any more: the steps that should bring them have failed."""
        for step in self._steps:
            if step.learnt is None:
                step.learnt = _NOTHING

    def expected(self, shape: StepShape) -> Confidences:
        """What to expect of blocks drawn up to `shape.draft_limits`."""
        return self._expected(self._known.of(shape.serials), shape)

    def _expected(self, known: _Learnt, shape: StepShape) -> Confidences:
        limits = np.array(shape.draft_limits)
        values = np.ones((len(limits), limits.max()))
        mean = self._mean[: values.shape[1]]
        values[:, : len(mean)] = mean
        theirs = sound(known.values[:, : values.shape[1]])
        there = np.arange(theirs.shape[1]) < known.lens[:, None]
        np.copyto(values[:, : theirs.shape[1]], theirs, where=there)
        if shape.predicted:
            chances = chances_of(shape)[:, None]
            values = np.where(chances > 0, chances, values)
        return Confidences(values, limits)

    def _begin(self, serials: tuple[int, ...]) -> None:
        """Go on to the next step: the one `LAG` before it begins to count."""
        self._ranked = None
        if len(self._steps) == LAG:
            learnt = self._steps.popleft().learnt
            if learnt is None:
                raise RuntimeError(f"the confidences of {LAG} steps ago have not come")
            self._known = learnt
            self._num_missed += learnt is _NOTHING
        self._steps.append(_Step(serials))

    def _is_due(self, shape: StepShape) -> bool:
        """Whether this step is to be looked at by itself."""
        change = len(shape.serials) - self._num_reqs
        # Fewer requests make a step's drafts cheaper: if all are verified, they go on to be.
        has_changed = (change if self._is_whole else abs(change)) * MOST_CHANGE > self._num_reqs
        is_probe = self._num_undrafted + 1 == PROBE_EVERY
        good_for = self._every
        if self._is_blind and self._depth:
            good_for = min(good_for, LAG)  # then its own confidences have come
        elif self._is_blind and self._known is _NOTHING and not change:
            # Where nobody drafts nothing is learnt, and for as many requests nothing would change.
            good_for = max(good_for, STILL_STEPS)
        return self._age >= good_for or bool(shape.predicted) or is_probe or has_changed

    def _kept_depths(self, shape: StepShape) -> tuple[int, ...]:
        """Those of the plan that is kept."""
        if not self._depth:
            self._num_undrafted += 1
        if self._depth >= max(shape.draft_limits):
            return shape.draft_limits
        return tuple([min(limit, self._depth) for limit in shape.draft_limits])

    def _depths(self, shape: StepShape) -> tuple[int, ...]:
        self._age, self._num_reqs = 0, len(shape.serials)
        if self._prices.is_free(shape):
            self._is_blind, self._is_whole, self._share = False, True, 1.0
            self._depth, self._num_undrafted = max(shape.draft_limits), 0
            return shape.draft_limits
        self._average(self._known)
        known = self._known.of(shape.serials)
        self._is_blind = 2 * int(np.count_nonzero(known.lens)) < len(known.lens)
        expected = self._expected(known, shape)
        limits, chances = expected.lens, chances_of(shape)
        drawn = (limits > 0) & (chances == 0)
        self._ranked = expected.ranked()
        every = tokens_per_second_by_depth(self._ranked, shape, self._prices)
        best = [theta[self._rule(theta)] for theta in every]
        none, whole, near = best[0], every[-1, -1], every.max() / (1 + self._margin)
        if self._is_blind and self._every > LAG:
            # What is kept for many steps must not rest on what others did: whole blocks show it.
            self._is_whole = none < max(best)
        else:
            self._is_whole = self._margin > 0 and bool(whole >= max(none, near))
        if self._is_whole:
            depth = len(best) - 1
        elif self._margin > 0 and none >= near:
            depth = 0
        else:  # A deeper block at no cost is welcome: what is drawn can still be left unverified.
            depth = int(np.flatnonzero(np.array(best) == max(best))[-1])
        self._depth = depth
        if depth or not drawn.any():
            self._num_undrafted = 0
        else:
            self._num_undrafted += 1
            if self._num_undrafted == PROBE_EVERY:
                self._num_undrafted = 0
                return self._probe(limits, drawn)
        return tuple(np.where(drawn, np.minimum(limits, depth), limits).tolist())

    def _probe(self, limits: Ints, drawn: Bools) -> tuple[int, ...]:
        """One request's whole block; another's the next time."""
        able = np.flatnonzero(drawn)
        chosen = able[self._num_probes % len(able)]
        self._num_probes += 1
        depths = np.where(drawn & (np.arange(len(limits)) != chosen), 0, limits)
        return tuple(depths.tolist())

    def _average(self, learnt: _Learnt) -> None:
        """Take a step into the means: each block counts as much as it is likely to get there.

        So the last requests of a batch, which are those that accept the least, say no more of the
        next batch than they were. A probe stands for the steps before it: else it would take
        thousands of them to unlearn.
        """
        width = int(learnt.lens.max(initial=0))
        if not width:
            return
        missed = self._num_missed
        least_rate = 1 - (1 - FORGOTTEN) ** min(1 + missed, MOST_MISSED) if missed else 0.0
        self._num_missed = 0
        more = max(0, width - len(self._mean))
        if more:
            self._mean = np.append(self._mean, np.ones(more))
            self._weight = np.append(self._weight, np.zeros(more))
        values = sound(learnt.values[:, :width])
        reaching = np.ones_like(values)
        np.cumprod(values[:, :-1], axis=1, out=reaching[:, 1:])
        reaching *= np.arange(width) < learnt.lens[:, None]
        weight = reaching.sum(axis=0)
        seen = np.flatnonzero(weight > 0)
        weight = weight[seen]
        mean = (reaching * values).sum(axis=0)[seen] / weight
        rate = weight / ((1 - FORGOTTEN) * self._weight[seen] + weight)
        rate = np.maximum(rate, least_rate)
        self._weight[seen] = weight / rate
        self._mean[seen] += rate * (mean - self._mean[seen])


def first_decline(theta: Floats) -> int:
    """The budget before the first one that brings less than it: DSpark, Algorithm 1."""
    declines = np.diff(theta) < 0
    return int(declines.argmax()) if declines.any() else len(declines)


def highest(theta: Floats) -> int:
    """The best of all budgets, the smallest of equals."""
    return int(theta.argmax())


def tokens_per_second(ranked: Ranked, shape: StepShape, prices: Prices) -> Floats:
    """Theta(m): expected tokens a second of a step with the m likeliest drafts, m = 0 .. N.

    (R + the sum of their survivals) / (seconds to draft and to verify), R the requests that emit
    a token anyway: DSpark, section 4.

    Args:
        ranked: N drafts.
        shape: what the step carries besides; its draft limits say what was drawn.
        prices: measured seconds.

    Returns:
        [N + 1].
    """
    gains = np.zeros(len(ranked.survival) + 1)
    ranked.survival.cumsum(out=gains[1:])
    seconds: Floats = prices.of(shape, len(ranked.survival))[-1]
    return (shape.num_emitting + gains) / seconds


def tokens_per_second_by_depth(ranked: Ranked, shape: StepShape, prices: Prices) -> Floats:
    """Theta of blocks drawn 0 .. D deep, D the deepest that the draft limits allow.

    Depth d counts the drafts of the first d positions, and all of those that are predicted. Budgets
    are those of `tokens_per_second` at that depth, the same one perhaps several times: a column is
    what ranks up to a draft, or to every n-th, whatever the depth.

    Returns:
        [D + 1, at most `MOST_POINTS` + 1].
    """
    num_drafts = len(ranked.survival)
    seconds = prices.of(shape, num_drafts)
    first = ranked.positions + 1  # depth from which on a draft counts
    if shape.predicted:
        first = np.where(chances_of(shape)[ranked.reqs] > 0, 0, first)
    step = -(-num_drafts // MOST_POINTS)
    size = (len(seconds), -(-num_drafts // step))
    column = first * size[1] + np.arange(size[1]).repeat(step)[:num_drafts]
    gains, budgets = np.zeros((2, size[0], size[1] + 1))
    for sums, weights in ((gains, ranked.survival), (budgets, None)):
        found = np.bincount(column, weights, size[0] * size[1]).reshape(size)
        found.cumsum(axis=0).cumsum(axis=1, out=sums[:, 1:])
    return (shape.num_emitting + gains) / np.take_along_axis(seconds, budgets.astype(np.int64), 1)
