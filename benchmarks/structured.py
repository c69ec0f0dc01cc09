"""Structured output under speculation: valid answers, and what masking the drafts brings.

python benchmarks/structured.py [--schemas 100] [--tokens 96] [--dtype float32]

The same schemas, at temperature 0 and 1, with drafts drawn under the grammar's mask and with free
ones (which are judged up to the first that may not come).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, KVSpec
from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.drafters.base import Drafter
from emberline.llm import LLM, Completion
from emberline.types import FinishReason, Grammar, SamplingParams

import record
from schemas import Schema, random_schema


class FreeDrafts:
    """A drafter that does not see the grammar's masks."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def max_draft_tokens(self) -> int:
        """The drafter's."""
        return self._drafter.max_draft_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        """The drafter's."""
        return self._drafter.taps

    @property
    def kv_spec(self) -> KVSpec | None:
        """The drafter's."""
        return self._drafter.kv_spec

    def propose(self, context: DraftContext) -> DraftProposal:
        """Drafts as if nothing bound them."""
        return self._drafter.propose(replace(context, constraint=None))

    def observe(self, committed: CommittedTokens) -> None:
        """The drafter's."""
        self._drafter.observe(committed)


def ask(schema: Schema) -> str:
    """A prompt for a document of a schema."""
    names = ", ".join(schema["properties"])
    return f"Give an example of a JSON object with these fields: {names}. Answer with JSON only."


def answers(
    llm: LLM, schemas: Sequence[Schema], temperature: float, tokens: int
) -> list[Completion]:
    """One answer a schema."""
    ids = [llm.chat_ids([{"role": "user", "content": ask(schema)}]) for schema in schemas]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=number,
            accept="rejection",
            max_tokens=tokens,
            logprobs=0,
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for number, schema in enumerate(schemas)
    ]
    return [choices[0] for choices in llm.generate(ids, params)]


def summary(schemas: Sequence[Schema], done: Sequence[Completion]) -> dict[str, float]:
    """Counts over all schemas. An answer that ended and does not match would raise."""
    finished = 0
    for schema, answer in zip(schemas, done, strict=True):
        if answer.logprobs is None or len(answer.logprobs) != len(answer.token_ids):
            raise SystemExit("an answer has not one record a token")
        if answer.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(answer.text), schema)
            finished += 1
    return {
        "answers": len(done),
        "finished": finished,
        "valid": finished,
        "tokens": sum(len(answer.token_ids) for answer in done),
        "acceptance_length": sum(a.stats.num_emitted for a in done)
        / sum(a.stats.num_steps for a in done),
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    args = parser.parse_args()
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(args.schemas)]
    config = EngineConfig(
        dtype=args.dtype,
        scheduler=SchedulerConfig(max_num_reqs=8),
        speculation=SpeculationConfig(planner="verify_all"),
    )
    llm = LLM(config=config)
    masked = llm.engine.parts.drafter
    assert masked is not None
    arms: dict[str, Drafter] = {"masked drafts": masked, "free drafts": FreeDrafts(masked)}
    figures: dict[str, object] = {"info": llm.engine.info}
    table = Table("T", "drafts", "finished", "valid", "tokens", "acceptance length")
    for temperature in (0.0, 1.0):
        rows = {}
        for name, drafter in track(list(arms.items()), f"T = {temperature}"):
            llm.engine.parts = replace(llm.engine.parts, drafter=drafter)
            llm.engine.clear_prefix_cache()
            rows[name] = summary(schemas, answers(llm, schemas, temperature, args.tokens))
            row = rows[name]
            shown = [str(row[key]) for key in ("finished", "valid", "tokens")]
            table.add_row(str(temperature), name, *shown, f"{row['acceptance_length']:.2f}")
        ratio = (
            rows["masked drafts"]["acceptance_length"] / rows["free drafts"]["acceptance_length"]
        )
        figures[f"T={temperature}"] = {"masked_over_free": ratio, **rows}
        table.add_row(str(temperature), "masked over free", "", "", "", f"{ratio:.3f}")
    Console().print(table)
    print("written:", record.write("structured", figures))


if __name__ == "__main__":
    main()
