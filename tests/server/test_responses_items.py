"""Items of a conversation become the messages that they once were."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from emberline.server.responses_items import Item, as_input, to_messages

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}


def rendered(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message.rendered() for message in to_messages(ITEMS.validate_python(items))]


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_one_answer_is_one_message() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    again = {**CALL, "call_id": "c2", "arguments": ""}
    items = [
        asked("1+1?"),
        thought,
        said("Let me add."),
        CALL,
        again,
        result,
        said("2"),
        asked("!"),
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}},
    ]
    assert rendered(items) == [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "!"},
    ]


def test_calls_alone_say_nothing() -> None:
    [message] = rendered([CALL])
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_two_answers_in_a_row_stay_two() -> None:
    assert [one["content"] for one in rendered([said("a"), said("b")])] == ["a", "b"]


def test_thoughts_without_an_answer() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert rendered([summary, asked("?")])[0] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "s",
    }


def test_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "input_text", "text": text} for text in "ab"]
    result = {"type": "function_call_output", "call_id": "c", "output": parts}
    contents = [one["content"] for one in rendered([{"role": "user", "content": parts}, result])]
    assert contents == ["a\nb", "a\nb"]


def test_output_comes_back_as_input() -> None:
    text = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [{"token": "x"}]}
    message = {"type": "message", "id": "msg_1", "content": [text]}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "content": [{"type": "reasoning_text", "text": "h"}],
    }
    call = {**CALL, "id": "fc_1"}
    items = [item for one in (thought, message, call) for item in as_input(one)]
    assert [item.id for item in items] == ["rs_1", "msg_1", "fc_1"]
    assert "token" not in str(items)
    assert len(to_messages(items)) == 1


def test_a_call_that_was_cut_is_left_out() -> None:
    assert as_input({**CALL, "id": "fc_1", "arguments": '{"a": '}) == []
