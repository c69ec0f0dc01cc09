"""Prompt sets through an engine: how each answer was speculated.

Owns which requests are made and what of a block counts. Must not know how figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.engine.engine import Engine
from emberline.engine.record import Recorded, record
from emberline.engine.trace import BlockTrace
from emberline.prompts import Conversation, conversation_ids, read_conversations
from emberline.types import InvalidRequest, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Advance = Callable[[int, int], None]
"""Told how many answers are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one kind, by which results are told apart."""

    name: str
    conversations: tuple[Conversation, ...]  # of which the opening is asked


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask: every prompt once at every temperature."""

    sets: tuple[PromptSet, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # refuses what has no meaning
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise InvalidRequest("temperatures must differ, and be at least one", "temperatures")
        if self.max_tokens < 2:
            raise InvalidRequest("max_tokens must be at least 2: the first token is no step's")


@dataclass(frozen=True, slots=True)
class Answer:
    """How one answer was speculated."""

    set_name: str
    prompt: int  # its number in the set
    temperature: float
    num_steps: int  # verify steps
    num_emitted: int  # tokens that these emitted, up to the answer's end
    blocks: tuple[BlockTrace, ...]  # judged up to the answer's end


def read_sets(
    path: Path, names: Sequence[str] | None = None, first: int | None = None
) -> tuple[PromptSet, ...]:
    """A JSON lines file as one set, or every `*.jsonl` of a folder, each named by its stem.

    Args:
        path: the file or folder.
        names: sets to take, in this order; None takes all, by name.
        first: prompts to take of each.

    Raises:
        InvalidRequest: there is no such set, or one cannot be read.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    there = {file.stem: file for file in files}
    if not there:
        raise InvalidRequest(f"{path}: holds no *.jsonl", "prompts")
    for name in names or ():
        if name not in there:
            message = f"{path}: has no set {name!r}: it has {', '.join(there)}"
            raise InvalidRequest(message, "sets")
    return tuple(
        PromptSet(name, tuple(read_conversations(there[name], first)))
        for name in dict.fromkeys(names or there)
    )


def measure(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, plan: Plan, advance: Advance
) -> list[Answer]:
    """Ask everything, as many at a time as the engine takes. In the plan's order.

    Each answer depends on its prompt and the plan's seed alone, so that drafts are compared on
    the same draws, and a second run finds the same.

    Raises:
        InvalidRequest: a prompt can never run.
        ModelError: an answer ended in an error.
    """
    requests = _requests(engine, tokenizer, plan)
    keys = {request.request_id: key for key, request in requests.items()}
    answers: dict[tuple[str, int, float], Answer] = {}
    advance(0, len(requests))
    for done in record(engine, list(requests.values())):
        key = keys[done.request.request_id]
        stats = done.stats
        answers[key] = Answer(*key, stats.num_steps, stats.num_emitted, judged(done))
        advance(len(answers), len(requests))
    return [answers[key] for key in requests]


def _requests(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> dict[tuple[str, int, float], Request]:
    found = {}
    for part in plan.sets:
        for number, conversation in enumerate(part.conversations):
            try:
                ids = conversation_ids(tokenizer, conversation)
                for temperature in plan.temperatures:
                    # Rejection: what unseeded requests get. The seed makes a run repeatable.
                    params = SamplingParams(
                        temperature=temperature,
                        max_tokens=plan.max_tokens,
                        seed=plan.seed + number,
                        accept="rejection",
                    )
                    name = f"{part.name}/{number} at {temperature:g}"
                    request = Request(name, ids, params)
                    engine.validate(request, has_text=False)
                    found[part.name, number, temperature] = request
            except InvalidRequest as problem:
                message = f"set {part.name}, prompt {number + 1}: {problem}"
                raise InvalidRequest(message, problem.param) from problem
    return found


def judged(done: Recorded) -> tuple[BlockTrace, ...]:
    """An answer's blocks, the last one up to the answer's end.

    Drafts behind the token that ended it were neither right nor wrong: nobody was to say them.
    """
    blocks, stats = done.blocks, done.stats
    beyond = sum(block.num_accepted for block in blocks) - stats.num_accepted
    # A whole step emits one token more than it accepted. One that was cut does not.
    was_cut = stats.num_steps + stats.num_accepted > stats.num_emitted
    if not blocks or not (beyond or was_cut):
        return blocks
    last = blocks[-1]
    kept = last.num_accepted - beyond
    return (*blocks[:-1], replace(last, num_verified=kept, num_accepted=kept))
