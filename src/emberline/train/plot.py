"""Pictures of a run against its steps: losses, acceptance by position, lengths, rates.

Needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emberline.train.run_log import read_lines

Lines = list[dict[str, Any]]


def plot_metrics(metrics: Path, picture: Path) -> None:
    """Draw the lines of a metrics file into `picture` (its suffix says the format).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    lines = read_lines(metrics)
    figure = Figure(figsize=(11, 8), layout="constrained")
    (losses, acceptance), (lengths, rates) = figure.subplots(2, 2)
    for split, style in (("train", "-"), ("held_out", "o--")):
        chosen = [line for line in lines if line["split"] == split]
        name = split.replace("_", "-")
        _losses(losses, chosen, style, name)
        for key, label in (("length_t0", "T = 0"), ("length_t1", "T = 1")):
            _line(lengths, chosen, key, style, f"{label}, {name}")
    _acceptance(acceptance, lines)
    _rates(rates, [line for line in lines if line["split"] == "train"])
    losses.set(ylabel="loss", yscale="log")
    acceptance.set(ylabel="acceptance by position, T = 1")
    lengths.set(ylabel="tokens a step, teacher-forced")
    rates.set(ylabel="learning rate", yscale="log")
    for axes in (losses, acceptance, lengths, rates):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="x-small")
    figure.savefig(picture, dpi=120)


def _losses(axes: Any, lines: Lines, style: str, name: str) -> None:
    for key, label in (("l1", "L1"), ("ce", "CE"), ("confidence_bce", "confidence")):
        if any(line[key] for line in lines):
            _line(axes, lines, key, style, f"{label}, {name}")


def _acceptance(axes: Any, lines: Lines) -> None:
    """A line a position, of held-out rows where there are any."""
    chosen = [line for line in lines if line["split"] == "held_out"]
    chosen = chosen or [line for line in lines if line["split"] == "train"]
    steps = [line["step"] for line in chosen]
    for slot in range(len(chosen[0]["acceptance"]) if chosen else 0):
        values = [line["acceptance"][slot] for line in chosen]
        axes.plot(steps, values, "o-", label=str(slot + 1), linewidth=1.2, markersize=3)


def _rates(axes: Any, lines: Lines) -> None:
    for key, label in (("muon_lr", "matrices (Muon)"), ("adam_lr", "the rest (AdamW)")):
        # The last rate is 0, which a logarithmic axis cannot show.
        _line(axes, [line for line in lines if line[key] > 0], key, "-", label)


def _line(axes: Any, lines: Lines, key: str, style: str, label: str) -> None:
    if lines:
        steps, values = ([line[name] for line in lines] for name in ("step", key))
        axes.plot(steps, values, style, label=label, linewidth=1.2, markersize=3)
