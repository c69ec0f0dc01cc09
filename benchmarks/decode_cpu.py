"""Decode speed on this CPU, as ratios in one run: draft over none, logprobs over none.

python benchmarks/decode_cpu.py [--prompts FOLDER] [--limit 3] [--tokens 128] [--dtype bfloat16]

The arms alternate prompt by prompt, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.config import EngineConfig
from emberline.llm import LLM
from emberline.types import SamplingParams

import prompts as prompt_sets
import record


@dataclass(frozen=True)
class Arm:
    """One way of running the same prompt."""

    name: str
    params: SamplingParams


def rate(llm: LLM, ids: tuple[int, ...], params: SamplingParams) -> tuple[float, int]:
    """Seconds of decoding after the first tokens, and the tokens decoded in them."""
    start, count = 0.0, 0
    for output in llm.stream(ids, params):
        if not start:
            start = time.perf_counter()  # the prompt is done, its first token emitted
        else:
            count += len(output.token_ids)
    return time.perf_counter() - start, count


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="folder of prompt sets; default: own prompts")
    parser.add_argument("--limit", type=int, default=3, help="prompts a set")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, help="default: all cores but one")
    args = parser.parse_args()
    sets = prompt_sets.load(args.prompts, args.limit)
    llm = LLM(config=EngineConfig(dtype=args.dtype, threads=args.threads))
    plain = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seed=0)
    arms = [
        Arm("without draft", replace(plain, speculate=False)),
        Arm("with draft", plain),
        Arm("with draft, logprobs 5", replace(plain, logprobs=5)),
    ]
    rate(llm, llm.chat_ids([{"role": "user", "content": "Hello"}]), plain)  # warm-up
    rows: dict[str, dict[str, float]] = {}
    for name, prompts in track(list(sets.items()), "prompt sets"):
        seconds = {arm.name: 0.0 for arm in arms}
        tokens = dict.fromkeys(seconds, 0)
        for prompt in prompts:
            ids = llm.chat_ids([{"role": "user", "content": prompt}])
            for arm in arms:
                spent, count = rate(llm, ids, arm.params)
                seconds[arm.name] += spent
                tokens[arm.name] += count
        rows[name] = {arm.name: tokens[arm.name] / seconds[arm.name] for arm in arms}
    table = Table("set", *(arm.name for arm in arms), "draft / none", "logprobs / off")
    for name, row in rows.items():
        base, draft, scored = (row[arm.name] for arm in arms)
        table.add_row(
            name,
            *(f"{row[a.name]:.1f}" for a in arms),
            f"{draft / base:.2f}",
            f"{scored / draft:.3f}",
        )
    macro = {arm.name: statistics.mean(row[arm.name] for row in rows.values()) for arm in arms}
    speedup = statistics.mean(r["with draft"] / r["without draft"] for r in rows.values())
    cost = statistics.mean(r["with draft, logprobs 5"] / r["with draft"] for r in rows.values())
    table.add_row(
        "macro",
        *(f"{macro[a.name]:.1f}" for a in arms),
        f"{speedup:.2f}",
        f"{cost:.3f}",
        style="bold",
    )
    Console(width=110).print(table)
    figures: dict[str, object] = {
        "unit": "tokens per second",
        "info": llm.engine.info,
        "sets": rows,
        "macro": macro,
        "draft_over_none": speedup,
        "logprobs_over_off": cost,
    }
    print("written:", record.write("decode-cpu", figures))


if __name__ == "__main__":
    main()
