"""Calls and reasoning told apart from content: the same whatever pieces the text comes in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.server.parts import Part, Piece, Splitter
from emberline.server.reasoning import ReasoningSplitter, Thinking, thinking_at
from emberline.server.tool_parsing import BareCalls, MarkedCalls

Call = tuple[str, str]
Told = tuple[str, str, list[Call]]  # reasoning, content, calls


def bare() -> BareCalls:
    return BareCalls(["f", "get_weather"])


MAKERS: dict[str, Callable[[], Splitter]] = {
    "marked": MarkedCalls,
    "bare": bare,
    **{f"reasoning {t}": lambda t=t: ReasoningSplitter(t) for t in Thinking},  # type: ignore[misc]
}


def pieces_of(splitter: Splitter, text: Sequence[str]) -> list[Piece]:
    found = [piece for part in text for piece in splitter.feed(part)]
    return found + splitter.feed("", final=True)


def tell(pieces: Sequence[Piece]) -> Told:
    said = {Part.REASONING: "", Part.CONTENT: ""}
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.name is not None:
            assert piece.call == len(calls)
            calls.append([piece.name, ""])
        if piece.part is Part.TOOL_CALL:
            if piece.text:
                assert piece.call == len(calls) - 1
                calls[-1][1] += piece.text
        else:
            said[piece.part] += piece.text
    told = [(name, arguments) for name, arguments in calls]
    return said[Part.REASONING], said[Part.CONTENT], told


def parts_of(pieces: Sequence[Piece]) -> list[Part]:
    """The part of every character."""
    return [piece.part for piece in pieces for _ in range(piece.size)]


def told(make: Callable[[], Splitter], text: str) -> Told:
    """What is told of a text, having checked that no other way to cut it tells otherwise."""
    whole = pieces_of(make(), [text])
    for size in (1, 2, 3, 5, 8):
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        again = pieces_of(make(), cut)
        assert tell(again) == tell(whole), size
        assert parts_of(again) == parts_of(whole), size
    assert len(parts_of(whole)) == len(text)
    return tell(whole)


ARGUMENTS = '{"city": "P\\"aris}", "n": [1, {"a": "</tool_call>"}]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("plain text\n", "plain text\n", []),
        (CALL, "", [("get_weather", ARGUMENTS)]),
        (f"I look.\n\n{CALL}\n{CALL}\n\nDone", "I look.Done", [("get_weather", ARGUMENTS)] * 2),
        (f"{CALL}{CALL}", "", [("get_weather", ARGUMENTS)] * 2),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {"b": 1}, "name": "f"}</tool_call>', "", [("f", '{"b": 1}')]),
        ('<tool_call>{"name":"f","arguments":{"a":1},"id":7}</tool_call>', "", [("f", '{"a":1}')]),
        ('<tool_call>{"name":"f","arguments":3}</tool_call> x', " x", [("f", "3")]),
        ('<tool_call>{"name":"f","arguments":"a\\\\"}</tool_call>x', "x", [("f", '"a\\\\"')]),
        # What only looks like a call stays what it is.
        ("a <tool_call>no</tool_call> b", "a <tool_call>no</tool_call> b", []),
        ("a\n<tool_call>\n[1]\n</tool_call>\n", "a\n<tool_call>\n[1]\n</tool_call>\n", []),
        ("a <tool_cal", "a <tool_cal", []),
        ("a <tool <tool_call", "a <tool <tool_call", []),
        ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        # A call that the length limit cuts, or that lacks its end.
        ('<tool_call>{"name":"f","arguments":{"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name":"f","arguments":{"a": 1</tool_call>!', "!", [("f", '{"a": 1')]),
        ('<tool_call>{"name":"f","arguments":</tool_call>', "", [("f", "")]),
        ('<tool_call>{"name":"f","arguments":{}}\nso', "so", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":{}}</tool', "", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"f","arguments":{}}', "",
         [("f", "{}")] * 2),
    ],
)  # fmt: skip
def test_marked_calls(text: str, content: str, calls: list[Call]) -> None:
    assert told(MarkedCalls, text) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("Hello {", "Hello {", []),
        ('{"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (' {"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "arguments": {}}; {"name": "f", "parameters": {"a":1}}', "",
         [("f", "{}"), ("f", '{"a":1}')]),
        ('{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}', "", [("f", "{}")] * 2),
        ('{"name": "f", "parameters": {}}; so', "so", [("f", "{}")]),
        ('{"name": "f", "parameters": {}} <|python', "<|python", [("f", "{}")]),
        ('{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
        # JSON that is no call of a known function is the answer.
        ('{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', []),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "f"', '{"name": "f"', []),
    ],
)  # fmt: skip
def test_bare_calls(text: str, content: str, calls: list[Call]) -> None:
    assert told(bare, text) == ("", content, calls)


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (Thinking.INSIDE, "so.\n</think>\n\nAnswer\n", "so.", "Answer\n"),
        (Thinking.INSIDE, "\na < b </th", "a < b </th", ""),
        (Thinking.INSIDE, "a\n\nb</think></think>c", "a\n\nb", "</think>c"),
        (Thinking.INSIDE, "", "", ""),
        (Thinking.MAYBE, "<think>\nso\n</think>\nA", "so", "A"),
        (Thinking.MAYBE, "\n<think></think>A", "", "A"),
        (Thinking.MAYBE, "\nA <think>b</think>", "", "\nA <think>b</think>"),
        (Thinking.MAYBE, "<thin", "", "<thin"),
        (Thinking.MAYBE, "<think>on and on", "on and on", ""),
        (Thinking.NONE, "<think>a</think>", "", "<think>a</think>"),
    ],
)
def test_reasoning(thinking: Thinking, text: str, reasoning: str, content: str) -> None:
    assert told(lambda: ReasoningSplitter(thinking), text) == (reasoning, content, [])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "\n", " ", "<", "{",
    "}", '"', "\\", ",", ":", ";", "[", "]", '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": ', '"name"', '"f"', "{}", "a", "é",
    '{"arguments": {}, "name": "f"}', '"type": "function"',
]  # fmt: skip


@given(
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.sets(st.integers(0, 120)),
)
@settings(max_examples=400, deadline=None)
def test_any_text_cut_anywhere(kind: str, fragments: list[str], cuts: set[int]) -> None:
    text = "".join(fragments)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    cut = [text[a:b] for a, b in pairwise(bounds)]
    whole, again = pieces_of(MAKERS[kind](), [text]), pieces_of(MAKERS[kind](), cut)
    assert tell(again) == tell(whole)
    assert parts_of(again) == parts_of(whole)
    assert len(parts_of(whole)) == len(text)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
), st.booleans(), st.integers(1, 7))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_arguments_are_handed_on_to_the_letter(value: object, ascii: bool, size: int) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=ascii)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\nend'
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    assert tell(pieces_of(MarkedCalls(), cut)) == ("", "end", [("f", arguments)])


@pytest.mark.parametrize(
    ("end", "thinking"),
    [
        ("<|assistant|>\n<think>\n", Thinking.INSIDE),
        ("<think>\n\n</think>\n\n", Thinking.NONE),
        ("<|assistant|>", Thinking.MAYBE),
    ],
)
def test_what_a_prompt_has_opened(end: str, thinking: Thinking) -> None:
    assert thinking_at(end) is thinking
