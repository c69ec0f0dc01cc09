"""What survivals to expect before anything is drafted, and how deep drafting then pays.

Owns the memory of earlier confidences and the arithmetic of tokens a second. Must not know what is
done with it: admission is the planners'.

Everything here is settled by steps that lie at least two back, and by costs measured beforehand. So
it can depend on no draft of the step that it plans, and an engine whose host runs one step behind
its device knows it in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from emberline.batch import DraftProposal, StepShape
from emberline.verify.step_cost import StepCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BudgetRule = Callable[[Floats], int]
"""From tokens a second by budget ([N + 1], entry m with m drafts) to the budget."""

LAG = 2
"""How many steps old the confidences are that an expectation rests on."""
LEAST_WEIGHT = 0.02
"""Share of the newest step in the mean by position; larger while there are few."""
PROBE_EVERY = 32
"""Steps without drafting after which one request drafts, so that the mean stays true."""


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

    def within(self, depth: int, whole: NDArray[np.bool_]) -> Ranked:
        """Those of the first `depth` positions, and all of the requests in `whole` [B]."""
        kept = (self.positions < depth) | whole[self.reqs]
        return Ranked(self.survival[kept], self.positions[kept], self.reqs[kept], self.num_reqs)


@dataclass(frozen=True, slots=True)
class Confidences:
    """Confidence of each draft of B blocks, given that those before it survive."""

    values: Floats  # [B, K] in [0, 1]
    lens: Ints  # [B], drafts that there are of each block

    @classmethod
    def of(cls, proposal: DraftProposal) -> Confidences:
        """Those of a proposal that has them. NaN counts as 0: unknown is not worth verifying."""
        assert proposal.confidence is not None
        values = proposal.confidence.double().nan_to_num(0.0).clamp(0.0, 1.0).cpu().numpy()
        return cls(values, proposal.num_drafted.cpu().numpy())

    def ranked(self) -> Ranked:
        """Every draft, the likeliest to survive first.

        Survival never rises along a block and ties go to the earlier position, so the first m
        drafts are a prefix of each block whatever m is.
        """
        num_reqs, width = self.values.shape
        there = np.arange(width) < self.lens[:, None]
        reqs, positions = np.nonzero(there)
        survival = np.cumprod(self.values, axis=1, dtype=np.float64)[there]
        order = np.lexsort((reqs, positions, -survival))
        return Ranked(survival[order], positions[order], reqs[order], num_reqs)


class Outlook:
    """Survivals to expect, from the confidences of exactly `LAG` steps ago.

    A request that did not draft then (it is new, its slot was another's, it was preempted, or
    nobody drafted) is expected to do as blocks did so far, position by position. A position that
    nobody has ever drafted is expected to survive: the first steps verify everything.
    """

    def __init__(self) -> None:
        self._recent: deque[dict[int, Floats]] = deque(({} for _ in range(LAG)), maxlen=LAG)
        self._mean = np.ones(0)  # by position
        self._num_seen = np.zeros(0, dtype=np.int64)  # steps in the mean, by position
        self._num_undrafted = 0  # steps in a row
        self._num_probes = 0

    def note(self, shape: StepShape, now: Confidences) -> None:
        """Remember a step's confidences; those that become `LAG` steps old begin to count."""
        self._push(
            {
                serial: now.values[req, : now.lens[req]]
                for req, serial in enumerate(shape.serials)
                if now.lens[req] and not shape.chance(req)
            }
        )

    def expected(self, shape: StepShape) -> Confidences:
        """What to expect of blocks drawn up to `shape.draft_limits`."""
        width = max(shape.draft_limits)
        mean = self._mean[:width]
        values = np.ones((len(shape.serials), width))
        values[:, : len(mean)] = mean
        for req, serial in enumerate(shape.serials):
            known = self._recent[0].get(serial, mean[:0])[:width]
            values[req, : len(known)] = known
            if shape.chance(req):
                values[req] = shape.chance(req)
        return Confidences(values, np.array(shape.draft_limits))

    def depths(self, shape: StepShape, costs: StepCosts, rule: BudgetRule) -> tuple[int, ...]:
        """[B] drafts to draw: the one depth for all at which the most tokens a second come.

        With the budget that `rule` will give: what it would not verify is not worth drawing.
        Where that depth is 0 nobody drafts, but for a probe now and then: confidences come only
        from drafts, and what was true of other requests may not be of these.
        """
        if not any(shape.draft_limits):
            self._push({})
            return shape.draft_limits
        ranked = self.expected(shape).ranked()
        best = []
        whole = np.array([shape.chance(req) > 0 for req in range(len(shape.serials))])
        for depth in range(deepest(shape) + 1):
            drawn = ranked.within(depth, whole)
            theta = tokens_per_second(drawn, limit_depth(shape, depth), costs)
            best.append(theta[rule(theta)])
        # A deeper block at no cost is welcome: what is drawn can still be left unverified.
        depth = int(np.flatnonzero(np.array(best) == max(best))[-1])
        limits = limit_depth(shape, depth).draft_limits
        if depth or not deepest(shape):
            self._num_undrafted = 0
            return limits
        self._num_undrafted += 1
        if self._num_undrafted == PROBE_EVERY:
            self._num_undrafted = 0
            return self._probe(shape)
        if not any(limits):
            self._push({})
        return limits

    def _probe(self, shape: StepShape) -> tuple[int, ...]:
        """One request's whole block; another's the next time."""
        limits = shape.draft_limits
        able = [req for req, limit in enumerate(limits) if limit and not shape.chance(req)]
        chosen = able[self._num_probes % len(able)]
        self._num_probes += 1
        without = limit_depth(shape, 0).draft_limits
        return (*without[:chosen], limits[chosen], *without[chosen + 1 :])

    def _push(self, confidences: dict[int, Floats]) -> None:
        self._recent.append(confidences)
        self._average(self._recent[0])

    def _average(self, confidences: dict[int, Floats]) -> None:
        """Take a step into the means: each block counts as much as it is likely to get there."""
        width = max((len(row) for row in confidences.values()), default=0)
        if width > len(self._mean):
            more = width - len(self._mean)
            self._mean = np.append(self._mean, np.ones(more))
            self._num_seen = np.append(self._num_seen, np.zeros(more, dtype=np.int64))
        total, weight = np.zeros(width), np.zeros(width)
        for row in confidences.values():
            reaching = np.append(1.0, np.cumprod(row)[:-1])
            total[: len(row)] += reaching * row
            weight[: len(row)] += reaching
        seen = np.flatnonzero(weight > 0)
        self._num_seen[seen] += 1
        rate = np.maximum(1 / self._num_seen[seen], LEAST_WEIGHT)
        self._mean[seen] += rate * (total[seen] / weight[seen] - self._mean[seen])


def first_decline(theta: Floats) -> int:
    """The budget before the first one that brings less than it: DSpark, Algorithm 1."""
    declines = np.diff(theta) < 0
    return int(declines.argmax()) if declines.any() else len(declines)


def highest(theta: Floats) -> int:
    """The best of all budgets, the smallest of equals."""
    return int(theta.argmax())


def limit_depth(shape: StepShape, depth: int) -> StepShape:
    """The same step with no block drawn deeper than `depth`. What is predicted is not drawn."""
    limits = tuple(
        limit if shape.chance(req) else min(limit, depth)
        for req, limit in enumerate(shape.draft_limits)
    )
    return replace(shape, draft_limits=limits)


def tokens_per_second(ranked: Ranked, shape: StepShape, costs: StepCosts) -> Floats:
    """Theta(m): expected tokens a second of a step with the m likeliest drafts, m = 0 .. N.

    (R + the sum of their survivals) / (seconds to draft and to verify), R the requests that emit
    a token anyway: DSpark, section 4.

    Args:
        ranked: N drafts.
        shape: what the step carries besides; its draft limits say what was drawn.
        costs: measured seconds.

    Returns:
        [N + 1].
    """
    gains = shape.num_emitting + np.append(0.0, np.cumsum(ranked.survival))
    tokens = shape.num_known + np.arange(len(gains))
    seconds = costs.target_seconds(len(shape.serials), tokens)
    drawn = drawn_limits(shape)
    return gains / (seconds + costs.draft_seconds(len(drawn), max(drawn, default=0)))


def drawn_limits(shape: StepShape) -> list[int]:
    """Limits of the blocks that the drafter draws."""
    limits = enumerate(shape.draft_limits)
    return [limit for req, limit in limits if limit and not shape.chance(req)]


def deepest(shape: StepShape) -> int:
    """The deepest of those; 0: the drafter draws none."""
    return max(drawn_limits(shape), default=0)
