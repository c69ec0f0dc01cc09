"""Questions about code: functions to complete, and functions to write from a sentence.

Examples and assertions hold: they are computed by the reference that comes with each function.
"""

from __future__ import annotations

import random
import re

from emberline.train.questions.fill import fill
from emberline.train.questions.function import FunctionTask, number_function, word_function
from emberline.train.questions.numbers import NUMBER_TASKS
from emberline.train.questions.tasks import OTHER_TASKS, PYTHON_TASKS
from emberline.train.questions.texts import TEXT_TASKS
from emberline.train.questions.values import VALUES

FUNCTION_TASKS = NUMBER_TASKS + TEXT_TASKS
_COMPLETE = (
    "Complete this function:", "Complete the following Python function.", "Finish this function.",
    "Please complete the code:", "Can you fill in the body of this function?",
    "Write the body of this function.", "Here is a stub. Implement it so that the examples hold.",
    "Implement the function below.", "Complete the code and reply with the whole function.",
)  # fmt: skip
_WRITE = (
    "Write a function to {}", "Write a Python function to {}", "Write a python function to {}",
    "Implement a function to {}", "Please write a Python function to {}", "I need a function to {}",
    "Can you write a function to {}", "Write a short Python function to {}",
    "Using Python, write a function to {}",
)  # fmt: skip
_WRITE_OTHER = ("Write {}", "Please write {}", "Can you write {}", "I need {}", "Show me {}")
_TESTS = (
    "Your code should pass {}:\n\n{}", "It must satisfy {}:\n{}", "For example:\n{1}",
    "Tests:\n{1}", "{1}", "Make sure that it passes {}:\n```python\n{}\n```",
)  # fmt: skip


def completion_question(rng: random.Random) -> str:
    """A stub with docstring and examples, bare or in a request."""
    stub = _stub(_draw_task(rng), rng)
    if rng.random() < 0.5:
        return stub
    return f"{rng.choice(_COMPLETE)}\n\n```python\n{stub.rstrip()}\n```"


def task_question(rng: random.Random) -> str:
    """A function to write from a sentence, half of the time with assertions."""
    if rng.random() < 0.2:
        return _ended(rng.choice(_WRITE_OTHER).format(fill(rng.choice(OTHER_TASKS), rng)), rng)
    if rng.random() < 0.5:
        return _ended(rng.choice(_WRITE).format(fill(rng.choice(PYTHON_TASKS), rng)), rng)
    task = _draw_task(rng)
    name = rng.choice(task.names)
    sentence = rng.choice(_WRITE).format(task.ask)
    if rng.random() < 0.3:
        return f"{sentence}{rng.choice(('. Call it', ', and call it', '. Name it'))} `{name}`."
    cases = examples(task, name, rng.randint(1, 3), rng)
    lines = "\n".join(
        f"assert {call} {'is' if result == 'None' else '=='} {result}" for call, result in cases
    )
    these = "this test" if len(cases) == 1 else "these tests"
    return f"{_ended(sentence, rng)}\n{rng.choice(_TESTS).format(these, lines)}"


def examples(
    task: FunctionTask, name: str, count: int, rng: random.Random
) -> list[tuple[str, str]]:
    """Draw up to `count` different calls and what they give, both as source text."""
    drawn: dict[str, str] = {}
    for _ in range(count):
        arguments = [VALUES[kind].draw(rng) for _, kind in task.params]
        call = f"{name}({', '.join(map(repr, arguments))})"
        drawn[call] = repr(task.answer(*arguments))
    return list(drawn.items())


def _draw_task(rng: random.Random) -> FunctionTask:
    kind = rng.random()
    if kind < 0.15:
        return number_function(rng)
    return word_function(rng) if kind < 0.25 else rng.choice(FUNCTION_TASKS)


def _stub(task: FunctionTask, rng: random.Random) -> str:
    name = rng.choice(task.names)
    params = ", ".join(f"{param}: {VALUES[kind].annotation}" for param, kind in task.params)
    head = f"def {name}({params}) -> {task.returns}:"
    style = rng.random()
    if style < 0.4:
        head = _with_typing(head)
    elif style < 0.5:
        head = f"def {name}({', '.join(param for param, _ in task.params)}):"
    quote = rng.choice(('"""', '"""', '"""', "'''"))
    doc = _wrapped(task.doc) + _shown(examples(task, name, rng.randint(1, 3), rng), rng)
    opening = f"    {quote}{rng.choice(('', ' ', chr(10) + '    '))}"
    return f"{head}\n{opening}{doc}\n    {quote}\n"


def _with_typing(head: str) -> str:
    """Write annotations with the names of `typing`, and import those."""
    head = re.sub(r"(\w+(?:\[.*?\])?) \| None", r"Optional[\1]", head)
    found = set(re.findall(r"\b(list|dict|tuple|set)\[", head))
    head = re.sub(r"\b(list|dict|tuple|set)\[", lambda m: f"{m[1].title()}[", head)
    names = sorted({word.title() for word in found} | {"Optional"} & set(re.findall(r"\w+", head)))
    return f"from typing import {', '.join(names)}\n\n\n{head}" if names else head


def _wrapped(doc: str) -> str:
    lines, line = [], ""
    for word in doc.split(" "):
        if len(line) + len(word) > 80:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n    ".join([*lines, line])


def _shown(cases: list[tuple[str, str]], rng: random.Random) -> str:
    """The examples as they stand in docstrings, after an empty line or none."""
    style = rng.random()
    if style < 0.6:
        lines = [line for call, result in cases for line in (f">>> {call}", result)]
        # The prompt shows nothing for None.
        lines = [line for line in lines if line != "None"]
    elif style < 0.8:
        lines = [f"{call} -> {result}" for call, result in cases]
    else:
        lines = [f"{call} == {result}" for call, result in cases]
    title = rng.choice(("", "", "Examples:\n    ", "For example:\n    "))
    gap = rng.choice(("\n    ", "\n\n    "))
    return gap + title + "\n    ".join(lines)


def _ended(sentence: str, rng: random.Random) -> str:
    asks = sentence.startswith("Can you")
    return sentence + ("?" if asks else rng.choice((".", ".", "")))
