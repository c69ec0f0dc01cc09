"""Fill the README's tables from `results/*.json`, or with --check fail if they are stale."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"


def source(figures: dict[str, Any]) -> str:
    """One line that says where a table comes from."""
    return (
        f"`{figures['command']}`, {figures['when']}, commit {figures['commit']}, "
        f"{figures['cpu']}, {figures['threads']} thread(s), torch {figures['torch']}."
    )


def acceptance(figures: dict[str, Any]) -> str:
    """Acceptance length by set and temperature."""
    temperatures = [key for key in figures if key.startswith("T=")]
    sets = list(figures[temperatures[0]]["sets"])
    rows = [f"| temperature | {' | '.join(sets)} | mean |", "| --- |" + " ---: |" * (len(sets) + 1)]
    for key in temperatures:
        lengths = [f"{row['acceptance_length']:.2f}" for row in figures[key]["sets"].values()]
        rows.append(f"| {key[2:]} | {' | '.join(lengths)} | **{figures[key]['macro']:.2f}** |")
    return "\n".join(rows)


def decode(figures: dict[str, Any]) -> str:
    """Tokens per second of each arm and the two ratios."""
    arms = list(figures["macro"])
    rows = [
        f"| tokens per second | {' | '.join(figures['sets'])} | mean |",
        "| --- |" + " ---: |" * (len(figures["sets"]) + 1),
    ]
    for arm in arms:
        speeds = [f"{row[arm]:.1f}" for row in figures["sets"].values()]
        rows.append(f"| {arm} | {' | '.join(speeds)} | {figures['macro'][arm]:.1f} |")
    ratios = (
        f"Draft over none: **{figures['draft_over_none']:.2f}**. "
        f"Logprobs 5 over off: **{figures['logprobs_over_off']:.3f}**."
    )
    return "\n".join(rows) + "\n\n" + ratios


def footprint(figures: dict[str, Any]) -> str:
    """Start-up and memory of the server."""
    start, peak = figures["start_to_first_answer_seconds"], figures["peak_mib_under_load"] / 1024
    return (
        f"Server: {start:.1f} s from start to the first answered request on a warm cache, "
        f"{peak:.2f} GiB at most with {figures['concurrency']} requests of 1,000 tokens at once."
    )


TABLES = {
    "acceptance-given": acceptance,
    "decode-cpu": decode,
    "server-footprint": footprint,
}


def filled(readme: str) -> str:
    """The README with every marked table made anew."""
    for name, render in TABLES.items():
        figures = json.loads((HERE / "results" / f"{name}.json").read_text())
        body = f"<!-- {name} -->\n\n{render(figures)}\n\n{source(figures)}\n\n<!-- end -->"
        pattern = rf"<!-- {name} -->.*?<!-- end -->"
        readme, count = re.subn(pattern, lambda _, body=body: body, readme, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md needs exactly one block marked {name}, found {count}")
    return readme


def main() -> None:
    """Rewrite or check."""
    now = README.read_text()
    new = filled(now)
    if "--check" in sys.argv:
        raise SystemExit(0 if now == new else "README.md is stale: benchmarks/readme_tables.py")
    README.write_text(new)


if __name__ == "__main__":
    main()
