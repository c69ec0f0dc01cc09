"""Output tokens a second of processor time, by verification policy and load, in one process.

python benchmarks/policies.py [--concurrency 1 2 4 8 16] [--turns 2] [--tokens 64] [--dtype ...]

The closed loop of serving.py without HTTP: the engine keeps N requests in flight, one kernel
thread, the policies in turn on one engine. The clock is that thread's own, so other programs' time
does not count: on a quiet machine it is the wall's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.config import EngineConfig
from emberline.llm import LLM
from emberline.types import Request, SamplingParams
from emberline.verify.planner import Planner, Threshold, VerifyAll
from serving import SCHEDULED, plot, ratios

import prompts as prompt_sets
import record


def closed_loop(llm: LLM, prompts: Iterable[tuple[int, ...]], params: SamplingParams, users: int,
                count: int) -> dict[str, float]:  # fmt: skip
    """Keep `users` requests in flight until `count` are done."""
    engine, coming = llm.engine, zip(range(count), prompts, strict=False)
    engine.clear_prefix_cache()
    tokens, before = 0, engine.snapshot()
    began = time.thread_time()
    while True:
        for index, ids in itertools.islice(coming, users - engine.num_requests):
            engine.add(Request(f"{index}", ids, params))
        if not engine.has_work:
            break
        tokens += sum(len(output.token_ids) for output in engine.step())
    seconds, after = time.thread_time() - began, engine.snapshot()
    steps = after.num_verify_steps - before.num_verify_steps
    return {
        "output_tokens_per_second": tokens / seconds,
        "completion_tokens": tokens,
        "seconds": seconds,
        "acceptance_length": (after.num_emitted_tokens - before.num_emitted_tokens) / steps,
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=2, help="requests of each user")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", default="policies", help="name of the results file")
    parser.add_argument("--plot", type=Path, help="picture of the figures")
    args = parser.parse_args()
    llm = LLM(config=EngineConfig(dtype=args.dtype, threads=1))
    scheduled = llm.engine.parts.planner
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens)
    policies: dict[str, tuple[Planner, SamplingParams]] = {
        "no draft": (VerifyAll(), replace(params, speculate=False)),
        "verify_all": (VerifyAll(), params),
        "threshold 0.5": (Threshold(0.5), params),
        SCHEDULED: (scheduled, params),
    }
    groups = prompt_sets.OWN.values()
    texts = [text for row in itertools.zip_longest(*groups) for text in row if text]
    prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text in texts]
    levels: dict[str, dict[str, dict[str, float]]] = {}
    runs = [(users, name) for users in args.concurrency for name in policies]
    for users, name in track(runs, "levels"):
        planner, options = policies[name]
        llm.engine.use_planner(planner, name)
        cycle = itertools.cycle(tuple(ids) for ids in prompts)
        count = max(4, args.turns * users)
        row = closed_loop(llm, cycle, options, users, count)
        levels.setdefault(str(users), {})[name] = row
        print(users, name, {key: round(value, 2) for key, value in row.items()}, flush=True)
    compared = ratios(levels)
    table = Table("in flight", *policies, "over best", "over verify_all")
    for level, rows in levels.items():
        table.add_row(
            level,
            *(f"{row['output_tokens_per_second']:.1f}" for row in rows.values()),
            *(f"{value:.3f}" for value in compared[level].values()),
        )
    Console(width=110).print(table)
    figures: dict[str, object] = {
        "unit": "output tokens per second of processor time",
        "info": llm.engine.info,
        "tokens": args.tokens,
        "levels": levels,
        "scheduled": compared,
    }
    print("written:", record.write(args.out, figures))
    if args.plot:
        plot(levels, args.plot)


if __name__ == "__main__":
    main()
