"""Decode speed of the whole engine: by requests at once, policy of verification, and logprobs.

    PYTHONPATH=benchmarks python -m gpu.decode --model FOLDER --draft FOLDER --prompts FILE

Every cell is a batch call of `LLM.generate`, prompts and text included; end-of-sequence is ignored,
so that every answer has its full length. The cells of one number of requests take turns, and each
is given the median. A cell is four calls in turn, of different prompts, and where fewer than 8
requests run at once as many as make 8 prompts. Every cell is a line of JSON, as `gpu.compare` reads
them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from emberline.hub import load_tokenizer, resolve_model
from emberline.llm import LLM

import record
from gpu.workload import (
    NO_DRAFT,
    POLICIES,
    Bench,
    Call,
    Cell,
    generate_text,
    machine,
    random_prompts,
    read_prompts,
    seconds_alive,
    settings,
)

RANDOM_LENGTH = 64  # tokens of a random prompt
COLUMNS = ("tok/s", "of none", "ms/step", "accepted", "budget")


def measure(bench: Bench, cells: Sequence[Cell], reps: int, drafts: int) -> list[dict[str, object]]:
    """Measure the cells of one number of requests in turns; one that fails is said and left out."""
    calls: dict[Cell, list[Call]] = {cell: [] for cell in cells}
    for turn in range(1 + reps):
        for cell in list(calls):
            try:
                if turn:
                    calls[cell].append(bench.run(cell))
                else:
                    bench.warm_up(cell)
            except Exception as problem:
                # The next cell may run all the same, and there is no second look at a lent machine.
                del calls[cell]
                print(json.dumps({**_keys(cell), "error": repr(problem)[:300]}), flush=True)
    first = bench.run(Cell(cells[0].concurrency, NO_DRAFT, 0), 1)
    rows = []
    for cell, runs in calls.items():
        rows.append(_row(cell, runs, first, drafts))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _keys(cell: Cell) -> dict[str, object]:
    return {
        "kind": "decode",
        "engine": "emberline",
        "concurrency": cell.concurrency,
        "draft": cell.policy,
        "logprobs": cell.logprobs,
    }


def _row(cell: Cell, runs: Sequence[Call], first: Call, drafts: int) -> dict[str, object]:
    """Medians of a cell. `first`: the same calls with one token each."""
    last = runs[-1]
    seconds = statistics.median(run.seconds for run in runs)
    steps = statistics.median(run.steps for run in runs) - first.steps
    row = _keys(cell) | {
        "tok_s": round(statistics.median(run.rate for run in runs), 1),
        "tok_s_all": [round(run.rate, 1) for run in runs],
        "seconds": round(seconds, 4),
        "first_token_seconds": round(first.seconds, 4),
        "ms_per_step": round(1e3 * (seconds - first.seconds) / max(steps, 1), 4),
        "captures": sum(run.captures for run in runs),
    }
    if cell.policy != NO_DRAFT and last.block_steps:
        row |= {
            "acceptance_length": round(last.emitted / last.block_steps, 3),
            "budget_share": round(last.drafts / (last.block_steps * drafts), 3),
        }
    return row


def table(rows: Sequence[dict[str, object]]) -> str:
    """The cells, a line each."""
    plain = {
        row["concurrency"]: float(str(row["tok_s"]))
        for row in rows
        if row["draft"] == NO_DRAFT and not row["logprobs"]
    }
    lines = [f"{'requests':>8} {'draft':14} {'logprobs':>8} " + _columns(COLUMNS)]
    for row in rows:
        base = plain.get(row["concurrency"])
        ratio = "-" if base is None else f"{float(str(row['tok_s'])) / base:.3f}"
        values = [str(row["tok_s"]), ratio, str(row["ms_per_step"])]
        values += [str(row.get(name, "-")) for name in ("acceptance_length", "budget_share")]
        place = f"{row['concurrency']:>8} {row['draft']:14} {row['logprobs']:>8} "
        lines.append(place + _columns(values))
    return "\n".join(lines)


def _columns(values: Sequence[str]) -> str:
    return " ".join(f"{value:>10}" for value in values)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the lines and the table, write `results/<name>.json`."""
    args = _arguments(argv)
    folder = resolve_model(args.model)
    most, longest = max(args.concurrency), RANDOM_LENGTH
    prompts: list[tuple[int, ...]] = []
    if not args.random:
        prompts = read_prompts(args.prompts, load_tokenizer(folder.path))
        longest = max(len(ids) for ids in prompts)
    config = settings(args.device, args.dtype, most, longest + args.new_tokens)
    llm = LLM(args.model, args.draft, config)
    prompts = prompts or random_prompts(max(8, most), RANDOM_LENGTH, llm.engine.vocab_size)
    bench = Bench(
        llm.engine,
        generate_text(llm),
        prompts,
        args.new_tokens,
        args.temperature,
        least_calls=args.calls,
    )
    bench.run(Cell(1, NO_DRAFT, 0), 1)
    start = {"kind": "startup", "engine": "emberline", "seconds": round(seconds_alive(), 2)}
    print(json.dumps(start), flush=True)
    drafts = llm.engine.max_draft_tokens
    policies = [name for name in args.policies if drafts or name == NO_DRAFT]
    rows = []
    for concurrency in args.concurrency:
        cells = [Cell(concurrency, policy, k) for k in args.logprobs for policy in policies]
        try:
            rows += measure(bench, cells, args.reps, max(drafts, 1))
        except Exception as problem:  # as in `measure`: the other sizes may run
            print(
                json.dumps({"concurrency": concurrency, "error": repr(problem)[:300]}), flush=True
            )
    print(table(rows))
    figures: dict[str, object] = {
        **machine(args.device),
        "unit": "tokens a second, medians",
        "new_tokens": args.new_tokens,
        "temperature": args.temperature,
        "prompts": "random" if args.random else "text",
        "start_seconds": start["seconds"],
        "info": llm.engine.info,
        "cells": rows,
    }
    print("written:", record.write(args.name, figures))
    if not rows:
        sys.exit("no cell could be measured")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder of the target; default: the embedded model")
    parser.add_argument("--draft", help="folder of the draft; default: the shipped one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--logprobs", type=int, nargs="+", default=[0, 5], help="0: none asked for")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--reps", type=int, default=3, help="of each cell, the median counts")
    parser.add_argument("--calls", type=int, default=4, help="of a cell, at least, each timed run")
    parser.add_argument("--prompts", type=Path, help="a JSON list of token ids a line")
    parser.add_argument("--random", action="store_true", help="prompts of random ids")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--name", default="gpu-decode", help="of the file of results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
