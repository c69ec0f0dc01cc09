"""Tool calls over HTTP: shown to the model, told apart from content, forced where they must be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.serving import Server, say, saying_server
from support.talking import (
    CLOCK,
    HERMES,
    LLAMA,
    PARIS,
    WEATHER,
    arguments_of,
    called,
    calls_of,
    joined,
    talking_server,
)

CHAT = "/v1/chat/completions"
TOOLS = [WEATHER, CLOCK]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafted": {"num_drafts": 5},
    "often wrong, markers are text": {"num_drafts": 4, "wrong_every": 3, "marked": False},
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with talking_server(HERMES, **SETTINGS[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def llama() -> Iterator[Server]:
    with talking_server(LLAMA, num_drafts=3, wrong_every=4) as running:
        yield running


def ask(server: Server, text: str, **options: object) -> dict[str, Any]:
    """The only choice of a chat in which the model wants to say `text`; its stream agrees."""
    options = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, **options}
    answer = server.chat(say(text), **options)
    choice = answer["choices"][0]
    body = {"messages": [{"role": "user", "content": say(text)}], "temperature": 0, **options}
    told = joined(server.stream(CHAT, body))
    assert told["message"]["content"] == (choice["message"]["content"] or "")
    streamed = [(call["name"], call["arguments"]) for call in told["message"].get("tool_calls", [])]
    assert streamed == calls_of(choice)
    assert told["entries"] == choice["logprobs"]["content"]
    assert told["token_ids"] == choice["token_ids"]
    assert told["finish"] == choice["finish_reason"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    return choice


def text_of(choice: dict[str, Any], part: str) -> str:
    entries = [entry for entry in choice["logprobs"]["content"] if entry["part"] == part]
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


def test_a_call_is_told_from_the_content(server: Server) -> None:
    choice = ask(server, f"I look.\n{called()}")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert calls_of(choice) == [("get_weather", PARIS)]
    [call] = choice["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert call["type"] == "function"
    # Every token says where it belongs, byte by byte.
    assert text_of(choice, "content") == "I look."
    assert text_of(choice, "tool_call") == f"\n{called()}"


def test_several_calls_and_nothing_else(server: Server) -> None:
    choice = ask(server, called() + "\n" + called("clock", "{}"))
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("get_weather", PARIS), ("clock", "{}")]


def test_no_call_is_an_ordinary_answer(server: Server) -> None:
    choice = ask(server, "Sunny, < 3 <tool")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "Sunny, < 3 <tool"
    assert "tool_calls" not in choice["message"]
    assert {entry["part"] for entry in choice["logprobs"]["content"]} == {"content"}


def test_what_only_looks_like_a_call_is_content(server: Server) -> None:
    text = "<tool_call>\nnothing\n</tool_call>"
    choice = ask(server, text)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_call_that_the_limit_cuts(server: Server) -> None:
    text = called()
    num_tokens = len(server.ids(text[: text.index("Par") + 3]))
    choice = ask(server, text, max_tokens=num_tokens)
    assert choice["finish_reason"] == "length"
    assert calls_of(choice) == [("get_weather", '{"city": "Par')]


def test_a_stop_string_cuts_text_and_not_records(server: Server) -> None:
    choice = ask(server, f"One. Two.\n{called()}", stop=["Two"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("One. ", "stop")
    assert text_of(choice, "content") == "One. Two"


def test_parts_only_where_they_mean_something(server: Server) -> None:
    choice = server.chat(say(called()), logprobs=True)["choices"][0]
    assert choice["message"]["content"] == called()
    assert "part" not in choice["logprobs"]["content"][0]


def test_tool_choice_none_shows_no_tools(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": say(called())}], "temperature": 0}
    plain = server.post(CHAT, body).json()
    answer = server.post(CHAT, {**body, "tools": TOOLS, "tool_choice": "none"}).json()
    assert answer["choices"][0]["message"]["content"] == called()
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    shown = server.post(CHAT, {**body, "tools": TOOLS}).json()
    assert shown["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 100


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_whatever_the_model_wants(server: Server, temperature: int) -> None:
    choice = ask(
        server, "I would rather talk.", tool_choice="required", temperature=temperature, seed=3,
        max_tokens=300, parallel_tool_calls=False,
    )  # fmt: skip
    assert choice["message"]["content"] is None
    [(name, _)] = calls_of(choice)
    if choice["finish_reason"] == "tool_calls":
        [arguments] = arguments_of(choice)
        assert list(arguments) == (["city"] if name == "get_weather" else [])
    else:
        assert choice["finish_reason"] == "length"


def test_required_leaves_a_valid_call_alone(server: Server) -> None:
    choice = ask(server, f"{called()}\n{called('clock', '{}')}", tool_choice="required")
    assert calls_of(choice) == [("get_weather", PARIS), ("clock", "{}")]
    one = ask(server, called() + called(), tool_choice="required", parallel_tool_calls=False)
    assert calls_of(one) == [("get_weather", PARIS)]


def test_a_named_function_is_called_once(server: Server) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    choice = ask(server, called(), tool_choice=named)
    assert [name for name, _ in calls_of(choice)] == ["clock"]
    assert arguments_of(choice) == [{}]
    assert choice["finish_reason"] == "tool_calls"


def test_strict_calls_are_valid_ones(server: Server) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    wrong = called("get_weather", '{"town": "Paris"}')
    assert arguments_of(ask(server, wrong)) == [{"town": "Paris"}]
    choice = ask(server, f"So: {wrong}", tools=[strict, CLOCK], max_tokens=200)
    assert choice["message"]["content"] == "So: "
    if choice["finish_reason"] == "tool_calls":
        assert list(arguments_of(choice)[0]) == ["city"]
    # What is no call stays free.
    assert ask(server, "Sunny.", tools=[strict])["message"]["content"] == "Sunny."


def test_one_call_at_a_time(server: Server) -> None:
    choice = ask(server, called() + called("clock", "{}"), parallel_tool_calls=False, max_tokens=80)
    assert calls_of(choice) == [("get_weather", PARIS)]


def test_a_schema_of_the_content_beside_tools(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert calls_of(ask(server, called(), response_format=wanted)) == [("get_weather", PARIS)]
    choice = ask(server, '{"a": 7}', response_format=wanted)
    assert choice["message"]["content"] == '{"a": 7}'


def test_a_conversation_with_calls_goes_on(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": ""}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        {"role": "assistant", "content": "hm", "reasoning_content": "R", "tool_calls": []},
        {"role": "user", "content": say("At noon.")},
    ]
    answer = server.post(CHAT, {"messages": messages, "temperature": 0, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "At noon."
    prompt = server.text.text_of(answer.json()["prompt_token_ids"])
    assert "<assistant>[clock {}]<user>noon<assistant>hm[R]" in prompt


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": say(called())}]
        tools: Any = TOOLS
        answer = client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, temperature=0
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "Paris"}  # type: ignore[union-attr]
        messages.append(answer.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sun"})
        messages.append({"role": "user", "content": say("Sunny.")})
        again = client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, temperature=0
        )
        assert again.choices[0].message.content == "Sunny."


def test_bare_calls(llama: Server) -> None:
    call = f'{{"name": "get_weather", "parameters": {PARIS}}}'
    choice = ask(llama, call)
    assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", PARIS)], "tool_calls")
    assert text_of(choice, "tool_call") == call
    two = ask(llama, f"{call}; {call}")
    assert calls_of(two) == [("get_weather", PARIS)] * 2
    json_answer = ask(llama, '{"name": "Paris"}')
    assert json_answer["message"]["content"] == '{"name": "Paris"}'
    forced = ask(llama, call, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert arguments_of(forced) == [{}]
    once = ask(llama, f"{call}; {call}", parallel_tool_calls=False)
    assert calls_of(once) == [("get_weather", PARIS)]
    assert ask(llama, "Sunny.", parallel_tool_calls=False)["message"]["content"] == "Sunny."


def refused(server: Server, param: str, **options: object) -> str:
    body = {"messages": [{"role": "user", "content": "x"}], **options}
    answer = server.post(CHAT, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    return str(answer.json()["error"]["message"])


def test_what_makes_no_sense_is_refused_by_name(server: Server) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}
    named = {"type": "function", "function": {"name": "other"}}
    call: dict[str, Any] = {"function": {"name": "f", "arguments": "[1]"}}
    with_calls = {"role": "assistant", "tool_calls": [call]}
    refused(server, "tool_choice", tool_choice="auto")
    refused(server, "tool_choice", tools=TOOLS, tool_choice=named)
    refused(server, "tool_choice", tools=TOOLS, tool_choice="maybe")
    refused(server, "tools[1].function.name", tools=[CLOCK, CLOCK])
    refused(
        server, "tools[0].function.name", tools=[{"type": "function", "function": {"name": ""}}]
    )
    refused(server, "tools[0].type", tools=[{"type": "retrieval", "function": {"name": "x"}}])
    refused(server, "tools[0].function", tools=[{"type": "function"}])
    refused(server, "tools", tools=[CLOCK] * 129)
    assert "compile" in refused(server, "tools", tools=[bad], tool_choice="required")
    refused(server, "tools", tools=TOOLS, structured_outputs={"grammar": 'start: "a"'})
    refused(server, "min_tokens", tools=TOOLS, tool_choice="required", min_tokens=3)
    path = "messages[0].tool_calls[0].function.arguments"
    refused(server, path, messages=[with_calls])
    call["function"] = {"name": "f", "arguments": "{}"}
    refused(server, "messages[0].tool_calls", messages=[{**with_calls, "role": "user"}])
    refused(server, "messages[0].content", messages=[{"role": "assistant", "tool_calls": []}])
    server.alive()


def test_templates_and_parsers_that_know_no_tools() -> None:
    with saying_server() as server:
        message = refused(server, "tools", tools=TOOLS)
        assert "template does not show tools" in message
        assert "--tool-parser" not in message
        assert server.get("/server_info").json()["tool_parser"] == "none"
    with saying_server(options={"tool_parser": "hermes"}) as server:
        assert "template" in refused(server, "tools", tools=TOOLS)
    with talking_server(HERMES, options={"tool_parser": "none"}) as server:
        assert "--tool-parser" in refused(server, "tools", tools=TOOLS)
    with talking_server(HERMES, options={"tool_parser": "llama_json"}) as server:
        assert ask(server, called())["message"]["content"] == called()
