"""Pictures of an evaluation. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from emberline.evaluate.report import Drafted


def draw(drafts: Sequence[Drafted], picture: Path) -> None:
    """Lengths by set and conditional acceptance by position, a row a temperature."""
    temperatures = list(drafts[0].summaries)
    figure = Figure(figsize=(12, 3.6 * len(temperatures)), layout="constrained")
    grid = figure.subplots(len(temperatures), 2, squeeze=False)
    for (lengths, rates), temperature in zip(grid, temperatures, strict=True):
        _bars(lengths, drafts, temperature)
        _lines(rates, drafts, temperature)
    figure.savefig(picture, dpi=120)


def _bars(axes: Any, drafts: Sequence[Drafted], temperature: float) -> None:
    """Bars with one standard error each; the mean of the sets last."""
    width = 0.8 / len(drafts)
    for index, draft in enumerate(drafts):
        summary = draft.summaries[temperature]
        values = [figures.length for figures in summary.sets.values()] + [summary.macro]
        errors = [figures.standard_error for figures in summary.sets.values()]
        heights = [value or 0.0 for value in values]
        spread = [error or 0.0 for error in [*errors, summary.macro_error]]
        places = np.arange(len(values)) + (index - (len(drafts) - 1) / 2) * width
        axes.bar(places, heights, width, yerr=spread, capsize=2, label=draft.name)
    names = [*drafts[0].summaries[temperature].sets, "mean"]
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="tokens a step", title=f"acceptance length, T = {temperature:g}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")


def _lines(axes: Any, drafts: Sequence[Drafted], temperature: float) -> None:
    for draft in drafts:
        shares = draft.summaries[temperature].everything.counts.conditional
        known = [(at, share) for at, share in enumerate(shares, 1) if share is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "o-", label=draft.name, markersize=4)
    axes.set(xlabel="position in the block", ylabel="accepted, given all before it")
    axes.set_ylim(0, 1)
    axes.set_title(f"conditional acceptance, T = {temperature:g}")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
