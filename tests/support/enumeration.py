"""Randomness that takes every branch, with its exact probability.

The noise behind a key is remembered, across draws and across steps: what an earlier draw revealed
of it conditions the later ones. A coin's noise is a uniform u, known to lie in an interval. A
categorical's is Gumbel noise g over three ids; with E = exp(-g) independent exponentials,

    argmax(log w + g) = argmin(E / w),

which depends on E / sum(E) only, a point uniform on the triangle. "Id i wins under w" is a convex
polygon in it, so what is known is a polygon, and a probability a ratio of areas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from emberline.batch import DrawKeys, Purpose

Key = tuple[int, int]  # position, purpose
Point = tuple[float, float]
Polygon = tuple[Point, ...]
Interval = tuple[float, float]
Noise = dict[Key, Polygon | Interval]

TRIANGLE: Polygon = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
NEGLIGIBLE = 1e-15


@dataclass
class Branch:
    """One way through a step: the outcomes to take, and what was taken."""

    noise: Noise
    script: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    probs: list[list[float]] = field(default_factory=list)

    @property
    def probability(self) -> float:
        return math.prod(
            probs[outcome] for outcome, probs in zip(self.taken, self.probs, strict=True)
        )

    def choose(self, probs: list[float]) -> int:
        depth = len(self.taken)
        if depth < len(self.script):
            outcome = self.script[depth]
        else:
            outcome = next(i for i, prob in enumerate(probs) if prob > NEGLIGIBLE)
        self.taken.append(outcome)
        self.probs.append(probs)
        return outcome

    def others(self) -> list[list[int]]:
        """Scripts of the branches that leave this one after its own script."""
        return [
            [*self.taken[:depth], other]
            for depth in range(len(self.script), len(self.taken))
            for other in range(self.taken[depth] + 1, len(self.probs[depth]))
            if self.probs[depth][other] > NEGLIGIBLE
        ]


class EnumeratingDraws:
    """`Draws` of a batch of branches; a request's seed is the index of its branch. V = 3."""

    def __init__(self, branches: list[Branch]) -> None:
        self.branches = branches

    def categorical(self, logits: Tensor, keys: DrawKeys) -> Tensor:
        return self.proportional(logits.double().softmax(-1), keys)

    def proportional(self, weights: Tensor, keys: DrawKeys) -> Tensor:
        ids = []
        for row, key, branch in zip(weights.tolist(), _names(keys), self._of(keys), strict=True):
            known = branch.noise.get(key, TRIANGLE)
            parts = [_where_wins(known, row, i) for i in range(3)]  # type: ignore[arg-type]
            areas = [_area(part) for part in parts]
            outcome = branch.choose([area / sum(areas) for area in areas])
            branch.noise[key] = parts[outcome]
            ids.append(outcome)
        return torch.tensor(ids, dtype=torch.int64)

    def coin(self, probs: Tensor, keys: DrawKeys) -> Tensor:
        heads = []
        for prob, key, branch in zip(probs.tolist(), _names(keys), self._of(keys), strict=True):
            low, high = branch.noise.get(key, (0.0, 1.0))
            cut = min(max(prob, low), high)  # type: ignore[type-var]
            share = (cut - low) / (high - low)  # type: ignore[operator]
            outcome = branch.choose([share, 1 - share])
            branch.noise[key] = (cut, high) if outcome else (low, cut)  # type: ignore[assignment]
            heads.append(outcome == 0)
        return torch.tensor(heads, dtype=torch.bool)

    def _of(self, keys: DrawKeys) -> list[Branch]:
        return [self.branches[seed] for seed in keys.seeds.tolist()]


def freeze(noise: Noise, after: int) -> tuple[object, ...]:
    """What is known of the noise that may be asked for again, as a dictionary key.

    That is noise at positions from `after` on. A block's own draws are never asked for twice.
    """
    return tuple(
        (key, tuple(_rounded(value) for value in known))
        for key, known in sorted(noise.items())
        if key[0] >= after and key[1] < len(Purpose)
    )


def _rounded(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(round(x, 13) for x in value)
    return round(value, 13)  # type: ignore[call-overload]


def _names(keys: DrawKeys) -> list[Key]:
    return list(zip(keys.positions.tolist(), keys.purposes.tolist(), strict=True))


def _where_wins(polygon: Polygon, weights: list[float], winner: int) -> Polygon:
    """The part of the polygon in which E[winner] / weights[winner] is the least."""
    for other in range(3):
        if other != winner:
            polygon = _clip(polygon, weights, winner, other)
    return polygon


def _clip(polygon: Polygon, weights: list[float], winner: int, other: int) -> Polygon:
    def lead(point: Point) -> float:
        e = (*point, 1.0 - point[0] - point[1])
        return weights[winner] * e[other] - weights[other] * e[winner]

    kept: list[Point] = []
    for start, end in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        a, b = lead(start), lead(end)
        if a >= 0:
            kept.append(start)
        if (a > 0 > b) or (a < 0 < b):
            t = a / (a - b)
            kept.append((start[0] + t * (end[0] - start[0]), start[1] + t * (end[1] - start[1])))
    return tuple(kept)


def _area(polygon: Polygon) -> float:
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairs)) / 2
