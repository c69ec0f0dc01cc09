"""A long prompt asked twice: time to the first token, acceptance length and text, cold and cached.

python benchmarks/prefix_cache.py [--prompt-tokens 1000] [--tokens 128] [--conversations 6]
"""

from __future__ import annotations

import argparse
import statistics
import time

from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.config import EngineConfig
from emberline.llm import LLM
from emberline.types import RequestOutput, SamplingParams

import prompts as prompt_sets
import record


def long_prompt(llm: LLM, number: int, length: int) -> list[int]:
    """A chat prompt of `length` tokens: many questions, of which the last is to be answered."""
    texts = [text for group in prompt_sets.OWN.values() for text in group]
    texts = texts[number:] + texts[:number]
    many = "\n".join(f"{index}. {text}" for index, text in enumerate(texts * 4))
    low, high = 0, len(many)
    while low < high:  # the longest beginning that fits
        middle = (low + high + 1) // 2
        question = f"{many[:middle]}\n\nAnswer this one only: {texts[0]}"
        fits = len(llm.chat_ids([{"role": "user", "content": question}])) <= length
        low, high = (middle, high) if fits else (low, middle - 1)
    question = f"{many[:low]}\n\nAnswer this one only: {texts[0]}"
    return list(llm.chat_ids([{"role": "user", "content": question}]))


def ask(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[float, list[RequestOutput]]:
    """Seconds to the first token, and everything that came."""
    began = time.perf_counter()
    outputs, first = [], None
    for output in llm.stream(ids, params):
        if first is None and output.token_ids:
            first = time.perf_counter() - began
        outputs.append(output)
    assert first is not None
    return first, outputs


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    args = parser.parse_args()
    llm = LLM(config=EngineConfig(dtype=args.dtype))
    params = SamplingParams(temperature=0, max_tokens=args.tokens, logprobs=0)
    rows = []
    emitted, steps = {"cold": 0, "cached": 0}, {"cold": 0, "cached": 0}
    for number in track(range(args.conversations), "conversations"):
        ids = long_prompt(llm, 5 * number, args.prompt_tokens)
        llm.engine.clear_prefix_cache()
        cold_seconds, cold = ask(llm, ids, params)
        cached_seconds, cached = ask(llm, ids, params)
        same = [
            [x for output in run for x in getattr(output, name) or ()]
            for run in (cold, cached)
            for name in ("token_ids", "logprobs")
        ]
        for name, run in (("cold", cold), ("cached", cached)):
            emitted[name] += run[-1].stats.num_emitted
            steps[name] += run[-1].stats.num_steps
        rows.append(
            {
                "prompt_tokens": len(ids),
                "cached_tokens": cached[-1].num_cached_tokens,
                "ttft_cold_ms": 1e3 * cold_seconds,
                "ttft_cached_ms": 1e3 * cached_seconds,
                "same_tokens": same[0] == same[2],
                "same_logprobs": same[1] == same[3],
            }
        )
    ratio = statistics.median(row["ttft_cached_ms"] / row["ttft_cold_ms"] for row in rows)
    lengths = {name: emitted[name] / steps[name] for name in emitted}
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.1f}" if type(value) is float else str(value)
                        for value in row.values()))  # fmt: skip
    console = Console(width=110)
    console.print(table)
    console.print(f"TTFT cached / cold, median: {ratio:.3f}; acceptance length: {lengths}")
    figures: dict[str, object] = {
        "info": llm.engine.info,
        "ttft_cached_over_cold": ratio,
        "acceptance_length": lengths,
        "conversations": rows,
    }
    print("written:", record.write("prefix-cache", figures))


if __name__ == "__main__":
    main()
