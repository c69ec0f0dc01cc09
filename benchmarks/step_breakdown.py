"""Where a step's time goes: target, draft, and what the engine adds, at several batch sizes.

python benchmarks/step_breakdown.py [--requests 1 8 16] [--dtype bfloat16] [--steps 60]

Decode steps of a running engine, timed from outside: the calls of `Engine.step` are wrapped,
nothing else changes. Overhead is everything but the target's and the draft's forward passes.

With `--device cuda` a step is one graph, which no call can be timed in: launches, bytes, the host's
share and how long nothing ran are told instead (`gpu.breakdown`). There `--shape 8B` takes random
weights of that shape instead of a model, and `--counters` marks a few steps for a profiler that
reads hardware counters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.llm import LLM
from emberline.types import Request, SamplingParams

import prompts as prompt_sets
import record

MOST_DRAFTS = 8  # of a block, to make room for
FORWARDS = ("draft", "draft context", "target")
# What is wrapped: (owner, attribute, name). Owners are modules or objects looked up by these paths.
CALLS = (
    ("engine._scheduler", "schedule", "schedule"),
    ("emberline.engine.plain_step", "build_inputs", "inputs"),
    ("emberline.engine.step", "choose_depths", "plan depths"),
    ("emberline.engine.step", "admit", "plan lengths"),
    ("emberline.engine.step", "lay_out", "layout"),
    ("emberline.engine.step", "forward_batch", "batch"),
    ("emberline.engine.step.processors", "process", "options"),
    ("emberline.engine.step.rejection", "accept", "accept"),
    ("emberline.engine.step", "committed_tokens", "committed"),
    ("emberline.engine.outcome", "score_emitted", "logprobs"),
    ("emberline.engine.outcome", "_broken", "checks"),
    ("emberline.engine.plain_step", "write_history", "history"),
    ("engine", "_commit", "commit"),
)


@dataclass
class Clock:
    """Seconds by name, of the step that runs."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time added under `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return run


def owner(path: str, engine: Any) -> Any:
    """The module or object that a path of `CALLS` names."""
    head, *rest = path.split(".")
    value = engine if head == "engine" else __import__(head)
    for name in rest:
        value = getattr(value, name)
    return value


@contextmanager
def timed_calls(engine: Any, clock: Clock) -> Iterator[None]:
    """Every part of the engine's step on the clock."""
    parts = engine.parts
    calls = [(parts.target, "forward", "target")]
    if parts.drafter is not None:
        calls += [
            (parts.drafter, "propose", "draft"),
            (parts.drafter, "observe", "draft context"),
        ]
    calls += [(owner(path, engine), attribute, name) for path, attribute, name in CALLS]
    with ExitStack() as stack:
        for value, attribute, name in calls:
            timed = clock.timed(name, getattr(value, attribute))
            stack.enter_context(mock.patch.object(value, attribute, timed))
        yield


def measure(
    llm: LLM, num_reqs: int, params: SamplingParams, num_steps: int, clock: Clock
) -> dict[str, float]:
    """Median milliseconds of each part of a decode step with `num_reqs` requests."""
    engine = llm.engine
    texts = [text for group in prompt_sets.OWN.values() for text in group]
    for index in range(num_reqs):
        ids = llm.chat_ids([{"role": "user", "content": texts[index % len(texts)]}])
        engine.add(Request(f"{index}", tuple(ids), params))
    while engine.snapshot().num_verify_steps < 1 or engine.snapshot().num_waiting:
        engine.step()
    before = engine.snapshot().num_verify_steps
    rows: list[dict[str, float]] = []
    with timed_calls(engine, clock):
        for _ in range(num_steps):
            clock.seconds.clear()
            began = time.perf_counter()
            engine.step()
            rows.append({**clock.seconds, "step": time.perf_counter() - began})
            if engine.snapshot().num_running < num_reqs:
                raise SystemExit("a request ended: fewer --steps")
    verified = engine.snapshot().num_verify_steps - before
    assert verified == num_steps * num_reqs
    for index in range(num_reqs):
        engine.abort(f"{index}")
    engine.step()
    names = {name for row in rows for name in row}
    milliseconds = {
        name: 1e3 * statistics.median(row.get(name, 0.0) for row in rows) for name in names
    }
    milliseconds["overhead"] = 1e3 * statistics.median(
        row["step"] - sum(row.get(name, 0.0) for name in FORWARDS) for row in rows
    )
    return milliseconds


def main() -> None:
    """Measure, print a table, write the figures."""
    args = _arguments()
    if args.device != "cpu":
        on_gpu(args)
        return
    config = EngineConfig(
        dtype=args.dtype,
        threads=args.threads,
        scheduler=SchedulerConfig(max_num_reqs=max(16, *args.requests)),
        speculation=SpeculationConfig(planner=args.planner),
    )
    llm = LLM(args.model, args.draft, config)
    length = args.steps * (llm.engine.max_draft_tokens + 1) + 64
    greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    arms = {
        "greedy": greedy,
        "greedy, no draft": SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, speculate=False
        ),
        "sampled": SamplingParams(max_tokens=length, ignore_eos=True),
        "sampled, logprobs 5": SamplingParams(max_tokens=length, ignore_eos=True, logprobs=5),
    }
    clock = Clock()
    rows = {}
    for num_reqs in args.requests:
        for name, params in arms.items():
            rows[f"{num_reqs} x {name}"] = measure(llm, num_reqs, params, args.steps, clock)
    others = sorted(
        {name for row in rows.values() for name in row} - {*FORWARDS, "step", "overhead"},
        key=lambda name: -max(row.get(name, 0.0) for row in rows.values()),
    )
    table = Table("milliseconds", "step", *FORWARDS, "overhead", "share", *others)
    for name, row in rows.items():
        row["overhead_share"] = row["overhead"] / row["step"]
        table.add_row(
            name,
            *(f"{row.get(part, 0.0):.1f}" for part in ("step", *FORWARDS, "overhead")),
            f"{row['overhead_share']:.1%}",
            *(f"{row.get(part, 0.0):.2f}" for part in others),
        )
    Console(width=200).print(table)
    figures: dict[str, object] = {"unit": "milliseconds, medians", "rows": rows}
    print("written:", record.write(args.out, {"info": llm.engine.info, **figures}))


def on_gpu(args: argparse.Namespace) -> None:
    """Measure a CUDA device's steps, print them, write the figures."""
    # CUDA's part brings Triton and a profiler: nobody else pays for them.
    from gpu import breakdown
    from gpu.breakdown_models import random_subject, subject
    from gpu.timing import copy_bandwidth
    from gpu.workload import machine

    steps, most, dtype = args.steps, max(args.requests), args.dtype
    tokens = breakdown.answer_length(steps, MOST_DRAFTS)
    if args.shape is not None:
        seen = random_subject(args.shape, args.device, dtype, args.planner, most, tokens)
    else:
        seen = subject(args.model, args.draft, args.device, dtype, args.planner, most, tokens)
    if args.counters:
        breakdown.run_counted(seen.engine, seen.prompts(most), steps)
        return
    bandwidth = copy_bandwidth(5)
    engine, found, rows = seen.engine, [], []
    for num_reqs, speculate in product(args.requests, (False, True)):
        case = breakdown.Case(seen.prompts(num_reqs), speculate, steps)
        try:
            found.append((case, *breakdown.timed(engine, case)))
        except Exception as problem:  # the other sizes may run: there is no second look
            print(f"{num_reqs} requests, draft {speculate}: {problem!r}", flush=True)
    for case, walls, parts in found:
        try:
            activity = breakdown.profiled(partial(case.run, engine), steps, seen.num_layers)
        except Exception as problem:
            print(f"{len(case.prompts)} requests: {problem!r}; {walls.row()}", flush=True)
        else:
            rows.append(breakdown.row(case, walls, parts, activity, seen.needs, bandwidth))
    figures = {**machine(args.device), "copy_bandwidth": bandwidth, "rows": rows}
    print("written:", record.write(args.out, {"info": seen.engine.info, **figures}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each row")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--model", help="folder of the target; default: the embedded model")
    parser.add_argument("--draft", help="folder of the draft; default: the shipped one")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="CUDA: random weights of this shape, instead of a model")
    parser.add_argument("--counters", action="store_true", help="CUDA: mark steps, measure nothing")
    parser.add_argument("--out", default="step-breakdown", help="name of the results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
