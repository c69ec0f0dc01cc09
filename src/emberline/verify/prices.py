"""What a step would cost: seconds by the depth of its blocks and the drafts that it verifies.

Owns what of a step counts, and the sizes that steps run at. Must not know confidences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from emberline.batch import StepShape
from emberline.verify.step_cost import Floats, Ints, StepCosts

Padding = Callable[[int, int], Sequence[int]]
"""From requests and the depth of their blocks to the token counts that steps run at, rising."""
KEPT_PRICES = 64
"""Kinds of steps whose seconds are kept: decode steps come again and again."""


class Prices:
    """Seconds of steps by the depth of their blocks and the drafts that they verify.

    Chunks of prompts are left out: they take what they take, whatever is drafted beside them. If
    they counted, drafts would look cheap that make a long step longer than they are worth.

    Where steps are padded, one costs what the smallest size does that holds it: costs are stairs,
    and the best budgets fill a size. Over the largest size a step runs as it is.

    A step that is over before the host has planned the next one has taken as long as the host.
    """

    def __init__(self, costs: StepCosts, padding: Padding | None = None) -> None:
        self._costs = costs
        self._padding = padding
        self._kept: dict[tuple[int, ...], Floats] = {}
        self._least = 0.0  # seconds of any step

    def at_least(self, seconds: float) -> None:
        """Let no step take less, as the host would make it wait."""
        self._least = seconds

    def is_free(self, shape: StepShape) -> bool:
        """Whether a step that drafts and verifies all it can takes no longer than the host."""
        if not self._least:
            return False
        drawn, num_reqs = _drawn(shape), len(shape.serials)
        depth, tokens = int(drawn.max(initial=0)), shape.num_known + sum(shape.draft_limits)
        if self._padding is not None:
            tokens = int(_held(np.array([tokens]), self._padding(num_reqs, depth))[0])
        seconds = self._costs.target_seconds(num_reqs, np.array([tokens]))[0]
        seconds += self._costs.draft_seconds(len(drawn), depth)
        return bool(seconds <= self._least)

    def of(self, shape: StepShape, num_drafts: int) -> Floats:
        """[D + 1, N + 1]: blocks drawn 0 .. D deep, D the deepest of the draft limits.

        Args:
            shape: of the step.
            num_drafts: N, most that are verified.
        """
        drawn = _drawn(shape)
        num_reqs, most = len(shape.serials), int(drawn.max(initial=0))
        key = num_reqs, shape.num_known, shape.num_emitting, len(drawn), most, num_drafts
        if key not in self._kept:
            if len(self._kept) == KEPT_PRICES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._seconds(*key)
        return np.maximum(self._kept[key], self._least)

    def _seconds(
        self,
        num_reqs: int,
        num_known: int,
        num_emitting: int,
        num_drawn: int,
        most: int,
        num_drafts: int,
    ) -> Floats:
        tokens = num_known + np.arange(num_drafts + 1)
        drafting = self._costs.draft_curve(num_drawn, np.arange(most + 1))
        seconds = self._target(num_reqs, tokens, most) + drafting[:, None]
        if num_known > num_emitting:
            alone = self._costs.target_seconds(num_emitting, np.array([num_emitting]))
            seconds += alone - seconds[:1, :1]
        return seconds

    def _target(self, num_reqs: int, tokens: Ints, most: int) -> Floats:
        """[D + 1, N + 1] or [1, N + 1]: the target's part, by depth where sizes depend on it."""
        if self._padding is None:
            return self._costs.target_seconds(num_reqs, tokens)[None]
        rows: dict[tuple[int, ...], Floats] = {}  # depths that share their sizes share these
        sizes = [tuple(self._padding(num_reqs, depth)) for depth in range(most + 1)]
        for row in set(sizes):
            rows[row] = self._costs.target_seconds(num_reqs, _held(tokens, row))
        return np.stack([rows[row] for row in sizes])


def in_granules_of(granule: int) -> Padding:
    """Steps run at multiples of `granule` tokens."""

    def sizes(num_reqs: int, depth: int) -> range:
        return range(granule, num_reqs * (1 + depth) + granule, granule)

    return sizes


def _held(tokens: Ints, sizes: Sequence[int]) -> Ints:
    """The smallest size that holds each number of tokens; the number itself where none does."""
    held: Ints = np.append(sizes, 0)[np.searchsorted(sizes, tokens)]
    return np.maximum(tokens, held)


def _drawn(shape: StepShape) -> Ints:
    """Limits of the blocks that the drafter draws."""
    limits = np.array(shape.draft_limits)
    drawn: Ints = limits[(limits > 0) & (chances_of(shape) == 0)]
    return drawn


def chances_of(shape: StepShape) -> Floats:
    """[B], as `StepShape.chance` gives them."""
    return np.array(shape.predicted) if shape.predicted else np.zeros(len(shape.serials))
