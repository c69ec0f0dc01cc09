"""Generated questions: repeatable, filled, varied, and right where they show results."""

from __future__ import annotations

import ast
import random
import re

import pytest

from emberline.train.questions import (
    QUESTION_KINDS,
    make_follow_up,
    make_question,
    question_of_kind,
)
from emberline.train.questions.chat import CHAT_QUESTIONS
from emberline.train.questions.code import FUNCTION_TASKS, completion_question, examples
from emberline.train.questions.fill import fill, paragraphs, variety
from emberline.train.questions.function import number_function, word_function
from emberline.train.questions.maths import MATHS_PROBLEMS
from emberline.train.questions.passages import (
    ABOUT_PASSAGES,
    ABOUT_TABLES,
    DATA_TABLES,
    ON_SENTENCES,
    PASSAGES,
)
from emberline.train.questions.sums import WORD_PROBLEMS
from emberline.train.questions.values import VALUES
from emberline.train.questions.words import WORDS
from emberline.train.questions.writing import FOLLOW_UPS, WRITING_REQUESTS

TEMPLATES = (
    *WORD_PROBLEMS, *MATHS_PROBLEMS, *CHAT_QUESTIONS, *WRITING_REQUESTS, *ON_SENTENCES, *PASSAGES,
    *ABOUT_PASSAGES, *DATA_TABLES, *ABOUT_TABLES, *FOLLOW_UPS,
)  # fmt: skip
# What a reader works out by hand from the sentence that asks for the function.
BY_HAND = {
    "second_largest": (([5, 5, 2, 9],), 5),
    "moving_average": (([1, 2, 6], 2), [1.5, 4.0]),
    "rotate_left": (([1, 2, 3], 4), [2, 3, 1]),
    "local_peaks": (([1, 3, 2, 2, 5],), [1]),
    "longest_increasing_run": (([3, 1, 2, 4, 4],), 3),
    "count_inversions": (([3, 1, 2],), 2),
    "equilibrium_index": (([1, 2, 3],), -1),
    "stock_profit": (([7, 2, 5, 1],), 3),
    "trapped_water": (([2, 0, 1, 3],), 3),
    "stretch": (("abc",), "a-bb-ccc"),
    "outer_inner": (([1, 5, 2],), [3, 5]),
    "run_length_encode": (("aaab",), "a3b1"),
    "first_unique": (("level",), "v"),
    "digital_root": ((987,), 6),
    "alternating_digit_sum": ((253,), 0),
    "collatz_steps": ((6,), 8),
    "staircase_ways": ((4,), 7),
    "trailing_zeros_of_factorial": ((25,), 6),
    "quadrant": (((-2, -3),), 3),
    "rotate_clockwise": (([[1, 2], [3, 4]],), [[3, 1], [4, 2]]),
    "border_sum": (([[1, 1, 1], [1, 9, 1], [1, 1, 1]],), 8),
    "merge_intervals": (([(5, 7), (1, 3), (3, 4)],), [(1, 4), (5, 7)]),
    "add_minutes": (("23:50", 15), "00:05"),
    "to_twelve_hours": (("00:30",), "12:30 AM"),
    "leap_years": ((3, 12), 3),
    "compound": ((50, 10, 2), 60.5),
}


def test_the_same_seed_asks_the_same_questions() -> None:
    def asked(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [make_question(rng) for _ in range(50)] + [make_follow_up(rng) for _ in range(9)]

    assert asked(3) == asked(3)
    assert asked(3) != asked(4)


def test_every_slot_of_every_template_is_filled() -> None:
    rng = random.Random(9)
    for text in (fill(template, rng) for template in TEMPLATES * 5):
        assert not re.search(r"[<>¶]", re.sub(" [<>] ", "", text)), text
        assert "  " not in text, text


def test_a_choice_never_lists_the_name_of_a_table() -> None:
    """<science|tech> would write the word "tech", not a technology."""
    unlikely = {"science", "tech", "past", "idea", "hobby", "creature", "firm", "dish", "thing"}
    for template in TEMPLATES:
        for choice in re.findall(r"<([^<>]*\|[^<>]*)>", template):
            assert not unlikely & set(choice.split("|")), template


@pytest.mark.parametrize(
    ("kind", "distinct"),
    [("sums", 0.99), ("maths", 0.85), ("completion", 0.99), ("task", 0.75), ("chat", 0.9)],
)
def test_questions_seldom_repeat(kind: str, distinct: float) -> None:
    rng = random.Random(0)
    asked = [question_of_kind(kind, rng) for _ in range(2000)]
    assert len(set(asked)) > distinct * len(asked)


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_questions_have_the_length_of_questions(kind: str) -> None:
    rng = random.Random(1)
    for _ in range(500):
        assert 3 <= len(question_of_kind(kind, rng).split()) <= 200


def test_every_kind_is_asked() -> None:
    rng = random.Random(2)
    asked = [make_question(rng) for _ in range(300)]
    assert any("def " in text for text in asked)
    assert any("assert " in text for text in asked)
    assert any("$" in text and "\\" in text for text in asked)


@pytest.mark.parametrize("task", FUNCTION_TASKS, ids=lambda task: task.names[0])
def test_references_answer_what_is_asked(task: object) -> None:
    name = task.names[0]  # type: ignore[attr-defined]
    if name in BY_HAND:
        arguments, expected = BY_HAND[name]
        assert task.answer(*arguments) == expected  # type: ignore[attr-defined]
    for call, result in examples(task, name, 3, random.Random(name)):  # type: ignore[arg-type]
        drawn = [ast.literal_eval(argument) for argument in ast.parse(call, mode="eval").body.args]  # type: ignore[attr-defined]
        assert repr(task.answer(*drawn)) == result  # type: ignore[attr-defined]


def test_the_table_of_known_answers_names_functions_that_exist() -> None:
    assert set(BY_HAND) <= {task.names[0] for task in FUNCTION_TASKS}


def test_functions_put_together_do_what_they_say() -> None:
    rng = random.Random(5)
    numbers = [4, -3, 7, 10, 6]
    words = ["maple", "sea", "lantern"]
    seen = {}
    for _ in range(600):
        task = number_function(rng)
        seen[task.names[0]] = task.answer(numbers)
        task = word_function(rng)
        seen[task.names[0]] = task.answer(words)
    assert seen["sum_of_even"] == 20
    assert seen["sorted_squares_of_odd"] == [9, 49]
    assert seen["largest_of_negative"] == -3
    assert seen["count_words_longer_than_4"] == 2
    assert seen["words_without_a"] == []


def test_stubs_are_python_and_their_examples_hold() -> None:
    references = {name: task.answer for task in FUNCTION_TASKS for name in task.names}
    rng = random.Random(6)
    checked = 0
    for _ in range(300):
        text = completion_question(rng)
        if fenced := re.search(r"```python\n(.*)\n```", text, re.DOTALL):
            text = fenced[1]
        function = ast.parse(text).body[-1]
        assert isinstance(function, ast.FunctionDef)
        doc = ast.get_docstring(function)
        assert doc
        for call, shown in re.findall(r">>> (.*)\n(?!>>>)(.+)", doc):
            if function.name in references:
                answer = eval(call, {function.name: references[function.name]})
                assert answer == ast.literal_eval(shown)
                checked += 1
    assert checked > 50


def test_values_are_what_their_annotation_says() -> None:
    rng = random.Random(7)
    for values in VALUES.values():
        drawn = values.draw(rng)
        assert type(drawn).__name__ == values.annotation.partition("[")[0]


def test_a_template_keeps_what_it_drew() -> None:
    rng = random.Random(8)
    for _ in range(20):
        text = fill("<name>|<name>|<name2>|<n:2..9>|<=n*n-1>|<Noun>|<!k:5..5>|<k>|<he>", rng)
        first, again, other, n, less, noun, nothing, five, he = text.split("|")
        assert first == again != other
        assert int(less) == int(n) ** 2 - 1
        assert noun[0].isupper()
        assert (nothing, five) == ("", "5")
        assert he in ("he", "she")


def test_a_becomes_an_before_a_vowel() -> None:
    assert fill("a <owl|owl> and A <map|map>", random.Random(0)) == "an owl and A map"
    assert fill("a <unicorn|unicorn>", random.Random(0)) == "a unicorn"


def test_an_unknown_slot_is_named() -> None:
    with pytest.raises(ValueError, match="<nothing> is no table"):
        fill("<nothing>", random.Random(0))


def test_paragraphs_join_lines_and_break_where_marked() -> None:
    assert paragraphs("one\ntwo ¶¶ three\n\nfour") == ("one two\n\nthree", "four")


def test_variety_counts_choices_once() -> None:
    assert variety("<name> and <name>") == len(WORDS["name"])
    assert variety("<1..4> <2..8/2> <a|b|c> <=3*4>") == 48
