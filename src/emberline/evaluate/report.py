"""The report of an evaluation: one JSON object, and the same as tables.

Owns names, order and rounding. Must not know engines, files or terminals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emberline.evaluate.figures import Figures, Summary, ratio

DIGITS = 4


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was found of one draft: a summary for each temperature, in order."""

    name: str
    info: Mapping[str, object]  # of its engine
    summaries: Mapping[float, Summary]


@dataclass(frozen=True, slots=True)
class Grid:
    """One table: the first column names the row, the others are figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def as_json(drafts: Sequence[Drafted], settings: Mapping[str, object]) -> dict[str, Any]:
    """Everything that was found, JSON-able; an unknown figure is null."""
    return {
        "settings": dict(settings),
        "drafts": {
            draft.name: {
                "info": dict(draft.info),
                **{
                    f"T={temperature:g}": {
                        "macro": _round(summary.macro),
                        "macro_standard_error": _round(summary.macro_error),
                        "over_first": _over_first(summary, drafts[0].summaries[temperature]),
                        "all": figures_json(summary.everything),
                        "sets": {name: figures_json(f) for name, f in summary.sets.items()},
                    }
                    for temperature, summary in draft.summaries.items()
                },
            }
            for draft in drafts
        },
    }


def figures_json(found: Figures) -> dict[str, Any]:
    """One set's figures, JSON-able."""
    counts = found.counts
    fields: dict[str, Any] = {
        "prompts": found.num_prompts,
        "acceptance_length": _round(found.length),
        "standard_error": _round(found.standard_error),
        "steps": found.num_steps,
        "emitted": found.num_emitted,
        "conditional_acceptance": [_round(share) for share in counts.conditional],
        "marginal_acceptance": [_round(share) for share in counts.marginal],
        "verified": list(counts.verified),
        "reached": list(counts.reached),
        "accepted": list(counts.accepted),
    }
    if found.confidence is not None:
        fields["ece"] = [_round(error) for error in found.confidence.ece]
        fields["auc"] = [_round(area) for area in found.confidence.auc]
    return fields


def tables(drafts: Sequence[Drafted]) -> list[Grid]:
    """Lengths by set, rates by position, and calibration, each at every temperature."""
    grids = []
    for temperature in drafts[0].summaries:
        found = [(draft.name, draft.summaries[temperature]) for draft in drafts]
        at = f"T = {temperature:g}"
        grids.append(_lengths(f"Acceptance length, {at}", found))
        for what in ("conditional", "marginal"):
            rows = [(name, getattr(s.everything.counts, what)) for name, s in found]
            grids.append(_positions(f"{what.capitalize()} acceptance by position, {at}", rows, 3))
        known = [(name, c) for name, s in found if (c := s.everything.confidence) is not None]
        if known:
            rows = [(f"{name}, {kind.upper()}", getattr(c, kind)) for name, c in known
                    for kind in ("ece", "auc")]  # fmt: skip
            grids.append(_positions(f"Calibration of survival by position, {at}", rows, 3))
    return grids


def markdown(grids: Sequence[Grid], notes: Sequence[str] = ()) -> str:
    """The tables as Markdown, each under its title, and the notes after them."""
    parts = []
    for grid in grids:
        lines = [f"**{grid.title}**", "", _line(grid.header)]
        lines.append("| --- |" + " ---: |" * (len(grid.header) - 1))
        lines += [_line(row) for row in grid.rows]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *notes]) + "\n"


def _lengths(title: str, found: Sequence[tuple[str, Summary]]) -> Grid:
    names = list(found[0][1].sets)
    several = len(found) > 1
    header = ["draft", *names, "mean", *([f"over {found[0][0]}"] if several else [])]
    rows = []
    for name, summary in found:
        cells = [_number(summary.sets[part].length, 2) for part in names]
        cells.append(_with_error(summary.macro, summary.macro_error, 2))
        if several:
            over, error = ratio(summary, found[0][1]) or (None, None)
            cells.append(_with_error(over, error, 3))
        rows.append((name, *cells))
    return Grid(title, tuple(header), tuple(rows))


def _positions(title: str, rows: Sequence[tuple[str, Sequence[float | None]]], digits: int) -> Grid:
    width = max(len(values) for _, values in rows)
    body = []
    for name, values in rows:
        cells = [_number(value, digits) for value in values]
        body.append((name, *cells, *["-"] * (width - len(cells))))
    return Grid(title, ("draft", *map(str, range(1, width + 1))), tuple(body))


def _over_first(summary: Summary, base: Summary) -> dict[str, float | None] | None:
    found = ratio(summary, base)
    if found is None:
        return None
    return {"ratio": _round(found[0]), "standard_error": _round(found[1])}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _with_error(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f} ± {_number(error, digits)}"


def _round(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, DIGITS)
