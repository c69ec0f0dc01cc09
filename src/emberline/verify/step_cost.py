"""What a step costs on this machine: seconds against requests, tokens and drafts.

Owns the table and its lookup. Must not know how it was measured, nor how files spell it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Point = tuple[int, int, float]

FAR = 1 << 40
"""A count that no step reaches: the knot that carries a curve past its last measured point."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds, interpolated between the points and extended past the last ones.

    Linear in tokens (or drafts) between the points of one number of requests, then linear between
    the two nearest numbers of requests. Past the last points the last slope goes on; before the
    first ones the first value holds. More tokens never cost less.

    A table may be without draft costs: those of other engines know whole steps only. Drafting then
    counts as free, and what it took is in `target` of every step, drafted or not.

    Raises `ValueError` naming the field and the point that has no meaning.
    """

    target: tuple[Point, ...]  # (requests, tokens, seconds) of everything but drafting
    draft: tuple[Point, ...]  # (requests that draft, drafts a block, seconds)
    _target: _Surface = field(init=False, repr=False, compare=False)
    _draft: _Surface = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target is empty: it needs at least one point")
        _check("target", "tokens", self.target)
        _check("draft", "drafts", self.draft)
        object.__setattr__(self, "_target", _Surface(self.target))
        object.__setattr__(self, "_draft", _Surface(self.draft))

    def target_seconds(self, num_reqs: int, num_tokens: Ints) -> Floats:
        """Seconds of everything but drafting, for steps of so many tokens. [N] -> [N]."""
        return self._target.curve(num_reqs).at(num_tokens)

    def draft_seconds(self, num_reqs: int, num_drafts: int) -> float:
        """Seconds to draft; 0 when nobody does, and where draft costs are unknown."""
        return float(self.draft_curve(num_reqs, np.array(num_drafts)))

    def draft_curve(self, num_reqs: int, num_drafts: Ints) -> Floats:
        """The same for blocks of several depths. [N] -> [N]."""
        if not (num_reqs and self.draft):
            return np.zeros(num_drafts.shape)
        return np.where(num_drafts > 0, self._draft.curve(num_reqs).at(num_drafts), 0.0)


@dataclass(frozen=True, slots=True)
class _Curve:
    """Seconds against a count: piecewise linear, never falling."""

    counts: Floats  # [N + 1], rising; the last is FAR
    seconds: Floats  # [N + 1]

    @classmethod
    def through(cls, counts: Floats, seconds: Floats) -> _Curve:
        """Through N points, and on with the slope of the last two."""
        seconds = _rising(seconds)
        slope = 0.0
        if len(counts) > 1:
            slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        end = seconds[-1] + slope * (FAR - counts[-1])
        return cls(np.append(counts, FAR), np.append(seconds, end))

    @property
    def first_slope(self) -> float:
        """Seconds a count between the first two knots."""
        return float((self.seconds[1] - self.seconds[0]) / (self.counts[1] - self.counts[0]))

    def at(self, counts: Ints | Floats | int) -> Floats:
        """Seconds at each count, of the same shape."""
        return np.asarray(np.interp(counts, self.counts, self.seconds))


def _rising(seconds: Floats) -> Floats:
    """Times of rising counts, with those lowered that a later one is under."""
    # Measured times waver, and a planner that looks for the best of many counts would find just
    # the dents. What disturbs a measurement only adds to it: of two points of which the later
    # is the cheaper, the earlier is the one that is wrong.
    return np.minimum.accumulate(seconds[::-1])[::-1]


class _Surface:
    """One curve a number of requests: those measured, and those between once asked for."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._measured: dict[int, _Curve] = {}  # fewest requests first
        for num_reqs, row in groupby(sorted(points), key=lambda point: point[0]):
            _, counts, seconds = zip(*row, strict=True)
            curve = _Curve.through(np.array(counts, float), np.array(seconds, float))
            self._measured[num_reqs] = curve
        # A planner asks for few numbers of requests, and for each of them in every step.
        self._known = dict(self._measured)

    def curve(self, num_reqs: int) -> _Curve:
        """The curve of any number of requests."""
        if num_reqs not in self._known:
            self._known[num_reqs] = self._between(num_reqs)
        return self._known[num_reqs]

    def _between(self, num_reqs: int) -> _Curve:
        measured = list(self._measured)
        if num_reqs < measured[0] or len(measured) == 1:
            return self._measured[measured[0]]
        above = min(bisect(measured, num_reqs), len(measured) - 1)
        low, high = measured[above - 1], measured[above]
        few, many = self._measured[low], self._measured[high]
        counts = np.union1d(few.counts, many.counts)
        share = (num_reqs - low) / (high - low)
        if share > 1:
            rise = np.maximum(many.at(counts) - few.at(counts), 0.0)
            return _Curve(counts, _rising(many.at(counts) + (share - 1) * rise))
        # A step has at least a token a request, so the curve of more requests begins later. Held
        # at its first value it would hide what the first tokens of this one cost.
        early = counts < many.counts[0]
        down = many.at(counts) - many.first_slope * (many.counts[0] - counts)
        more = np.where(early, np.maximum(down, few.at(counts)), many.at(counts))
        return _Curve(counts, _rising((1 - share) * few.at(counts) + share * more))


def _check(name: str, count: str, points: Iterable[Point]) -> None:
    seen = set()
    for index, point in enumerate(points):
        where = f"{name}[{index}]"
        if len(point) != 3:
            raise ValueError(f"{where} must be requests, {count} and seconds, got {point!r}")
        num_reqs, amount, seconds = point
        for what, value, least in (("requests", num_reqs, 1), (count, amount, 0)):
            if type(value) is not int or not least <= value < FAR:
                raise ValueError(f"{where}: {what} must be an integer from {least}, got {value!r}")
        if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
            raise ValueError(f"{where}: seconds must be positive and finite, got {seconds!r}")
        if (num_reqs, amount) in seen:
            raise ValueError(f"{where}: {num_reqs} requests with {amount} {count} come twice")
        seen.add((num_reqs, amount))
