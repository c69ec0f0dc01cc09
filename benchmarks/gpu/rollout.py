"""Speed while requests come and go: one call of many prompts, with answers of any length.

    PYTHONPATH=benchmarks python -m gpu.rollout --model FOLDER --draft FOLDER --prompts FILE

There are eight prompts for each request that runs at once, so that one starts whenever another
ends. Those who come wait for others to start with; for comparison they start at once as well, and
everything is verified, or nothing drafted. The variants take turns in one process, and each is
given the median.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from emberline.engine import scheduler
from emberline.engine.engine import Engine
from emberline.hub import load_tokenizer, resolve_model
from emberline.llm import LLM
from emberline.types import SamplingParams
from emberline.verify.planner import VerifyAll

import record
from gpu.workload import (
    NO_DRAFT,
    SCHEDULED,
    VERIFY_ALL,
    machine,
    read_prompts,
    settings,
    stand_by,
    use_planner,
)

PER_PLACE = 8  # prompts for each request that runs at once
LENGTHS = (32, 384)  # tokens of an answer, all as likely


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the same call."""

    name: str
    policy: str  # of `workload.POLICIES`
    gathers: bool = True  # whether those who come wait for others to start with

    @property
    def draft(self) -> bool:
        """Whether anything is drafted."""
        return self.policy != NO_DRAFT


VARIANTS = (
    Variant("none", NO_DRAFT),
    Variant("scheduled, at once", SCHEDULED, gathers=False),
    Variant("verify_all", VERIFY_ALL),
    Variant("scheduled", SCHEDULED),
)


@contextmanager
def as_asked(engine: Engine, variant: Variant) -> Iterator[None]:
    """Plan and start requests as a variant has it."""
    planner, name, runner = engine.parts.planner, str(engine.info["planner"]), engine.runner
    ahead = None if runner is None else runner.planner
    most = scheduler.MOST_GATHERING if variant.gathers else 0
    if variant.policy != SCHEDULED:
        use_planner(engine, VerifyAll(), "verify_all")
    try:
        with mock.patch.object(scheduler, "MOST_GATHERING", most):
            yield
    finally:
        use_planner(engine, planner, name, ahead)


def run(llm: LLM, prompts: Sequence[tuple[int, ...]], count: int, variant: Variant) -> float:
    """Tokens a second of a call of so many prompts. Lengths are the same in every run.

    Raises:
        RuntimeError: answers are not as long as they were asked to be.
    """
    source = random.Random(count)
    lengths = [source.randint(*LENGTHS) for _ in range(count)]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, speculate=variant.draft)
        for n in lengths
    ]
    rows = [prompts[i % len(prompts)] for i in range(count)]
    with as_asked(llm.engine, variant):
        began = time.perf_counter()
        answers = llm.generate(rows, params)
        seconds = time.perf_counter() - began
    if [len(choice.token_ids) for [choice] in answers] != lengths:
        raise RuntimeError("some answers are not as long as they were asked to be")
    return sum(lengths) / seconds


def measure(
    llm: LLM, prompts: Sequence[tuple[int, ...]], concurrency: int, reps: int
) -> dict[str, object]:
    """All variants in turns."""
    drafts = llm.engine.max_draft_tokens > 0
    variants = [variant for variant in VARIANTS if drafts or not variant.draft]
    for variant in variants:  # steps are captured when a shape is first met
        for _ in range(2):
            run(llm, prompts, concurrency * PER_PLACE // 2, variant)
            stand_by(llm.engine)
    rates: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(reps):
        for variant in variants:
            rates[variant.name].append(
                run(llm, prompts, concurrency * PER_PLACE, variant),
            )
    return {
        "concurrency": concurrency,
        "tok_s": {name: round(statistics.median(all_), 1) for name, all_ in rates.items()},
        "tok_s_all": {name: [round(one, 1) for one in all_] for name, all_ in rates.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a line a size, write `results/<name>.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder of the target; default: the embedded model")
    parser.add_argument("--draft", help="folder of the draft; default: the shipped one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--prompts", type=Path, help="a JSON list of token ids a line")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--name", default="gpu-rollout", help="of the file of results")
    args = parser.parse_args(argv)
    folder = resolve_model(args.model)
    prompts = read_prompts(args.prompts, load_tokenizer(folder.path))
    rows, info = [], {}
    for concurrency in args.concurrency:
        longest = max(len(ids) for ids in prompts) + LENGTHS[1]
        config = settings(args.device, args.dtype, concurrency, longest)
        llm = LLM(args.model, args.draft, config)
        rows.append(measure(llm, prompts, concurrency, args.reps))
        info = llm.engine.info
        print(json.dumps(rows[-1]), flush=True)
    figures = {
        **machine(args.device),
        "unit": "tokens a second, medians",
        "answers": LENGTHS,
        "prompts_per_place": PER_PLACE,
        "info": info,
        "rows": rows,
    }
    print("written:", record.write(args.name, figures))


if __name__ == "__main__":
    main()
