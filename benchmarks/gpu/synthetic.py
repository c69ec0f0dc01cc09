"""A step's cost at a real model's size, without its weights: random ones, acceptance by a script.

    PYTHONPATH=benchmarks python -m gpu.synthetic --shape 8B

1. target: the forward pass alone, replayed as a graph, by requests and tokens of each; beside the
   time of reading its weights and keys at the copy bandwidth measured in the same run.
2. draft: a block alone.
3. policies: the engine's own steps and planner under simulated acceptance (`gpu.scripted`), from
   one request to where the GPU saturates, every policy in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from emberline import machine_costs
from emberline.batch import BlockContext, DrawKeys, ForwardBatch
from emberline.config import EngineConfig, SpeculationConfig
from emberline.drafters.base import Capturable
from emberline.engine.build import build_engine
from emberline.engine.engine import Engine
from emberline.layout import TokenLayout, Tokens

import record
from gpu.decode import measure, table
from gpu.random_models import SHAPES, ModelShape, random_folders
from gpu.scripted import Script, scripted_models
from gpu.timing import copy_bandwidth, seconds
from gpu.workload import (
    NO_DRAFT,
    POLICIES,
    SCHEDULED,
    VERIFY_ALL,
    Bench,
    Cell,
    generate_ids,
    machine,
    random_prompts,
    settings,
)

PARTS = ("target", "draft", "policies")
QUERIES = (1, 2, 4, 8)  # tokens of each request
PROMPT = 64


def load(
    shape: ModelShape, device: str, dtype: str, most: int, tokens_each: int, planner: str
) -> Engine:
    """An engine over random models that follow the script."""
    base = EngineConfig(speculation=SpeculationConfig(planner=planner))  # type: ignore[arg-type]
    config = settings(device, dtype, most, tokens_each, base)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    with (
        tempfile.TemporaryDirectory() as scratch,
        random_folders(shape, Path(scratch), device, kind) as (model, draft),
        scripted_models(Script(shape.vocab)),
    ):
        return build_engine(
            model,
            draft,
            config,
            eos_ids=frozenset(),
            name=shape.name,
            # Measured here and kept nowhere: nobody loads these models again.
            find_costs=lambda engine: (
                machine_costs.measure(engine, model, draft, progress=False).costs
            ),
        )


def clock(run: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds a call: as a replayed graph, or as it is on a CPU."""
    if device != "cpu":
        return seconds(lambda _: run(), 1, repeats)
    taken = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def step_batch(engine: Engine, num_reqs: int, queries: int, context: int) -> ForwardBatch:
    """A decode step's inputs: every request forwards `queries` tokens behind its context."""
    parts = engine.parts
    device, size = parts.history.device, parts.page_size
    count, pages = num_reqs * queries, -(-(context + queries) // size)
    page_table = 1 + torch.arange(num_reqs * pages, device=device).view(num_reqs, pages)
    lens = torch.full((num_reqs,), queries, device=device)
    layout = TokenLayout.build(
        lens,
        lens,
        num_tokens=count,
        num_scored=count,
        row_granule=parts.target.row_granule if device.type == "cpu" else 1,
        max_query_len=queries,
    )
    positions = context + layout.offset_of_token
    page = page_table[layout.req_of_token, positions // size]
    return ForwardBatch(
        layout=layout,
        token_ids=Tokens(torch.arange(count, device=device) % parts.target.vocab_size),
        positions=Tokens(positions),
        slot_mapping=Tokens(page * size + positions % size),
        page_table=page_table,
        seq_lens=lens + context,
    )


@torch.inference_mode()
def target_rows(
    engine: Engine,
    shape: ModelShape,
    requests: Sequence[int],
    context: int,
    bandwidth: float | None,
    repeats: int,
) -> list[dict[str, object]]:
    """The target's part of a step, a row a size."""
    target, device = engine.parts.target, engine.parts.history.device.type
    itemsize = target.kv_pools[0].keys.element_size()
    spec = target.kv_spec
    assert spec is not None
    rows: list[dict[str, object]] = []
    for num_reqs in requests:
        for queries in QUERIES:
            batch = step_batch(engine, num_reqs, queries, context)
            # As its class has it: what the script adds is no part of the model.
            run = partial(type(target).forward, target, batch)
            taken = clock(run, device, repeats)
            row: dict[str, object] = {
                "requests": num_reqs,
                "tokens": num_reqs * queries,
                "ms": round(1e3 * taken, 4),
            }
            if bandwidth is not None:
                weights = shape.step_numbers * itemsize / bandwidth
                keys = num_reqs * context * spec.numbers_per_token * itemsize / bandwidth
                row |= {
                    "weights_ms": round(1e3 * weights, 4),
                    "floor_ms": round(1e3 * (weights + keys), 4),
                    "over_weights": round(taken / weights, 3),
                    "over_floor": round(taken / (weights + keys), 3),
                }
            rows.append(row)
            print(json.dumps({"part": "target", **row}), flush=True)
    return rows


@torch.inference_mode()
def draft_rows(
    engine: Engine, requests: Sequence[int], context: int, repeats: int
) -> list[dict[str, object]]:
    """A block's time, a row a number of requests; none where the drafter is not for graphs."""
    drafter, device = engine.parts.drafter, engine.parts.history.device
    if not isinstance(drafter, Capturable) or device.type == "cpu":
        return []
    rows: list[dict[str, object]] = []
    for num_reqs in requests:
        positions = torch.full((num_reqs,), context, device=device)
        nothing = torch.zeros_like(positions)
        block = BlockContext(
            num_drafts=engine.max_draft_tokens,
            anchors=positions,
            positions=positions,
            page_table=step_batch(engine, num_reqs, 8, context).page_table,
            temperatures=torch.zeros(num_reqs, device=device),
            keys=DrawKeys(nothing, positions, nothing),
            need_logits=False,
        )
        taken = clock(partial(type(drafter).propose_block, drafter, block), device.type, repeats)
        rows.append({"requests": num_reqs, "ms": round(1e3 * taken, 4)})
        print(json.dumps({"part": "draft", **rows[-1]}), flush=True)
    return rows


def policy_rows(
    engine: Engine, requests: Sequence[int], new_tokens: int, reps: int
) -> list[dict[str, object]]:
    """The engine's own decoding, a row a number of requests and policy."""
    prompts = random_prompts(max(requests), PROMPT, engine.vocab_size)
    bench = Bench(engine, generate_ids(engine), prompts, new_tokens, least_prompts=1)
    rows: list[dict[str, object]] = []
    for num_reqs in requests:
        cells = [Cell(num_reqs, policy, 0) for policy in POLICIES]
        rows += measure(bench, cells, reps, engine.max_draft_tokens)
    return rows


def scheduled_ratios(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """By requests: the scheduled policy over the best fixed one, and over verifying all."""
    levels: dict[str, dict[str, float]] = {}
    for row in rows:
        levels.setdefault(str(row["concurrency"]), {})[str(row["draft"])] = float(str(row["tok_s"]))
    ratios = {}
    for level, rates in levels.items():
        if {SCHEDULED, VERIFY_ALL, NO_DRAFT} <= rates.keys():
            fixed = max(rate for policy, rate in rates.items() if policy != SCHEDULED)
            ratios[level] = {
                "over_best": round(rates[SCHEDULED] / fixed, 3),
                "over_verify_all": round(rates[SCHEDULED] / rates[VERIFY_ALL], 3),
            }
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write `results/<name>.json`."""
    args = _arguments(argv)
    shape = SHAPES[args.shape]
    most = max(args.requests)
    tokens_each = max(args.context + 8, PROMPT + args.new_tokens)
    began = time.perf_counter()
    engine = load(shape, args.device, args.dtype, most, tokens_each, args.planner)
    load_seconds = round(time.perf_counter() - began, 1)
    bandwidth = copy_bandwidth(args.repeats) if args.device != "cpu" else None
    figures: dict[str, object] = {
        **machine(args.device),
        "shape": args.shape,
        "dtype": args.dtype,
        "copy_bandwidth": bandwidth,
        "context": args.context,
        "load_seconds": load_seconds,
        "info": engine.info,
    }
    print(json.dumps({"load_seconds": load_seconds, "bandwidth": bandwidth}), flush=True)
    measures: dict[str, Callable[[], list[dict[str, object]]]] = {
        "target": lambda: target_rows(
            engine, shape, args.requests, args.context, bandwidth, args.repeats
        ),
        "draft": lambda: draft_rows(engine, args.requests, args.context, args.repeats),
        "policies": lambda: policy_rows(engine, args.requests, args.new_tokens, args.reps),
    }
    for part in args.parts:
        try:
            figures[part] = rows = measures[part]()
        except Exception as problem:  # the other parts may run: there is no second look
            print(json.dumps({"part": part, "error": repr(problem)[:300]}), flush=True)
            continue
        if part == "policies":
            print(table(rows))
            figures["scheduled"] = scheduled_ratios(rows)
            print("scheduled:", json.dumps(figures["scheduled"]))
        record.write(args.name, figures)
    print("written:", record.write(args.name, figures))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8B")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument(
        "--context", type=int, default=512, help="tokens in KV, of target and draft"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer, for policies")
    parser.add_argument("--reps", type=int, default=2, help="of a policy, the median counts")
    parser.add_argument("--repeats", type=int, default=5, help="of a part's time, likewise")
    parser.add_argument("--planner", default="auto", help="of the scheduled policy")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--name", default="gpu-synthetic", help="of the file of results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
