"""`emberline audit` on our own server in every combination of draft, layout, planner and dtype.

python benchmarks/audit_matrix.py [--quick] [--threads N] [--only WORD ...] [--resume]

One server a combination, audited twice: with raw and with processed log-probabilities. What does
not depend on the mode (counts, options, the law of what is drawn) is checked with raw ones alone.
Where the server's own start-up check says that it is bitwise, nothing is forgiven. The model is the
embedded default, which is also the reference: the same weights in plain transformers, in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from emberline.audit.checks import Check
from emberline.audit.outcome import Verdict
from emberline.audit.reference import Reference
from emberline.audit.run import Audit, Result, audit, chosen
from emberline.audit.settings import AuditSettings
from emberline.hub import resolve_model

import record
from server_footprint import wait_for_answer

PLANNERS = {
    "verify_all": ["--planner", "verify_all"],
    "threshold": ["--planner", "threshold", "--threshold", "0.5"],
    "scheduled": ["--planner", "causal_greedy"],
}
LAYOUTS = ("static", "compact")
DTYPES = ("float32", "bfloat16")
RAW_ONLY = (
    "counts",
    "seeds",
    "cached_prefix",
    "raw_invariance",
    "logit_bias",
    "penalties",
    "speculation_off",
    "distribution",
    "reference",
)
FULL = {"num_tokens": 32, "num_prompts": 4, "num_samples": 1024}
QUICK = {"num_tokens": 8, "num_prompts": 2, "num_samples": 64, "concurrency": 8}


@dataclass(frozen=True)
class Combination:
    """One server."""

    draft: str
    layout: str
    planner: str
    dtype: str

    @property
    def name(self) -> str:
        """In words."""
        return f"draft {self.draft}, {self.layout}, {self.planner}, {self.dtype}"

    @property
    def options(self) -> list[str]:
        """Of `emberline serve`."""
        drafting = PLANNERS[self.planner] if self.draft == "on" else ["--draft", "none"]
        return ["--layout", self.layout, "--dtype", self.dtype, *drafting]


def combinations() -> list[Combination]:
    """Every one; without a draft there is nothing to plan."""
    drafting = itertools.product(["on"], LAYOUTS, PLANNERS, DTYPES)
    plain = itertools.product(["off"], LAYOUTS, ["-"], DTYPES)
    return [Combination(*parts) for parts in (*drafting, *plain)]


PARTS = ("draft", "layout", "planner", "dtype")
ORDER = [astuple(one) for one in combinations()]


def kept_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What an earlier run of the same size has written."""
    path = record.RESULTS / f"{args.out}.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    same = figures.get("size") == (QUICK if args.quick else FULL)
    return list(figures["combinations"]) if same else []


class Told:
    """Says how one audit gets on."""

    def __init__(self, bar: Progress, task: Any, name: str) -> None:
        self._bar, self._task, self._name = bar, task, name

    def begins(self, check: Check, number: int, total: int) -> None:
        """The next check."""
        text = f"{self._name}: {check.name} ({number + 1} of {total})"
        self._bar.update(self._task, description=text)

    def ends(self, result: Result) -> None:
        """Findings are worth a line."""
        for finding in result.outcome.findings[:3]:
            self._bar.console.print(f"{self._name}: {result.check.name}: {finding.message}")


def figures_of(result: Audit) -> dict[str, Any]:
    """What is kept of one audit."""
    by_name = {one.check.name: one.outcome for one in result.results}
    verdicts = [outcome.verdict for outcome in by_name.values()]
    kept: dict[str, Any] = {
        "passed": result.passed,
        "checks": {str(v): verdicts.count(v) for v in Verdict if v in verdicts},
        "failed": [name for name, outcome in by_name.items() if outcome.verdict is Verdict.FAIL],
        "forgiven": result.noise.most,
        "seconds": round(sum(one.seconds for one in result.results), 1),
    }
    for name in ("rescoring", "rescoring_concurrent", "reference"):
        figures = by_name[name].figures if name in by_name else {}
        if "max" in figures:
            kept[name] = {key: figures[key] for key in ("tokens", "max", "mean")}
    return kept


def audit_one(
    combination: Combination,
    args: argparse.Namespace,
    reference: Reference,
    bar: Progress,
    task: Any,
) -> dict[str, Any]:
    """Start a server, audit it in both modes, end it."""
    program = Path(sys.executable).with_name("emberline")
    command = [str(program), "serve", "--port", str(args.port), "--log-level", "warning"]
    threads = ["--threads", str(args.threads)] if args.threads else []
    server = subprocess.Popen([*command, *threads, *combination.options], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{args.port}"
    try:
        wait_for_answer(url, 300.0)
        info = httpx.get(f"{url}/server_info").raise_for_status().json()
        size = QUICK if args.quick else FULL
        settings = AuditSettings(url=url, exact=info["bitwise"] is True, **size)
        row: dict[str, Any] = {"bitwise": info["bitwise"], "modes": {}}
        for mode, left_out in (("raw", ()), ("processed", RAW_ONLY)):
            skip = (
                "compare",
                *left_out,
                *(("speculation_off",) if combination.draft == "off" else ()),
            )
            told = Told(bar, task, f"{combination.name}, {mode}")
            result = asyncio.run(
                audit(
                    replace(settings, mode=mode),
                    told,
                    checks=chosen((), skip),
                    reference=reference,
                )
            )
            row["modes"][mode] = figures_of(result)
        return row
    finally:
        server.terminate()
        server.wait(60)


def main(words: Sequence[str] | None = None) -> None:
    """Audit every combination, write the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter answers, fewer of them")
    parser.add_argument("--threads", type=int, help="of each server; default: all cores but one")
    parser.add_argument("--only", nargs="+", default=[], help="words of the combinations to run")
    parser.add_argument("--resume", action="store_true", help="keep what the results file has")
    parser.add_argument("--port", type=int, default=8180)
    parser.add_argument("--out", default="audit-matrix", help="name of the results file")
    args = parser.parse_args(words)
    folder = resolve_model(None)
    reference = Reference.load(folder.name, folder.path)
    wanted = [one for one in combinations() if all(word in one.name for word in args.only)]
    rows = kept_rows(args) if args.resume else []
    done = {tuple(row[name] for name in PARTS) for row in rows}
    wanted = [one for one in wanted if astuple(one) not in done]
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("servers", total=len(wanted))
        for one in wanted:
            row = audit_one(one, args, reference, bar, task)
            rows.append({**dict(zip(PARTS, astuple(one), strict=True)), **row})
            rows.sort(key=lambda row: ORDER.index(tuple(row[name] for name in PARTS)))
            said = {mode: figures["checks"] for mode, figures in row["modes"].items()}
            bar.console.print(f"{one.name}: {said}")
            bar.advance(task)
            record.write(
                args.out,
                {
                    "model": folder.name,
                    "size": QUICK if args.quick else FULL,
                    "passed": all(m["passed"] for r in rows for m in r["modes"].values()),
                    "combinations": rows,
                },
            )
    print("written:", record.RESULTS / f"{args.out}.json")
    if not all(m["passed"] for r in rows for m in r["modes"].values()):
        raise SystemExit("not every combination passed")


if __name__ == "__main__":
    main()
