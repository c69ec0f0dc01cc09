"""Templates with slots, and how a slot is filled. Knows nothing of what the templates say.

    <fruit>          a word of that table; the same word wherever <fruit> stands in the text
    <fruit2>         another word of the table than <fruit>
    <3..20>          a whole number; <100..900/50> one in steps of 50
    <this|that>      one of these
    <n:3..20>        a number or a choice with a name: <n> stands for it from there on
    <!n:3..20>       the same, but nothing is written here
    <=n*m+2>         the value of a sum of products of numbers and names
    <he>, <his>, <him>    after <name>: that person's pronoun; <he2> goes with <name2>

Slots may stand inside slots and in the words of a table. A capital (<Fruit>) is kept, and
"a" before a slot becomes "an" where the filling wants it.
"""

from __future__ import annotations

import math
import random
import re

from emberline.train.questions.words import GIRLS, WORDS

SLOT = re.compile(r"(\b[Aa] )?<([^<>\s][^<>]*)>")
_NAMED = re.compile(r"([A-Za-z]\w*):(?=\S)(.*)", re.DOTALL)
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:/(\d+))?")
_WANTS_AN = re.compile(r"(?!uni|use|usual|eu|one\b|once\b)[aeiou]|hour|8|11\b|18\b", re.I)
_PRONOUNS = (("he", "she"), ("his", "her"), ("him", "her"))


def paragraphs(text: str) -> tuple[str, ...]:
    """Templates that stand apart by an empty line; a line end is a space, and ¶ ends a line."""
    found = (" ".join(part.split("\n")) for part in text.strip().split("\n\n"))
    return tuple(re.sub(r" ?¶ ?", "\n", part) for part in found)


def fill(template: str, rng: random.Random) -> str:
    """Fill every slot. Raises ValueError where a slot names no table and no earlier slot."""
    known: dict[str, str] = {}
    while slot := SLOT.search(template):
        value = _value(slot[2], known, rng)
        article = slot[1] or ""
        if article and _WANTS_AN.match(value):
            article = f"{article[0]}n "
        template = f"{template[: slot.start()]}{article}{value}{template[slot.end() :]}"
    return template


def variety(template: str) -> int:
    """Estimate how many texts a template makes: the product of its slots' choices."""
    total, seen = 1, set()
    while slot := SLOT.search(template):
        named = _NAMED.fullmatch(slot[2].removeprefix("!"))
        rule = named[2] if named else slot[2]
        if bounds := _RANGE.fullmatch(rule):
            total *= len(range(int(bounds[1]), int(bounds[2]) + 1, int(bounds[3] or 1)))
        elif rule.lower() not in seen:
            total *= len(WORDS.get(rule.rstrip("0123456789").lower(), rule.split("|")))
            seen.add("" if "|" in rule else rule.lower())
        template = f"{template[: slot.start()]}{template[slot.end() :]}"
    return total


def _value(spec: str, known: dict[str, str], rng: random.Random) -> str:
    if spec.startswith("="):
        return str(_sum_of_products(spec[1:], known))
    if named := _NAMED.fullmatch(spec.removeprefix("!")):
        known[named[1]] = _drawn(named[2], rng)
        return "" if spec[0] == "!" else known[named[1]]
    if "|" in spec or _RANGE.fullmatch(spec):
        return _drawn(spec, rng)
    key = spec if spec in known else spec[0].lower() + spec[1:]
    if key not in known:
        _draw_word(key, known, rng)
    return known[key] if spec == key else known[key][0].upper() + known[key][1:]


def _drawn(rule: str, rng: random.Random) -> str:
    if bounds := _RANGE.fullmatch(rule):
        low, high, step = int(bounds[1]), int(bounds[2]), int(bounds[3] or 1)
        return str(rng.randrange(low, high + 1, step))
    return rng.choice(rule.split("|"))


def _draw_word(key: str, known: dict[str, str], rng: random.Random) -> None:
    table = key.rstrip("0123456789")
    suffix = key.removeprefix(table)
    if table not in WORDS:
        raise ValueError(f"<{key}> is no table of words and was not named before")
    taken = {word for other, word in known.items() if other.rstrip("0123456789") == table}
    known[key] = rng.choice([word for word in WORDS[table] if word not in taken])
    if table == "name":
        girl = known[key] in GIRLS
        known.update({pair[0] + suffix: pair[girl] for pair in _PRONOUNS})


def _sum_of_products(text: str, known: dict[str, str]) -> int:
    terms = text.replace("-", "+-1*").removeprefix("+").split("+")
    return sum(math.prod(int(known.get(part, part)) for part in term.split("*")) for term in terms)
