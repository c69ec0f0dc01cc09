"""Acceptance length by prompt set and position, real speculative decoding, all drafts verified.

python benchmarks/acceptance.py [--prompts FOLDER] [--limit 20] [--tokens 128]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.llm import LLM
from emberline.types import SamplingParams

import prompts as prompt_sets
import record


def measure(llm: LLM, prompts: list[str], temperature: float, tokens: int) -> dict[str, object]:
    """Tokens a verify step over all prompts, and conditional acceptance by position."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=tokens, seed=i, accept="rejection")
        for i in range(len(prompts))
    ]
    ids = [llm.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
    done = [choices[0].stats for choices in llm.generate(ids, params)]
    width = max(len(s.verified_per_pos) for s in done)

    def per_pos(name: str) -> list[int]:
        columns = [getattr(s, name) for s in done]
        return [sum(c[k] for c in columns if k < len(c)) for k in range(width)]

    accepted = per_pos("accepted_per_pos")
    reached = [sum(s.num_steps for s in done), *accepted[:-1]]
    return {
        "acceptance_length": sum(s.num_emitted for s in done) / sum(s.num_steps for s in done),
        "steps": sum(s.num_steps for s in done),
        "emitted": sum(s.num_emitted for s in done),
        "conditional_acceptance": [
            round(a / r, 3) if r else None for a, r in zip(accepted, reached, strict=True)
        ],
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="folder of prompt sets; default: own prompts")
    parser.add_argument("--limit", type=int, default=20, help="prompts a set")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", help="default: the shipped draft")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    sets = prompt_sets.load(args.prompts, args.limit)
    config = EngineConfig(
        dtype=args.dtype,
        scheduler=SchedulerConfig(max_num_reqs=8),
        speculation=SpeculationConfig(planner="verify_all"),
    )
    llm = LLM(args.model, args.draft, config)
    figures: dict[str, object] = {"info": llm.engine.info, "tokens": args.tokens}
    table = Table("T", "set", "acceptance length", "conditional acceptance by position")
    for temperature in args.temperatures:
        rows = {
            name: measure(llm, prompts, temperature, args.tokens)
            for name, prompts in track(list(sets.items()), f"T = {temperature}")
        }
        lengths = [float(str(row["acceptance_length"])) for row in rows.values()]
        macro = sum(lengths) / len(lengths)
        figures[f"T={temperature}"] = {"macro": macro, "sets": rows}
        for name, row in rows.items():
            table.add_row(
                str(temperature),
                name,
                f"{row['acceptance_length']:.2f}",
                " ".join(str(a) for a in row["conditional_acceptance"]),  # type: ignore[attr-defined]
            )
        table.add_row(str(temperature), "macro", f"{macro:.2f}", "", style="bold")
    Console(width=110).print(table)
    name = "acceptance-given" if args.prompts else "acceptance-own"
    print("written:", record.write(name, figures))


if __name__ == "__main__":
    main()
