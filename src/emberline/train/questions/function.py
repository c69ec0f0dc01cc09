"""A Python function to ask for, with its reference; and functions that are put together from parts.

How a function becomes a question is `code`; its arguments are drawn in
`values`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """One function."""

    names: tuple[str, ...]  # any of them will do
    params: tuple[tuple[str, str], ...]  # (name, kind of `values.VALUES`)
    returns: str  # annotation
    ask: str  # what it does: the words after "a function to"
    doc: str  # the docstring, in words of its parameters
    answer: Callable[..., Any]


def task(signature: str, ask: str, doc: str, answer: Callable[..., Any]) -> FunctionTask:
    """Read `name|other(param: kind, ...) -> annotation`. An empty doc repeats what is asked."""
    call, _, returns = signature.partition(" -> ")
    names, _, listed = call.removesuffix(")").partition("(")
    params = (param.partition(": ") for param in listed.split(", "))
    return FunctionTask(
        names=tuple(names.split("|")),
        params=tuple((name, kind) for name, _, kind in params),
        returns=returns,
        ask=ask,
        doc=doc or f"{ask[0].upper()}{ask[1:]}.",
        answer=answer,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a function that is put together."""

    name: str
    words: str
    run: Callable[..., Any]


def _picks_of_numbers(k: int) -> tuple[_Part, ...]:
    return (
        _Part("even", "the even numbers", lambda n: n % 2 == 0),
        _Part("odd", "the odd numbers", lambda n: n % 2 == 1),
        _Part("positive", "the positive numbers", lambda n: n > 0),
        _Part("negative", "the negative numbers", lambda n: n < 0),
        _Part(f"above_{k}", f"the numbers greater than {k}", lambda n: n > k),
        _Part(f"below_{k}", f"the numbers less than {k}", lambda n: n < k),
        _Part(f"multiples_of_{k}", f"the multiples of {k}", lambda n: n % k == 0),
        _Part(f"not_divisible_by_{k}", f"the numbers not divisible by {k}", lambda n: n % k != 0),
        _Part(f"ending_in_{k}", f"the numbers whose last digit is {k}", lambda n: abs(n) % 10 == k),
        _Part("two_digit", "the numbers with two digits", lambda n: 10 <= abs(n) < 100),
    )


def _changes(k: int) -> tuple[_Part, ...]:
    return (
        _Part("", "", lambda n: n),
        _Part("squares_of_", "the squares of ", lambda n: n * n),
        _Part("cubes_of_", "the cubes of ", lambda n: n**3),
        _Part("doubled_", "twice the value of ", lambda n: 2 * n),
        _Part("absolute_", "the absolute values of ", abs),
        _Part(f"plus_{k}_", f"what you get by adding {k} to ", lambda n: n + k),
    )


_OUTCOMES = (
    (_Part("sum_of_", "the sum of ", sum), "int", ""),
    (_Part("product_of_", "the product of ", math.prod), "int", " If there are none, it is 1."),
    (_Part("largest_of_", "the largest of ", lambda n: max(n, default=None)), "int | None",
     " If there are none, it is None."),
    (_Part("smallest_of_", "the smallest of ", lambda n: min(n, default=None)), "int | None",
     " If there are none, it is None."),
    (_Part("list_of_", "a list of ", list), "list[int]", " The order stays as it is."),
    (_Part("sorted_", "a sorted list of ", sorted), "list[int]", ""),
)  # fmt: skip


def number_function(rng: random.Random) -> FunctionTask:
    """A function that picks numbers of a list, changes them and puts them together."""
    k = rng.randint(2, 9)
    pick, change = rng.choice(_picks_of_numbers(k)), rng.choice(_changes(k))
    outcome, returns, note = rng.choice(_OUTCOMES)
    words = outcome.words + change.words + pick.words
    return FunctionTask(
        names=(outcome.name + change.name + pick.name,),
        params=((rng.choice(("numbers", "values", "nums", "items")), "ints"),),
        returns=returns,
        ask=f"take a list of integers and return {words}",
        doc=f"Return {words} in the list.{note}",
        answer=lambda numbers: outcome.run([change.run(n) for n in numbers if pick.run(n)]),
    )


def _picks_of_words(k: int, c: str) -> tuple[_Part, ...]:
    return (
        _Part(f"longer_than_{k}", f"the words longer than {k} letters", lambda w: len(w) > k),
        _Part(f"of_at_most_{k}", f"the words of at most {k} letters", lambda w: len(w) <= k),
        _Part(f"with_{c}", f"the words that contain the letter {c!r}", lambda w: c in w),
        _Part(f"without_{c}", f"the words without the letter {c!r}", lambda w: c not in w),
        _Part(f"ending_in_{c}", f"the words that end in {c!r}", lambda w: w[-1] == c),
        _Part("ending_in_vowel", "the words that end in a vowel", lambda w: w[-1] in "aeiou"),
        _Part("of_even_length", "the words of even length", lambda w: len(w) % 2 == 0),
    )


_WORD_OUTCOMES = (
    (_Part("count_words_", "the number of ", len), "int"),
    (_Part("words_", "a list of ", list), "list[str]"),
    (_Part("sorted_words_", "an alphabetical list of ", sorted), "list[str]"),
    (_Part("upper_words_", "upper-case copies of ", lambda w: [x.upper() for x in w]), "list[str]"),
    (_Part("mirrored_words_", "reversed copies of ", lambda w: [x[::-1] for x in w]), "list[str]"),
    (_Part("lengths_of_words_", "the lengths of ", lambda w: [len(x) for x in w]), "list[int]"),
    (_Part("join_words_", "a string that joins, with hyphens, ", "-".join), "str"),
    (_Part("initials_of_", "the first letters of ", lambda w: [x[0] for x in w]), "list[str]"),
)  # fmt: skip


def word_function(rng: random.Random) -> FunctionTask:
    """A function that picks words of a list and makes something of them."""
    pick = rng.choice(_picks_of_words(rng.randint(4, 6), rng.choice("aelnorst")))
    outcome, returns = rng.choice(_WORD_OUTCOMES)
    words = outcome.words + pick.words
    return FunctionTask(
        names=(outcome.name + pick.name,),
        params=((rng.choice(("words", "names", "items")), "words"),),
        returns=returns,
        ask=f"take a list of words and return {words}",
        doc=f"Return {words}.",
        answer=lambda items: outcome.run([word for word in items if pick.run(word)]),
    )
