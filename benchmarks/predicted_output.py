"""Predicted outputs: the model's own greedy answer with every twentieth word changed, predicted.

python benchmarks/predicted_output.py [--prompts FOLDER] [--tokens 192] [--dtype float32]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.config import EngineConfig, SpeculationConfig
from emberline.engine.engine import Engine
from emberline.llm import LLM
from emberline.types import Request, RequestOutput, SamplingParams

import prompts as prompt_sets
import record

EVERY = 20
NUM_PROMPTS = 10


def change_words(text: str) -> str:
    """Every twentieth word replaced by another."""
    words = text.split(" ")
    for i in range(EVERY - 1, len(words), EVERY):
        words[i] = "umbrella" if words[i] != "umbrella" else "lantern"
    return " ".join(words)


def run(engine: Engine, request: Request) -> RequestOutput:
    """Run one request alone; its last output, with all its tokens."""
    engine.add(request)
    tokens: list[int] = []
    last = None
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            last = output
    assert last is not None
    return RequestOutput(request.request_id, tuple(tokens), stats=last.stats)


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="folder of prompt sets; default: own prompts")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--planner", default="verify_all", help="see emberline serve")
    args = parser.parse_args()
    sets = prompt_sets.load(args.prompts, NUM_PROMPTS)
    texts = [text for row in zip(*sets.values(), strict=False) for text in row][:NUM_PROMPTS]
    speculation = SpeculationConfig(planner=args.planner)
    llm = LLM(config=EngineConfig(dtype=args.dtype, speculation=speculation))
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    table = Table("prompt", "tokens", "steps", "tokens a step", "without", "accepted", "rejected")
    rows = []
    for number, text in enumerate(track(texts, "prompts")):
        ids = llm.chat_ids([{"role": "user", "content": text}])
        plain = run(llm.engine, Request(f"plain-{number}", ids, params))
        answer = llm.token_text.text_of(plain.token_ids)
        guess = llm.tokenizer(change_words(answer), add_special_tokens=False)["input_ids"]
        predicted = run(
            llm.engine, Request(f"predicted-{number}", ids, params, prediction=tuple(guess))
        )
        if predicted.token_ids != plain.token_ids:
            raise SystemExit(f"prompt {number}: the prediction changed the answer")
        stats = predicted.stats
        row = {
            "tokens": len(predicted.token_ids),
            "steps": stats.num_steps,
            "tokens_per_step": stats.acceptance_length,
            "tokens_per_step_without": plain.stats.acceptance_length,
            "accepted_prediction_tokens": stats.num_predicted_accepted,
            "rejected_prediction_tokens": stats.num_predicted - stats.num_predicted_accepted,
            "verified_prediction_tokens": stats.num_predicted,
        }
        rows.append(row)
        shown = [
            f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()
        ]
        table.add_row(str(number), *shown[:-1])
    steps = sum(row["steps"] for row in rows)
    emitted = sum(row["tokens"] - 1 for row in rows)
    table.add_row("all", str(emitted), str(steps), f"{emitted / steps:.2f}")
    Console().print(table)
    figures = {"info": llm.engine.info, "tokens_per_step": emitted / steps, "prompts": rows}
    print("written:", record.write("predicted-output", figures))


if __name__ == "__main__":
    main()
