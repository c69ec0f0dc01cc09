"""How far a draft's confidences are true on prompts that its calibration has not seen.

python benchmarks/calibration.py --prompts FOLDER [--limit 20] [--tokens 128] [--traces FOLDER]

Real speculative decoding, all drafts verified, T = 0 and T = 1. What is judged is survival: the
chance that a draft and all before it stand. Without --prompts the project's own prompts are used,
and those the shipped calibration was fitted to.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from emberline.cli.recording import Recipe, recorded
from emberline.config import EngineConfig
from emberline.engine.trace import RequestTrace, samples
from emberline.hub import resolve_draft, resolve_model
from emberline.verify.calibration import (
    Floats,
    Samples,
    auc,
    by_position,
    draft_calibration,
    ece,
    survival,
)

import prompts as prompt_sets
import record

TEMPERATURES = (0.0, 1.0)
REDRAWS = 20


def record_sets(args: argparse.Namespace) -> list[RequestTrace]:
    """Traces of every set; with --traces from their files where they are there."""
    model = resolve_model(args.model)
    draft = resolve_draft(args.draft, model)
    if draft is None:
        raise SystemExit("no draft to judge: give --draft")
    sets = prompt_sets.load(args.prompts, args.limit)
    traces: list[RequestTrace] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress,
    ):
        for index, (name, texts) in enumerate(sets.items()):
            lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
            path = Path(scratch) / f"{name}.jsonl"
            path.write_text("".join(lines), encoding="utf-8")
            recipe = Recipe(
                model=model,
                draft=draft,
                prompts=path,
                temperatures=TEMPERATURES,
                max_tokens=args.tokens,
                limit=args.limit,
                seed=index * args.limit,  # no two prompts share their noise
            )
            kept = args.traces / f"{name}.jsonl" if args.traces else None
            task = progress.add_task(name, total=None)
            traces += recorded(
                recipe,
                kept,
                EngineConfig(threads=args.threads),
                lambda done, total, task=task: progress.update(task, completed=done, total=total),
            )
    return traces


def judge(found: Samples, temperatures: tuple[float, ...]) -> dict[str, object]:
    """Figures by position, before and after, and what an exact predictor would show."""
    before = survival(found.logits, (1.0,) * len(temperatures))
    after = survival(found.logits, temperatures)
    errors = {
        "ece_before": by_position(ece, before, found.survived),
        "ece_after": by_position(ece, after, found.survived),
        "ece_if_exact": chance_level(after),
    }
    figures: dict[str, object] = {"blocks": len(found.survived)}
    for name, values in errors.items():
        figures[name] = [round(value, 4) for value in values]
        figures[f"mean_{name}"] = round(float(np.mean(values)), 4)
    figures["auc"] = [round(area, 4) for area in by_position(auc, after, found.survived)]
    return figures


def chance_level(predicted: Floats) -> tuple[float, ...]:
    """ECE that so many blocks show by chance alone when every prediction is exact."""
    rng = np.random.default_rng(0)
    redrawn = [
        by_position(ece, predicted, rng.random(predicted.shape) < predicted) for _ in range(REDRAWS)
    ]
    return tuple(np.mean(redrawn, axis=0).tolist())


def main() -> None:
    """Record, judge, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, help="folder of prompt sets; default: own prompts")
    parser.add_argument("--limit", type=int, default=20, help="prompts a set")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--traces", type=Path, help="folder that keeps what was recorded")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", help="default: the shipped draft")
    parser.add_argument("--threads", type=int, help="default: all cores but one")
    args = parser.parse_args()
    draft = resolve_draft(args.draft, resolve_model(args.model))
    calibration = draft_calibration(draft) if draft else None
    if calibration is None:
        raise SystemExit("this draft has no calibration: run emberline calibrate")
    traces = record_sets(args)
    width = len(calibration.temperatures)
    parts = {"pooled": traces} | {
        f"T={t:g}": [trace for trace in traces if trace.temperature == t] for t in TEMPERATURES
    }
    figures = {
        name: judge(samples(part, width), calibration.temperatures) for name, part in parts.items()
    }
    table = Table("", "", *(f"draft {k + 1}" for k in range(width)), "mean")
    for name, part in figures.items():
        for row in ("ece_before", "ece_after", "ece_if_exact", "auc"):
            values = part[row]
            mean = part.get(f"mean_{row}", "")
            table.add_row(name, row, *(f"{value:.3f}" for value in values), str(mean))  # type: ignore[attr-defined]
    Console(width=120).print(table)
    facts = {
        "prompts": "given" if args.prompts else "own",
        "limit": args.limit,
        "tokens": args.tokens,
        "draft": draft.name if draft else None,
        "temperatures": list(calibration.temperatures),
        **figures,
    }
    name = "calibration" if args.prompts else "calibration-own"
    print("written:", record.write(name, facts))


if __name__ == "__main__":
    main()
