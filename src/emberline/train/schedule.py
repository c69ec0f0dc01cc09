"""Numbers that change over a run: a constant, or straight lines between points. Knows no tensors.

`[[0.0, 1.0], [0.4, 1.0], [0.4, 0.1]]` is 1.0 for the first 40 % of the run and 0.1 from there on;
`[[0.0, 0.0], [1.0, 0.9]]` rises from 0 to 0.9.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

MOST = sys.float_info.max
Point = tuple[float, float]  # fraction of the run that is done, value there
Schedule = float | tuple[Point, ...]


def read_schedule(name: str, raw: object) -> Schedule:
    """A schedule from a number or a list of [fraction, value].

    Raises:
        ValueError: anything else, naming the field.
    """
    remedy = f"{name} must be a finite number or a list of [fraction of the run, value]"
    if _is_number(raw):
        return float(raw)  # type: ignore[arg-type]
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise ValueError(f"{remedy}, got {raw!r}")
    points: list[Point] = []
    for point in raw:
        pair = isinstance(point, Sequence) and len(point) == 2
        if not pair or not all(map(_is_number, point)):
            raise ValueError(f"{remedy}, got {point!r}")
        points.append((float(point[0]), float(point[1])))
    fractions = [fraction for fraction, _ in points]
    if fractions != sorted(fractions) or fractions[0] < 0 or fractions[-1] > 1:
        raise ValueError(f"{name}: fractions must rise from 0 to 1, got {fractions}")
    return tuple(points)


def value_at(schedule: Schedule, progress: float) -> float:
    """The schedule's value when `progress` (0 .. 1) of the run is done.

    The first value holds before the first point, the last one after the last. Of two points at
    one fraction the later holds from there on.
    """
    if isinstance(schedule, float | int):
        return float(schedule)
    before = [point for point in schedule if point[0] <= progress]
    if not before:
        return schedule[0][1]
    if len(before) == len(schedule):
        return schedule[-1][1]
    (start, low), (end, high) = before[-1], schedule[len(before)]
    return low + (high - low) * (progress - start) / (end - start)


def most(schedule: Schedule) -> float:
    """The largest value that it ever takes."""
    if isinstance(schedule, float | int):
        return float(schedule)
    return max(value for _, value in schedule)


def least(schedule: Schedule) -> float:
    """The smallest value that it ever takes."""
    if isinstance(schedule, float | int):
        return float(schedule)
    return min(value for _, value in schedule)


def _is_number(raw: object) -> bool:
    return isinstance(raw, int | float) and not isinstance(raw, bool) and abs(raw) <= MOST
