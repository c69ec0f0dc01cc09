"""Arguments for examples of Python functions: kinds of values, each with its annotation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from emberline.train.questions.words import WORDS

NOUNS = WORDS["noun"]
_NAMES = ("Ada", "Bo", "Cleo", "Dov", "Esme", "Finn", "Gus", "Hana", "Iris", "Jude", "Kai", "Lena")
_SMALL_WORDS = ("a", "the", "is", "in", "on", "of", "to", "and", "we", "my")


@dataclass(frozen=True, slots=True)
class Values:
    """A kind of argument."""

    annotation: str
    draw: Callable[[random.Random], object]


def _sentence(rng: random.Random) -> str:
    words = [rng.choice((rng.choice(_SMALL_WORDS), *rng.sample(NOUNS, 2))) for _ in range(5)]
    text = " ".join(words[: rng.randint(2, 5)])
    return rng.choice((text, text.capitalize(), text.title()))


def _ints(low: int, high: int, fewest: int = 3) -> Callable[[random.Random], list[int]]:
    return lambda rng: [rng.randint(low, high) for _ in range(rng.randint(fewest, 7))]


def _int(low: int, high: int) -> Values:
    return Values("int", lambda rng: rng.randint(low, high))


def _matrix(rng: random.Random) -> list[list[int]]:
    rows, columns = rng.randint(2, 3), rng.randint(2, 3)
    return [[rng.randint(2, 19) for _ in range(columns)] for _ in range(rows)]


def _scores(rng: random.Random) -> dict[str, int]:
    return {name: rng.randint(1, 30) for name in rng.sample(_NAMES, rng.randint(2, 4))}


def _runs(rng: random.Random) -> str:
    return "".join(letter * rng.randint(1, 4) for letter in rng.sample("abcxyz", 3))


def _date(rng: random.Random) -> str:
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _query(rng: random.Random) -> str:
    return "&".join(f"{word}={rng.randint(1, 99)}" for word in rng.sample(NOUNS, 2))


def _intervals(rng: random.Random) -> list[tuple[int, int]]:
    starts = [rng.randint(0, 15) for _ in range(rng.randint(2, 4))]
    return [(start, start + rng.randint(1, 6)) for start in starts]


VALUES: dict[str, Values] = {
    "tiny": _int(1, 4),
    "small": _int(1, 12),
    "whole": _int(1, 60),
    "large": _int(10, 99_999),
    "ints": Values("list[int]", _ints(-12, 25)),
    "counts": Values("list[int]", _ints(0, 12)),
    "repeats": Values("list[int]", _ints(3, 7, 4)),
    "sorted": Values("list[int]", lambda rng: sorted(_ints(-9, 30)(rng))),
    "floats": Values("list[float]", lambda rng: [n / 2 for n in _ints(-8, 30)(rng)]),
    "price": Values("float", lambda rng: rng.randint(4, 200) / 4),
    "word": Values("str", lambda rng: rng.choice(NOUNS)),
    "letter": Values("str", lambda rng: rng.choice("aeilnorst")),
    "sentence": Values("str", _sentence),
    "words": Values("list[str]", lambda rng: rng.sample(NOUNS, rng.randint(2, 5))),
    "names": Values("list[str]", lambda rng: rng.choices(_NAMES, k=rng.randint(2, 5))),
    "bits": Values("str", lambda rng: "".join(rng.choices("01", k=rng.randint(4, 9)))),
    "runs": Values("str", _runs),
    "digits": Values("str", lambda rng: str(rng.randint(100, 9_999_999))),
    "matrix": Values("list[list[int]]", _matrix),
    "lists": Values("list[list[int]]", lambda rng: [_ints(11, 19, 1)(rng)[:3] for _ in range(3)]),
    "scores": Values("dict[str, int]", _scores),
    "pairs": Values("list[tuple[str, int]]", lambda rng: list(_scores(rng).items())),
    "intervals": Values("list[tuple[int, int]]", _intervals),
    "point": Values("tuple[int, int]", lambda rng: (rng.randint(-9, 9), rng.randint(-9, 9))),
    "moves": Values("str", lambda rng: "".join(rng.choices("NESW", k=rng.randint(3, 8)))),
    "clock": Values("str", lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"),
    "date": Values("str", _date),
    "snake": Values("str", lambda rng: "_".join(rng.sample(NOUNS, rng.randint(2, 3)))),
    "query": Values("str", _query),
    "flags": Values("list[bool]", lambda rng: rng.choices((True, False), k=rng.randint(3, 6))),
}  # fmt: skip
