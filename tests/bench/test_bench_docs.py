"""docs/bench.md has every option, no other, and the figures of the results file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer

from emberline.cli import make_app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bench.md").read_text()


def test_options_are_those_of_the_command() -> None:
    group = typer.main.get_command(make_app("bench")).commands["bench"]  # type: ignore[attr-defined]
    options = {name for parameter in group.commands["serve"].params for name in parameter.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) == options


def test_the_clients_cost_is_the_one_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "bench-client.json").read_text())
    rows = [
        f"| {level['concurrency']} | {level['bench_us_per_event']} | "
        f"{level['httpx_us_per_event']} | {level['ratio_us']:.2f} |"
        for level in measured["levels"]
    ]
    assert "\n".join(rows) in PAGE
