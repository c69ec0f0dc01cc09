"""Calls and reasoning of a response are items of their own, with their records, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.responding import LOGPROBS, URL, bare, of, refusal, respond, stream, timeless
from support.serving import NAME, Server, say
from support.talking import (
    HERMES,
    MAYBE_THINKS,
    PARIS,
    THINKS,
    WEATHER,
    called,
    talking_server,
)

TOOLS = [
    {"type": "function", "strict": False, **WEATHER["function"]},
    {"type": "function", "name": "clock", "strict": False},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafted": {"num_drafts": 5},
    "often wrong, markers are text": {"num_drafts": 4, "wrong_every": 3, "marked": False},
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with talking_server(HERMES, **SETTINGS[request.param]) as running:
        yield running


@pytest.fixture(scope="module", params=list(SETTINGS))
def thinker(request: pytest.FixtureRequest) -> Iterator[Server]:
    with talking_server(MAYBE_THINKS, **SETTINGS[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def opened() -> Iterator[Server]:
    with talking_server(THINKS, num_drafts=3, wrong_every=4) as running:
        yield running


def ask(server: Server, given: object, **options: object) -> dict[str, Any]:
    """An answer whose stream agrees with it, and whose items have a record a token."""
    options = {"include": [LOGPROBS], "top_logprobs": 1, "return_token_ids": True, **options}
    whole = respond(server, given, **options)
    events = stream(server, given, **options)
    assert timeless(events[-1]["response"]) == timeless(whole)
    items = events[-1]["response"]["output"]
    assert [event["item"] for event in of(events, "output_item.done")] == items
    assert [event["output_index"] for event in of(events, "output_item.added")] == [
        *range(len(items))
    ]
    for index, item in enumerate(items):
        deltas = [
            event
            for event in events
            if event["type"].endswith(".delta") and event["output_index"] == index
        ]
        assert {event["item_id"] for event in deltas} <= {item["id"]}
        assert "".join(event["delta"] for event in deltas) == text_of(item)
        assert [e for event in deltas for e in event["logprobs"]] == bare(records_of(item))
    ids = [entry["token_id"] for item in items for entry in records_of(item)]
    assert ids == whole["token_ids"]
    assert len(ids) == whole["usage"]["output_tokens"]
    return whole


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    [part] = item["content"]
    return str(part["text"])


def records_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    return item["logprobs"] if "logprobs" in item else item["content"][0]["logprobs"]


def written(item: dict[str, Any]) -> str:
    """What the tokens of an item wrote, markers included."""
    return bytes(byte for entry in records_of(item) for byte in entry["bytes"]).decode()


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_a_call_is_an_item(server: Server) -> None:
    response = ask(server, say(f"I look.\n{called()}"), tools=TOOLS)
    said, call = response["output"]
    assert kinds(response) == ["message", "function_call"]
    assert text_of(said) == written(said) == "I look."
    assert (call["name"], call["arguments"]) == ("get_weather", PARIS)
    assert call["call_id"].startswith("call_")
    assert written(call).strip() == called()
    assert response["status"] == call["status"] == "completed"
    shown = [tool["name"] for tool in response["tools"]]
    assert (shown, response["tool_choice"]) == (["get_weather", "clock"], "auto")


def test_several_calls_have_each_its_records(server: Server) -> None:
    response = ask(server, say(called() + "\n" + called("clock", "{}")), tools=TOOLS)
    assert kinds(response) == ["function_call", "function_call"]
    first, second = response["output"]
    assert (second["name"], second["arguments"]) == ("clock", "{}")
    assert first["call_id"] != second["call_id"]
    assert written(first).strip() == called()
    assert written(second).strip() == called("clock", "{}")


def test_no_call_is_a_message(server: Server) -> None:
    response = ask(server, say("Sunny, < 3 <tool"), tools=TOOLS)
    assert [text_of(item) for item in response["output"]] == ["Sunny, < 3 <tool"]
    response = ask(server, say(called()))
    assert kinds(response) == ["message"]


def test_a_call_that_is_cut(server: Server) -> None:
    limit = len(server.ids('<tool_call>\n{"name": "get_weather", "arguments": {"ci'))
    response = ask(server, say(called()), tools=TOOLS, max_output_tokens=limit)
    [call] = response["output"]
    assert (response["status"], call["status"]) == ("incomplete", "incomplete")
    assert call["arguments"] == '{"ci'
    again = {"input": say("ok"), "previous_response_id": response["id"], "temperature": 0}
    assert server.post(URL, again).json()["output"][0]["content"][0]["text"] == "ok"


def test_a_stop_string_inside_a_call(server: Server) -> None:
    response = ask(server, say(f"I look.\n{called()}"), tools=TOOLS, stop=["aris"])
    assert [text_of(item) for item in response["output"]] == ["I look.", '{"city": "P']
    assert written(response["output"][1]).endswith("Paris")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_is_forced(server: Server, choice: Any) -> None:
    response = ask(server, "free", tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False)
    assert [item["name"] for item in response["output"]] == ["get_weather"]
    assert response["tool_choice"] == choice


def test_the_conversation_goes_on_with_results(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input=say(called()), temperature=0, tools=TOOLS)
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    question = {"role": "user", "content": say(called())}
    body = {"tools": TOOLS, "return_token_ids": True}
    ways = [
        respond(server, [question, call.model_dump(), result], **body),
        respond(server, [result], previous_response_id=first.id, **body),
    ]
    shown = {server.text.text_of(response["prompt_token_ids"]) for response in ways}
    assert len(shown) == 1
    assert f"<assistant>[get_weather {PARIS}]<user>18 degrees<assistant>" in shown.pop()


def test_reasoning_is_an_item(thinker: Server) -> None:
    response = ask(thinker, say("<think>\nHm, 🙂.\n</think>\n\nYes."))
    thought, said = response["output"]
    assert kinds(response) == ["reasoning", "message"]
    assert (text_of(thought), text_of(said), thought["summary"]) == ("Hm, 🙂.", "Yes.", [])
    assert written(said) == "Yes."
    tokens = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert tokens == len(records_of(thought))
    assert 0 < tokens < response["usage"]["output_tokens"]


def test_an_answer_without_reasoning(thinker: Server) -> None:
    response = ask(thinker, say("Yes."))
    assert kinds(response) == ["message"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    # Nothing between the markers is nothing to show; the markers' records are not lost.
    response = ask(thinker, say("<think>\n\n</think>\n\nYes."))
    assert [text_of(item) for item in response["output"]] == ["Yes."]


def test_reasoning_that_is_cut(opened: Server) -> None:
    response = ask(opened, say("Hm, well"), max_output_tokens=3)
    [thought] = response["output"]
    assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


def test_reasoning_text_and_calls_in_a_row(opened: Server) -> None:
    # What the prompt opens counts as said: two tokens.
    text = f"..Hm.\n</think>\n\nI look.\n{called()}"
    response = ask(opened, say(text), tools=TOOLS, stop=["Hm", "look.!"])
    assert kinds(response) == ["reasoning", "message", "function_call"]
    assert [text_of(item) for item in response["output"]] == ["Hm.", "I look.", PARIS]


def test_reasoning_goes_back_in(thinker: Server) -> None:
    first = respond(thinker, say("<think>Hm.</think>Yes."))
    second = respond(thinker, say("ok"), previous_response_id=first["id"], return_token_ids=True)
    shown = thinker.text.text_of(second["prompt_token_ids"])
    assert "<assistant>Yes.[Hm.]<user>" in shown


def test_the_effort(thinker: Server, server: Server) -> None:
    response = respond(thinker, say("x"), reasoning={"effort": "none"}, return_token_ids=True)
    assert thinker.text.text_of(response["prompt_token_ids"]).endswith("</think>\n\n")
    assert response["reasoning"] == {"effort": "none", "summary": None}
    assert refusal(server, {"reasoning": {"effort": "high"}})["param"] == "reasoning.effort"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "two words"}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, ""),
    ],
)
def test_what_is_wrong_with_tools_is_named(server: Server, body: Any, param: str) -> None:
    assert refusal(server, body)["param"] == (param or "input[0].arguments")


def test_a_schema_that_does_not_compile(server: Server) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "cat"}}
    error = refusal(server, {"tools": [tool]})
    assert error["param"] == "tools"
    assert "cat" in error["message"]
