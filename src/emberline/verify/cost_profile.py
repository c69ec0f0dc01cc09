"""A table of step costs with what it was measured on: the value that is kept in files.

Owns those facts and their native JSON. Must not know how they are found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from emberline.verify.step_cost import Point, StepCosts

FORMAT = "emberline-step-costs"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """Everything that step costs depend on. Two equal values: the costs of one hold for the other.

    Models are told apart by name and shape: the values of weights cost nothing.
    """

    model: str  # name, and a digest of its config
    draft: str | None  # likewise; the drafter's name where there is no checkpoint; None: no drafter
    dtype: str
    device: str
    processor: str  # the name of the CPU or GPU
    num_cores: int  # of the CPU that this process may use
    threads: int  # of the CPU's kernels
    layout: str
    max_num_reqs: int
    max_draft_tokens: int  # deepest block measured
    context_length: int  # tokens with KV before the step, of every request
    torch: str
    emberline: str


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Step costs as measured."""

    costs: StepCosts
    measured_on: MeasuredOn
    date: str  # ISO 8601, UTC


def to_json(profile: CostProfile) -> dict[str, Any]:
    """The native file: points as [requests, tokens or drafts, seconds]."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "date": profile.date,
        "measured_on": asdict(profile.measured_on),
        "target": [list(point) for point in profile.costs.target],
        "draft": [list(point) for point in profile.costs.draft],
    }


def from_json(data: Mapping[str, Any]) -> CostProfile:
    """The profile in a native file.

    Raises:
        ValueError: a field is absent or has no meaning; the message names it.
    """
    if data.get("version") != FORMAT_VERSION:
        raise ValueError(f"version must be {FORMAT_VERSION}, got {data.get('version')!r}")
    if not isinstance(data.get("date"), str):
        raise ValueError(f"date must be a string, got {data.get('date')!r}")
    costs = StepCosts(_points(data, "target"), _points(data, "draft"))
    return CostProfile(costs, _measured_on(data.get("measured_on")), data["date"])


def _points(data: Mapping[str, Any], name: str) -> tuple[Point, ...]:
    points = data.get(name)
    if not isinstance(points, list) or not all(isinstance(point, list) for point in points):
        raise ValueError(f"{name} must be a list of lists of three numbers")
    return tuple(tuple(point) for point in points)


def _measured_on(facts: object) -> MeasuredOn:
    names = [field.name for field in fields(MeasuredOn)]
    if not isinstance(facts, dict) or sorted(facts) != sorted(names):
        raise ValueError(f"measured_on must hold just {', '.join(names)}")
    for field in fields(MeasuredOn):
        kinds = {"int": int, "str": str, "str | None": str | None}
        if not isinstance(facts[field.name], kinds[str(field.type)]):
            raise ValueError(
                f"measured_on.{field.name} must be {field.type}, got {facts[field.name]!r}"
            )
    return MeasuredOn(**facts)
