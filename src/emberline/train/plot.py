"""A picture of a run: loss and acceptance against steps. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def plot_metrics(metrics: Path, picture: Path) -> None:
    """Draw the lines of a metrics file into `picture` (its suffix says the format).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, lengths = figure.subplots(1, 2)
    for split, style in (("train", "-"), ("held_out", "o--")):
        chosen = [line for line in lines if line["split"] == split]
        if not chosen:
            continue
        steps = [line["step"] for line in chosen]
        name = split.replace("_", "-")
        for key in ("l1", "ce"):
            _line(losses, steps, [line[key] for line in chosen], style, f"{key.upper()}, {name}")
        for key, label in (("length_t0", "T = 0"), ("length_t1", "T = 1")):
            _line(lengths, steps, [line[key] for line in chosen], style, f"{label}, {name}")
    losses.set(xlabel="step", ylabel="loss", yscale="log")
    lengths.set(xlabel="step", ylabel="tokens a step, teacher-forced")
    for axes in (losses, lengths):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(picture, dpi=120)


def _line(axes: Any, steps: list[int], values: list[float], style: str, label: str) -> None:
    axes.plot(steps, values, style, label=label, linewidth=1.2, markersize=3)
