"""Questions that users might ask, whole and in great number: a seeded generator of first turns.

Owns which kinds there are, how often each comes, and how people vary what they write. The text is
in the files beside this one, all of it hand-written: no sentence of any benchmark is there. Knows
nothing of models or tokens.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from functools import cache

from emberline.train.questions.chat import CHAT_QUESTIONS
from emberline.train.questions.code import completion_question, task_question
from emberline.train.questions.fill import fill, variety
from emberline.train.questions.maths import MATHS_PROBLEMS
from emberline.train.questions.passages import (
    ABOUT_PASSAGES,
    ABOUT_TABLES,
    DATA_TABLES,
    ON_SENTENCES,
    PASSAGES,
)
from emberline.train.questions.sums import WORD_PROBLEMS
from emberline.train.questions.writing import FOLLOW_UPS, WRITING_REQUESTS

__all__ = ["QUESTION_KINDS", "make_follow_up", "make_question", "question_of_kind"]

# How often each kind is asked, relative to the others.
QUESTION_KINDS = {"sums": 1.0, "maths": 1.0, "completion": 1.0, "task": 1.0, "chat": 1.0}

_SHOW_STEPS = (
    "Show your work.", "Explain your reasoning.", "Think step by step.", "Solve it step by step.",
    "Please explain each step.", "Give the answer at the end.", "End with the result.",
)  # fmt: skip
_NUMBERS = (
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
_VERBS = re.compile(
    r"(Write|Explain|Give|Describe|Compare|List|Name|Tell|Make|Suggest|Plan|Translate|Rewrite|Create"
    r"|Summarize|Correct|Sort|Recommend|Define|Help|Draft|Find|Continue|Compute|Solve|Simplify) "
)
_ASKS = ("Please ", "Could you ", "Can you ", "I want you to ", "Can you please ")


def make_question(rng: random.Random) -> str:
    """Draw a question of any kind, in the shares of `QUESTION_KINDS`."""
    (kind,) = rng.choices(list(QUESTION_KINDS), list(QUESTION_KINDS.values()))
    return question_of_kind(kind, rng)


def question_of_kind(kind: str, rng: random.Random) -> str:
    """Draw a question of one of `QUESTION_KINDS`. Raises KeyError for another kind."""
    return _MAKERS[kind](rng)


def make_follow_up(rng: random.Random) -> str:
    """Draw what a user says after an answer."""
    return _casual(_draw(FOLLOW_UPS, rng), rng)


def _sums_question(rng: random.Random) -> str:
    text = _draw(WORD_PROBLEMS, rng)
    if rng.random() < 0.15:
        text = re.sub(r"(?<= )([2-9]|1[0-2])(?= [a-z])", _in_words, text)
    if rng.random() < 0.7:
        text = re.sub(r"(?<![\d.])\d{4,}", lambda number: f"{int(number[0]):,}", text)
    if rng.random() < 0.12:
        currency = rng.choice((r"€\1", r"£\1", r"\1 euros", r"\1 dollars"))
        text = re.sub(r"\$(\d[\d,]*(?:\.\d+)?)", currency, text)
    return _with_steps(text, rng)


def _maths_question(rng: random.Random) -> str:
    text = _draw(MATHS_PROBLEMS, rng)
    text = re.sub(r"([\^_])(-?\d{2,})", r"\1{\2}", text)
    text = re.sub(r"(?<![\d.^_{])1(?=[a-z])", "", text)  # 1x is x
    return _with_steps(_asked(text, rng), rng)


def _chat_question(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.15:
        return _asked(fill(_about(ABOUT_PASSAGES, PASSAGES, rng), rng), rng)
    if kind < 0.2:
        return _asked(fill(_about(ABOUT_TABLES, DATA_TABLES, rng), rng), rng)
    if kind < 0.33:
        text = _draw(ON_SENTENCES, rng)
    else:
        text = _draw(WRITING_REQUESTS if kind < 0.5 else CHAT_QUESTIONS, rng)
    return _casual(_asked(text, rng), rng)


def _about(requests: tuple[str, ...], texts: tuple[str, ...], rng: random.Random) -> str:
    return rng.choice(requests).replace("@", rng.choice(texts).strip())


def _draw(templates: tuple[str, ...], rng: random.Random) -> str:
    """Fill a template. Those that make more different texts are drawn more often."""
    (template,) = rng.choices(templates, _weights(templates))
    text = fill(template, rng)
    return text[0].upper() + text[1:]


@cache
def _weights(templates: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(1 + math.log(variety(template)) for template in templates)


def _in_words(number: re.Match[str]) -> str:
    return _NUMBERS[int(number[0]) - 2]


def _asked(text: str, rng: random.Random) -> str:
    """Put some commands as a request."""
    if not _VERBS.match(text) or rng.random() > 0.25:
        return text
    ask = rng.choice(_ASKS)
    text = ask + text[0].lower() + text[1:]
    one_sentence = text.endswith(".") and ". " not in text
    return text[:-1] + "?" if one_sentence and ask.startswith("C") else text


def _casual(text: str, rng: random.Random) -> str:
    """Write some of it as people type: no capital at the start, no full stop at the end."""
    if rng.random() < 0.1 and not text.startswith("I "):
        text = text[0].lower() + text[1:]
    return text.removesuffix(".") if rng.random() < 0.15 else text


def _with_steps(text: str, rng: random.Random) -> str:
    return f"{text} {rng.choice(_SHOW_STEPS)}" if rng.random() < 0.12 else text


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "sums": _sums_question,
    "maths": _maths_question,
    "completion": completion_question,
    "task": task_question,
    "chat": _chat_question,
}
