"""How fast prompts are scored, beside reading them without a score.

    PYTHONPATH=benchmarks python -m gpu.scoring --model FOLDER --draft FOLDER

Prompts of random tokens, new ones in every run, so that none is found in the cache: read for one
token of an answer, scored, and scored with five alternatives a token. Each is given the median.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberline.llm import LLM
from emberline.types import SamplingParams

import record
from gpu.workload import machine, settings

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to go through prompts."""

    name: str
    run: Callable[[LLM, Prompts], object]


def _read(llm: LLM, prompts: Prompts) -> object:
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, speculate=False))


WAYS = (
    Way("read", _read),
    Way("scored", lambda llm, prompts: llm.score(prompts)),
    Way("scored, five alternatives", lambda llm, prompts: llm.score(prompts, top=5)),
)


def new_prompts(source: random.Random, count: int, length: int, vocab_size: int) -> Prompts:
    """Random tokens, past the special ones that most vocabularies begin with."""
    least = vocab_size // 100
    return [[source.randrange(least, vocab_size) for _ in range(length)] for _ in range(count)]


def measure(llm: LLM, count: int, length: int, reps: int) -> list[dict[str, object]]:
    """Prompt tokens a second of each way, in turns."""
    source, vocab_size = random.Random(length), llm.engine.vocab_size
    rates: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for rep in range(reps + 1):  # the first one warms up
        for way in WAYS:
            prompts = new_prompts(source, count, length, vocab_size)
            began = time.perf_counter()
            way.run(llm, prompts)
            if rep:
                rates[way.name].append(count * length / (time.perf_counter() - began))
    medians = {name: statistics.median(some) for name, some in rates.items()}
    return [
        {
            "way": name,
            "prompts": count,
            "length": length,
            "tokens_per_second": round(rate, 1),
            "over_read": round(rate / medians["read"], 3),
        }
        for name, rate in medians.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a line a way and length, write `results/<name>.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder of the target; default: the embedded model")
    parser.add_argument("--draft", help="folder of the draft; default: the shipped one")
    parser.add_argument("--prompts", type=int, default=64, help="how many a call")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024], help="of a prompt")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--name", default="gpu-scoring", help="of the file of results")
    args = parser.parse_args(argv)
    config = settings(args.device, args.dtype, args.prompts, max(args.lengths))
    llm = LLM(args.model, args.draft, config)
    rows = []
    for length in args.lengths:
        for row in measure(llm, args.prompts, length, args.reps):
            rows.append(row)
            print(json.dumps(row), flush=True)
    figures = {**machine(args.device), "info": llm.engine.info, "rows": rows}
    print("written:", record.write(args.name, figures))


if __name__ == "__main__":
    main()
