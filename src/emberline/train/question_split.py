"""Which generated questions are trained on, and which are only measured or calibrated on.

Owns what makes two prompts the same and the split by it. Knows nothing of models or rows.
"""

from __future__ import annotations

import hashlib
import random

from emberline.train.questions import make_question

RESERVED = 32
"""One question in so many is never given in training rows."""


def prompt_digest(text: str) -> int:
    """64 bits of a prompt's text; case and white space make no other prompt."""
    normal = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.sha256(normal.encode()).digest()[:8], signed=True)


def is_reserved(question: str) -> bool:
    """Whether a question is one of those that no training row is given: its text says so."""
    return prompt_digest(question) % RESERVED == 0


def draw_question(rng: random.Random, *, reserved: bool) -> str:
    """Draw a question of one of the two sides."""
    while is_reserved(question := make_question(rng)) != reserved:
        pass
    return question
