"""Acceptance length by prompt set and position: what `emberline eval` measures, for the README.

python benchmarks/acceptance.py [--prompts FOLDER] [--limit 20] [--tokens 128]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.evaluate.figures import summarise
from emberline.evaluate.measure import Answer, Plan, PromptSet, measure
from emberline.evaluate.report import Drafted, figures_json, markdown, tables
from emberline.llm import LoadedEngine, load_engine
from emberline.prompts import Conversation

import prompts as prompt_sets
import record


def answers(loaded: LoadedEngine, plan: Plan) -> list[Answer]:
    """Everything asked, with a bar."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        return measure(
            loaded.engine,
            loaded.tokenizer,
            plan,
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def main() -> None:
    """Measure, print the tables, write the figures."""
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
    plan = Plan(
        tuple(PromptSet(name, tuple(map(Conversation.of, texts))) for name, texts in sets.items()),
        tuple(args.temperatures),
        args.tokens,
    )
    config = EngineConfig(
        dtype=args.dtype,
        scheduler=SchedulerConfig(max_num_reqs=8),
        speculation=SpeculationConfig(planner="verify_all"),
    )
    loaded = load_engine(args.model, args.draft, config)
    found = answers(loaded, plan)
    width = loaded.engine.max_draft_tokens
    summaries = {
        temperature: summarise([a for a in found if a.temperature == temperature], width)
        for temperature in plan.temperatures
    }
    info = loaded.engine.info
    print(markdown(tables([Drafted(str(info["draft"]), info, summaries)])))
    figures: dict[str, object] = {"info": info, "tokens": args.tokens}
    for temperature, summary in summaries.items():
        rows = {name: figures_json(row) for name, row in summary.sets.items()}
        figures[f"T={temperature}"] = {"macro": summary.macro, "sets": rows}
    name = "acceptance-given" if args.prompts else "acceptance-own"
    print("written:", record.write(name, figures))


if __name__ == "__main__":
    main()
