"""Batch-invariant mode: the same logits, bit for bit, whatever is drafted, laid out and batched.

    PYTHONPATH=benchmarks python -m gpu.invariance --model FOLDER --draft FOLDER

Greedy answers to ten prompts, over {draft on, off} x {static, compact} x {batch 1, 8, 32}, prompts
computed anew each time. Steps as they are (graphs, read one behind) are compared by what they give
out: ids, log-probabilities, the 20 best. The logits themselves, whole rows, are compared in the
plain step, which the same kernels run in. Then what the mode costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from emberline.config import EngineConfig, LayoutKind, SpeculationConfig
from emberline.engine import plain_step
from emberline.engine.engine import Engine
from emberline.hub import load_tokenizer, resolve_model
from emberline.llm import LLM
from emberline.types import Request, SamplingParams, TokenLogprobs

import record
from gpu.workload import (
    NO_DRAFT,
    SCHEDULED,
    Bench,
    Cell,
    generate_ids,
    machine,
    read_prompts,
    settings,
)

LAYOUTS: tuple[LayoutKind, ...] = ("compact", "static")
TOP = 20  # alternatives compared


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to the same answers."""

    layout: LayoutKind
    draft: bool
    batch: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.layout}, {'draft' if self.draft else 'no draft'}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt got."""

    ids: tuple[int, ...]
    records: tuple[TokenLogprobs, ...]
    logits: Tensor | None  # [tokens, V]; None: they were not looked at


def groups(
    wanted: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]], batch: int
) -> list[list[tuple[int, ...]]]:
    """Batches that hold the wanted prompts in order, the last filled up with others."""
    found = [list(wanted[at : at + batch]) for at in range(0, len(wanted), batch)]
    missing = batch - len(found[-1])
    return [*found[:-1], found[-1] + [others[i % len(others)] for i in range(missing)]]


@contextmanager
def logits_of(engine: Engine) -> Iterator[dict[int, list[Tensor]]]:
    """Rows that emitted tokens were drawn from, by request, while this lasts: plain steps alone."""
    rows: dict[int, list[Tensor]] = {}
    real: Callable[..., Any] = plain_step.run_step

    def run(parts: Any, inputs: Any) -> Any:
        result = real(parts, inputs)
        bounds = result.verdict.emitted_start_loc.tolist()
        for index, serial in enumerate(inputs.shape.serials):
            places = result.verdict.scored_index[bounds[index] : bounds[index + 1]]
            rows.setdefault(serial, []).append(result.raw_logits[places].clone())
        return result

    observer = engine.observer
    engine.observer = lambda blocks: None  # noqa: ARG005 - who is watched takes plain steps
    try:
        with mock.patch.object(plain_step, "run_step", run):
            yield rows
    finally:
        engine.observer = observer


def answers(
    engine: Engine,
    wanted: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
    arm: Arm,
    tokens: int,
    *,
    look: bool,
) -> list[Answer]:
    """Answers to the wanted prompts. `look`: with their logits."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=TOP, speculate=arm.draft
    )
    found: list[Answer] = []
    for batch in groups(wanted, others, arm.batch):
        engine.clear_prefix_cache()
        if look:
            with logits_of(engine) as rows:
                some = _run(engine, batch, params)
            by_request = [torch.cat(rows[serial])[:tokens] for serial in sorted(rows)]
            found += [replace(one, logits=row) for one, row in zip(some, by_request, strict=True)]
        else:
            found += _run(engine, batch, params)
    return found[: len(wanted)]


def _run(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> list[Answer]:
    ids: list[list[int]] = [[] for _ in prompts]
    records: list[list[TokenLogprobs]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"{index}", prompt, params))
    while engine.has_work:
        for output in engine.step():
            ids[int(output.request_id)] += output.token_ids
            records[int(output.request_id)] += output.logprobs or ()
    return [Answer(tuple(i), tuple(r), None) for i, r in zip(ids, records, strict=True)]


def difference(ours: Sequence[Answer], reference: Sequence[Answer]) -> dict[str, object]:
    """How far answers are from those of reference: all zeros where they are the same."""
    changed, apart, worst, worst_logit = 0, 0, 0.0, None
    for one, other in zip(ours, reference, strict=True):
        changed += one.ids != other.ids
        for a, b in zip(one.records, other.records, strict=True):
            apart += (a.token_id, a.logprob, a.top_ids, a.top_logprobs) != (
                b.token_id, b.logprob, b.top_ids, b.top_logprobs
            )  # fmt: skip
            if a.token_id == b.token_id:
                worst = max(worst, abs(a.logprob - b.logprob))
        if one.logits is not None and other.logits is not None:
            gap = (one.logits.double() - other.logits.double()).abs().max()
            worst_logit = max(worst_logit or 0.0, float(gap))
    row: dict[str, object] = {
        "answers_changed": changed,
        "tokens_apart": apart,
        "max_logprob_diff": worst,
    }
    return row if worst_logit is None else {**row, "max_logit_diff": worst_logit}


def slowdown(
    ordinary: Engine, invariant: Engine, prompts: Sequence[tuple[int, ...]],
    batches: Sequence[int], tokens: int, reps: int,
) -> list[dict[str, object]]:  # fmt: skip
    """Tokens a second without and with the mode, in turns."""
    benches = [Bench(e, generate_ids(e), prompts, tokens) for e in (ordinary, invariant)]
    rows: list[dict[str, object]] = []
    for batch in batches:
        for policy in (NO_DRAFT, SCHEDULED):
            rates: list[list[float]] = [[], []]
            cell = Cell(batch, policy, 0)
            for bench in benches:
                bench.warm_up(cell)
            for _ in range(reps):
                for found, bench in zip(rates, benches, strict=True):
                    found.append(bench.run(cell).rate)
            plain, fixed = (statistics.median(found) for found in rates)
            rows.append(
                {
                    "batch": batch,
                    "draft": policy,
                    "tok_s": round(plain, 1),
                    "invariant_tok_s": round(fixed, 1),
                    "slowdown": round(plain / fixed, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, print a line an arm, write `results/<name>.json`."""
    args = _arguments(argv)
    prompts = read_prompts(args.prompts, load_tokenizer(resolve_model(args.model).path))
    wanted, others = prompts[: args.count], prompts[args.count :]
    longest = max(len(ids) for ids in prompts) + args.tokens

    def load(layout: LayoutKind, *, invariant: bool) -> Engine:
        base = EngineConfig(speculation=SpeculationConfig(layout=layout), batch_invariant=invariant)
        config = settings(args.device, args.dtype, max(args.batches), longest, base)
        return LLM(args.model, args.draft, config).engine

    engines = {layout: load(layout, invariant=True) for layout in LAYOUTS}
    rows: list[dict[str, object]] = []
    for look in (True, False):
        reference: list[Answer] | None = None
        for layout in LAYOUTS:
            for batch in args.batches:
                for draft in (False, True):
                    arm = Arm(layout, draft, batch)
                    got = answers(engines[layout], wanted, others, arm, args.tokens, look=look)
                    reference = reference or got
                    row = {"arm": arm.name, "logits": look, **difference(got, reference)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    same = not any(row["tokens_apart"] or row.get("max_logit_diff") for row in rows)
    print("bitwise the same:", same)
    figures: dict[str, object] = {**machine(args.device), "same": same, "arms": rows}
    try:
        ordinary = load("compact", invariant=False)
        figures["slowdown"] = slowdown(
            ordinary, engines["compact"], prompts, args.batches, args.tokens, args.reps
        )
    except Exception as problem:  # what was compared counts all the same
        print(json.dumps({"part": "slowdown", "error": repr(problem)[:300]}))
    print("written:", record.write(args.name, figures))
    if not same:
        sys.exit("logits depend on the batch: see the arms above")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder of the target; default: the embedded model")
    parser.add_argument("--draft", help="folder of the draft; default: the shipped one")
    parser.add_argument("--prompts", type=Path, help="a JSON list of token ids a line")
    parser.add_argument("--count", type=int, default=10, help="prompts compared")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--reps", type=int, default=3, help="of the slowdown's cells")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--name", default="gpu-invariance", help="of the file of results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
