"""Records what a draft's confidences said and what became of its drafts, resumably.

Owns which requests make up a recording and how one goes on. Must not know what it is used for.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emberline.config import EngineConfig, SlotRule
from emberline.drafters.checkpoint import read_draft_config
from emberline.engine.build import build_engine, model_depth
from emberline.engine.record import record
from emberline.engine.trace import RequestTrace, append_trace, read_traces, write_traces
from emberline.hub import ModelFolder, generation_stop_ids, load_tokenizer
from emberline.models.weights import ModelError
from emberline.prompts import Conversation, TokenIds, conversation_ids, read_conversations
from emberline.types import Request, SamplingParams

QUESTIONS = "template questions"
"""Name of the prompts that there are without a file."""

Advance = Callable[[int, int], None]
"""Told how many requests are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to record: every prompt answered once at every temperature."""

    model: ModelFolder
    draft: Path
    prompts: Path | None  # None: questions from templates
    temperatures: tuple[float, ...]
    max_tokens: int
    limit: int  # most prompts
    seed: int
    slot_rule: SlotRule | None = None  # of a block draft; None = what its files say

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # refuses what has no meaning

    @property
    def num_draft_tokens(self) -> int:
        """K, the drafts of a block."""
        depth = model_depth(self.model.path)
        return read_draft_config(self.draft, self.slot_rule, depth).max_draft_tokens

    @property
    def has_confidence(self) -> bool:
        """Whether there is anything of the draft's to record."""
        depth = model_depth(self.model.path)
        config = read_draft_config(self.draft, self.slot_rule, depth)
        return getattr(config, "has_confidence", False)

    @property
    def prompts_name(self) -> str:
        """What the prompts are called in files."""
        return QUESTIONS if self.prompts is None else self.prompts.stem

    def summary(self) -> str:
        """One line for the calibration's file."""
        temperatures = " and ".join(f"{t:g}" for t in self.temperatures)
        return f"{self.prompts_name} prompts at temperature {temperatures}"

    def requests(self) -> list[tuple[str, int, float]]:
        """Name, number and temperature of all of them, in order.

        Raises:
            InvalidRequest: the prompts cannot be read.
        """
        count = self.limit
        if self.prompts is not None:
            count = len(read_conversations(self.prompts, self.limit))
        return [
            (f"{self.prompts_name}/{i}", i, temperature)
            for i in range(count)
            for temperature in self.temperatures
        ]

    def header(self) -> dict[str, Any]:
        """What the recording's file says of it."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "model": self.model.name,
            "draft": self.draft.name,
            "prompts": self.prompts_name,
            "prompts_digest": self._digest(),
            "temperatures": list(self.temperatures),
            "max_tokens": self.max_tokens,
            "limit": self.limit,
            "seed": self.seed,
        }

    def _digest(self) -> str | None:
        """Tells prompts of one name apart: a file that was edited is another recording."""
        if self.prompts is None:
            return None
        asked = [asdict(one) for one in read_conversations(self.prompts, self.limit)]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def recorded(
    recipe: Recipe, path: Path | None, config: EngineConfig, advance: Advance
) -> list[RequestTrace]:
    """The recipe's traces: those in the file, and the missing ones recorded now, and added to it.

    A whole file needs no model.

    Raises:
        ModelError: the file holds another recording, or the draft has no confidences.
        InvalidRequest: a prompt can never run.
    """
    traces = _resumed(path, recipe) if path is not None else []
    wanted = recipe.requests()
    have = {(trace.prompt, trace.temperature) for trace in traces}
    missing = [entry for entry in wanted if (entry[0], entry[2]) not in have]
    advance(len(wanted) - len(missing), len(wanted))
    if missing:
        for trace in _record(recipe, missing, config):
            traces.append(trace)
            if path is not None:
                append_trace(path, trace)
            advance(len(traces), len(wanted))
    return traces


def _resumed(path: Path, recipe: Recipe) -> list[RequestTrace]:
    """What the file has, if it is of this recipe; a new file otherwise."""
    header = recipe.header()
    traces: list[RequestTrace] = []
    if path.exists():
        found, traces = read_traces(path)
        for name, value in header.items():
            if found.get(name) != value:
                raise ModelError(
                    f"{path}: recorded with {name} {found.get(name)!r}, not {value!r}: give the "
                    f"same again, or another file"
                )
    write_traces(path, header, traces)  # again: a line that was cut short must not stay
    return traces


def _record(
    recipe: Recipe, missing: list[tuple[str, int, float]], config: EngineConfig
) -> Iterator[RequestTrace]:
    model = recipe.model
    unplanned = replace(config.speculation, planner="verify_all", calibration="none")
    engine = build_engine(
        model.path,
        recipe.draft,
        # Uncalibrated and unplanned: what a calibration is fitted to.
        replace(config, speculation=unplanned),
        eos_ids=generation_stop_ids(model.path),
        name=model.name,
    )
    prompts = _prompts(recipe, sorted({number for _, number, _ in missing}))
    entries: dict[str, tuple[str, float]] = {}
    requests = []
    for name, number, temperature in missing:
        request_id = f"{name} at {temperature:g}"
        entries[request_id] = (name, temperature)
        # Rejection: what unseeded requests get. The seed only makes a recording repeatable.
        params = SamplingParams(
            temperature=temperature,
            max_tokens=recipe.max_tokens,
            seed=recipe.seed + number,
            accept="rejection",
        )
        requests.append(Request(request_id, prompts[number], params))
    for done in record(engine, requests):
        if len(done.token_ids) > 2 and not any(block.confidence for block in done.blocks):
            raise ModelError(f"{recipe.draft}: has no confidence head: nothing to calibrate")
        name, temperature = entries[done.request.request_id]
        yield RequestTrace(name, temperature, done.blocks)


def _prompts(recipe: Recipe, numbers: list[int]) -> dict[int, TokenIds]:
    """Token ids by number. Without a file prompt `i` depends on `i` and the seed alone."""
    from emberline.train.question_split import draw_question

    tokenizer = load_tokenizer(recipe.model.path)
    if recipe.prompts is None:
        # Reserved ones: confidences are too good on questions that the draft was trained on.
        asked = {
            n: draw_question(random.Random(f"{recipe.seed}/{n}"), reserved=True) for n in numbers
        }
        return {n: conversation_ids(tokenizer, Conversation.of(text)) for n, text in asked.items()}
    given = read_conversations(recipe.prompts, recipe.limit)
    return {number: conversation_ids(tokenizer, given[number]) for number in numbers}
