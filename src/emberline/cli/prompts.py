"""Prompts that the model writes itself, as token ids.

Owns the writing. Must not know what the answers are for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from emberline.prompts import Conversation, TokenIds, conversation_ids
from emberline.types import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from emberline.engine.engine import Engine

MARK = "\u0001mark\u0001"  # stands where a user's words go; no template holds it
USER_TEMPERATURE = 0.8
USER_TOKENS = 80  # after which a user turn is closed
SEED_STRIDE = 1_000_003


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
        return {
            i: conversation_ids(tokenizer, Conversation.of(opening))
            for i, opening in openings.items()
        }
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
        said = Conversation.of(openings[number] + words)
        written[number] = conversation_ids(tokenizer, said)
    return written
