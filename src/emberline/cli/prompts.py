"""Prompts as token ids: from a file, or written by the model itself.

Owns the file's two forms and the writing. Must not know what the answers are for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.types import InvalidRequest, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from emberline.engine.engine import Engine

MARK = "\u0001mark\u0001"  # stands where a user's words go; no template holds it
USER_TEMPERATURE = 0.8
USER_TOKENS = 80  # after which a user turn is closed
SEED_STRIDE = 1_000_003

TokenIds = tuple[int, ...]


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Prompts of a JSON lines file: `{"prompt": "..."}` or `{"turns": ["...", ...]}` a line.

    Of turns the first is taken: the later ones only make sense after an answer.

    Raises:
        InvalidRequest: the file cannot be read, or a line has neither form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{path}: cannot be read ({problem})", "prompts") from problem
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            text = raw["turns"][0] if "turns" in raw else raw["prompt"]
        except (ValueError, KeyError, TypeError, IndexError):
            text = None
        if not isinstance(text, str) or not text:
            raise InvalidRequest(
                f'{path}: line {number} must be {{"prompt": "..."}} or {{"turns": ["..."]}}',
                "prompts",
            )
        prompts.append(text)
    if not prompts:
        raise InvalidRequest(f"{path}: holds no prompt", "prompts")
    return prompts[:limit]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenIds:
    """A user's words, ready for the answer: in the chat template if the model has one."""
    if not tokenizer.chat_template:
        return tuple(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return tuple(ids)


def written_prompts(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, numbers: Sequence[int], seed: int
) -> dict[int, TokenIds]:
    """Prompts that the model writes: it plays the user, after the first words of a question.

    Prompt `i` depends on `i` and the seed alone. A model without a chat template knows no users:
    the first words are its prompt.
    """
    from emberline.engine.record import record
    from emberline.train.openings import OPENINGS

    shuffled = random.Random(seed).sample(OPENINGS, len(OPENINGS))
    openings = {i: shuffled[i % len(shuffled)] for i in numbers}
    if not tokenizer.chat_template:
        return {i: prompt_ids(tokenizer, opening) for i, opening in openings.items()}
    turns = [{"role": "user", "content": MARK}]
    before = str(tokenizer.apply_chat_template(turns, tokenize=False)).split(MARK)[0]
    requests = []
    for i, opening in openings.items():
        ids = tokenizer(before + opening, add_special_tokens=False)["input_ids"]
        params = SamplingParams(
            temperature=USER_TEMPERATURE, max_tokens=USER_TOKENS, seed=seed * SEED_STRIDE + i
        )
        requests.append(Request(str(i), tuple(ids), params))
    written = {}
    for done in record(engine, requests):
        number = int(done.request.request_id)
        words = str(tokenizer.decode(done.token_ids, skip_special_tokens=True))
        written[number] = prompt_ids(tokenizer, openings[number] + words)
    return written
