"""Reliability diagrams: how often drafts survived against how often they were expected to.

Needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from emberline.verify.calibration import Samples, ece, reliability, survival

COLUMNS = 4
LARGEST_DOT = 120.0  # area in points^2 of a bin that holds every sample


def draw(temperatures: tuple[float, ...], judged: Samples, picture: Path) -> None:
    """One diagram a position, before and after. A dot's area is its bin's share of the samples."""
    width = len(temperatures)
    rows = -(-width // COLUMNS)
    figure = Figure(figsize=(3 * COLUMNS, 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    series = (
        ("before", "tab:orange", survival(judged.logits, (1.0,) * width)),
        ("after", "tab:blue", survival(judged.logits, temperatures)),
    )
    for position, axes in enumerate(grid.flat):
        if position >= width:
            axes.set_axis_off()
            continue
        outcome = judged.survived[:, position]
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for name, colour, predicted in series:
            bins = reliability(predicted[:, position], outcome)
            filled = bins.count > 0
            share = bins.count[filled] / bins.count.sum()
            error = ece(predicted[:, position], outcome)
            axes.plot(
                bins.confidence[filled],
                bins.frequency[filled],
                color=colour,
                linewidth=1.2,
                label=f"{name}: ECE {error:.3f}",
            )
            sizes = np.maximum(LARGEST_DOT * share, 3.0)
            axes.scatter(bins.confidence[filled], bins.frequency[filled], sizes, colour, alpha=0.6)
        axes.set_title(f"draft {position + 1}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper left")
    figure.supxlabel("expected survival")
    figure.supylabel("share that survived")
    figure.savefig(picture, dpi=120)
