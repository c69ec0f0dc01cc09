"""What is asked: prompts of a file, random ones, or the small set of the project.

Owns the dataset's format and how random prompts are drawn. Must not know how they are sent, but
for the shape that a prompt takes in a body.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emberline.bench.own_prompts import PROMPTS, WORDS
from emberline.bench.settings import BenchError, Endpoint, RandomPrompts

_KEYS = ("turns", "messages", "prompt")
_SPLITS = {"prefix": 2, "lengths": 3, "measured": 4, "warmup": 5}  # streams of one seed


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: a text, a conversation, or token ids (completions alone)."""

    content: str | tuple[Mapping[str, Any], ...] | tuple[int, ...]
    max_tokens: int | None = None  # None: the run's

    def fields(self, endpoint: Endpoint) -> dict[str, Any]:
        """The prompt as fields of a body."""
        if endpoint == "completions":
            return {"prompt": self.content}
        if isinstance(self.content, str):
            return {"messages": [{"role": "user", "content": self.content}]}
        return {"messages": self.content}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of each level and of its warm-up, both without end; `kind` says where from."""

    kind: str
    measured: Callable[[int], Iterator[Prompt]]  # by the level's index
    warmup: Callable[[int], Iterator[Prompt]]
    size: int | None = None  # prompts that differ; None: all do
    notes: tuple[str, ...] = ()


def fixed_prompts(kind: str, prompts: Sequence[Prompt], notes: tuple[str, ...] = ()) -> PromptSet:
    """The same prompts in the same order for every level; a warm-up takes them from the end."""
    return PromptSet(
        kind,
        measured=lambda _level: itertools.cycle(prompts),
        warmup=lambda _level: itertools.cycle(reversed(prompts)),
        size=len(prompts),
        notes=notes,
    )


def own_prompts() -> PromptSet:
    """The small set written for this project."""
    return fixed_prompts("built-in", [Prompt(text) for text in PROMPTS])


def dataset(path: Path, endpoint: Endpoint, shuffle_seed: int | None = None) -> PromptSet:
    """Prompts of a JSONL file: `turns`, `messages` or `prompt` a line, other keys passed over.

    Of several turns the first is asked, and a note says so. A seed shuffles the lines.

    Raises:
        BenchError: no such file, no prompts, or a line that is none; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BenchError(f"--dataset {path}: {_reason(problem)}") from None
    prompts, longer = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt, num_turns = _parse_line(line, endpoint)
        except ValueError as problem:
            raise BenchError(f"--dataset {path}, line {number}: {problem}") from None
        prompts.append(prompt)
        longer += num_turns > 1
    if not prompts:
        raise BenchError(f"--dataset {path} holds no prompts")
    if shuffle_seed is not None:
        order = np.random.default_rng([shuffle_seed, 0]).permutation(len(prompts))
        prompts = [prompts[i] for i in order]
    note = f"{longer} of {len(prompts)} prompts have more turns; only the first is asked"
    return fixed_prompts(path.name, prompts, (note,) if longer else ())


def _reason(problem: OSError | UnicodeDecodeError) -> str:
    if isinstance(problem, UnicodeDecodeError):
        return "is no UTF-8 text"
    return (problem.strerror or str(problem)).lower()


def _parse_line(line: str, endpoint: Endpoint) -> tuple[Prompt, int]:
    """A prompt and how many turns its line has."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ValueError(f"no JSON ({problem.msg} at column {problem.colno})") from None
    if not isinstance(entry, dict):
        raise ValueError(f"an object is expected, got {type(entry).__name__}")
    found = [key for key in _KEYS if key in entry]
    if len(found) != 1:
        raise ValueError(f"exactly one of {', '.join(_KEYS)} is expected, got {found or 'none'}")
    value = entry[found[0]]
    if found[0] == "turns":
        if not _is_list(value, str):
            raise ValueError("turns must be a list of texts, at least one")
        return Prompt(value[0]), len(value)
    if found[0] == "messages":
        if not _is_list(value, dict):
            raise ValueError("messages must be a list of objects, at least one")
        if endpoint == "completions":
            raise ValueError("messages need --endpoint chat")
        return Prompt(tuple(value)), 1
    if isinstance(value, str) and value:
        return Prompt(value), 1
    if not _is_list(value, int):
        raise ValueError("prompt must be a text or a list of token ids, not empty")
    if endpoint == "chat":
        raise ValueError("a prompt of token ids needs --endpoint completions")
    return Prompt(tuple(value)), 1


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is kind for part in value)


def random_prompts(settings: RandomPrompts, seed: int, *, as_ids: bool) -> PromptSet:
    """Prompts that never repeat, of token ids or of words (about a token each).

    Every level has the same lengths in the same order, and tokens of its own: a prefix cache
    finds the shared prefix again and nothing else.
    """
    prefix = _draw(settings.shared_prefix_len, settings, _rng(seed, "prefix"), as_ids)

    def prompts(split: str, level: int) -> Iterator[Prompt]:
        lengths, rng = _rng(seed, "lengths"), _rng(seed, split, level)
        while True:
            num_input = _length(settings.input_len, settings.range_ratio, lengths)
            num_output = _length(settings.output_len, settings.range_ratio, lengths)
            tokens = prefix + _draw(num_input, settings, rng, as_ids)
            yield Prompt(tuple(tokens) if as_ids else " ".join(tokens), num_output)

    return PromptSet(
        "random token ids" if as_ids else "random words",
        measured=lambda level: prompts("measured", level),
        warmup=lambda level: prompts("warmup", level),
    )


def _rng(seed: int, split: str, level: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, _SPLITS[split], level])


def _length(mean: int, ratio: float, rng: np.random.Generator) -> int:
    low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
    return max(1, int(rng.integers(low, high, endpoint=True)))


def _draw(count: int, settings: RandomPrompts, rng: np.random.Generator, as_ids: bool) -> list[Any]:
    if as_ids:
        return list(rng.integers(*settings.id_range, size=count).tolist())
    return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]
