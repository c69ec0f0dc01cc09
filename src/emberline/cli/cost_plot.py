"""A picture of step costs: a line for each number of requests. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from emberline.verify.cost_profile import CostProfile
from emberline.verify.step_cost import Point


def draw(profile: CostProfile, picture: Path) -> None:
    """Draw measured points and what is read between them; the suffix of `picture` is its kind.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    costs, facts = profile.costs, profile.measured_on
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{facts.model}, {facts.dtype}, {facts.processor}", fontsize="medium")
    target, draft = figure.subplots(1, 2)
    for num_reqs, points in _rows(costs.target).items():
        at = np.arange(points[0][1], points[-1][1] + 1)
        _line(target, num_reqs, points, at, costs.target_seconds(num_reqs, at))
    target.set(xlabel="tokens in the step", ylabel="ms, all but drafting", xscale="log")
    for num_reqs, points in _rows(costs.draft).items():
        at = np.arange(points[0][1], points[-1][1] + 1)
        seconds = np.array([costs.draft_seconds(num_reqs, int(count)) for count in at])
        _line(draft, num_reqs, points, at, seconds)
    draft.set(xlabel="drafts a block", ylabel="ms, drafting")
    for axes in (target, draft):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(title="requests", fontsize="small")
    figure.savefig(picture, dpi=120)


def _rows(points: tuple[Point, ...]) -> dict[int, list[Point]]:
    rows: dict[int, list[Point]] = {}
    for point in sorted(points):
        rows.setdefault(point[0], []).append(point)
    return rows


def _line(axes: Any, num_reqs: int, points: list[Point], at: Any, seconds: Any) -> None:
    (line,) = axes.plot(at, 1e3 * seconds, linewidth=1.2, label=str(num_reqs))
    counts, measured = [count for _, count, _ in points], [1e3 * value for *_, value in points]
    axes.plot(counts, measured, "o", markersize=3, color=line.get_color())
