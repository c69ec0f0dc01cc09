"""Reasoning over HTTP: told from the content, counted, and out of reach of stops and grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import Server, say, saying_server
from support.talking import (
    HERMES,
    MAYBE_THINKS,
    PARIS,
    THINKS,
    WEATHER,
    called,
    calls_of,
    joined,
    talking_server,
)

CHAT = "/v1/chat/completions"
OPENED = "<think>\n"  # what the template of `thinks` puts before the answer
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafted": {"num_drafts": 7},
    "often wrong, markers are text": {"num_drafts": 7, "wrong_every": 3, "marked": False},
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def maybe(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The model decides whether it thinks."""
    with talking_server(MAYBE_THINKS, **SETTINGS[request.param]) as running:
        yield running


@pytest.fixture(scope="module", params=list(SETTINGS))
def thinks(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The prompt opens the reasoning."""
    with talking_server(THINKS, **SETTINGS[request.param]) as running:
        yield running


def ask(server: Server, text: str, **options: object) -> dict[str, Any]:
    """A chat in which the model wants to say `text`; the stream agrees."""
    options = {"logprobs": True, "return_token_ids": True, **options}
    answer = server.chat(say(text), **options)
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    body = {"messages": [{"role": "user", "content": say(text)}], "temperature": 0, **options}
    events = server.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    told = joined(events)
    assert told["message"].get("reasoning", "") == (message.get("reasoning") or "")
    assert told["message"].get("reasoning_content", "") == (message.get("reasoning") or "")
    assert told["message"]["content"] == (message["content"] or "")
    assert told["entries"] == choice["logprobs"]["content"]
    assert told["finish"] == choice["finish_reason"]
    details = usage["completion_tokens_details"]
    assert events[-1]["usage"]["completion_tokens_details"] == details
    parts = [entry.get("part") for entry in choice["logprobs"]["content"]]
    assert len(parts) == usage["completion_tokens"]
    assert details["reasoning_tokens"] == parts.count("reasoning") <= usage["completion_tokens"]
    return answer


def message_of(answer: dict[str, Any]) -> tuple[str | None, str | None]:
    message = answer["choices"][0]["message"]
    return message["reasoning"], message["content"]


def text_of(answer: dict[str, Any], part: str) -> str:
    entries = answer["choices"][0]["logprobs"]["content"]
    return bytes(b for entry in entries if entry["part"] == part for b in entry["bytes"]).decode()


def test_reasoning_is_told_from_the_content(maybe: Server) -> None:
    answer = ask(maybe, "<think>\nHm, 2 < 3.\n</think>\n\nSo it is.")
    assert message_of(answer) == ("Hm, 2 < 3.", "So it is.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    # The markers and the line breaks beside them are the reasoning's.
    assert text_of(answer, "reasoning") == "<think>\nHm, 2 < 3.\n</think>\n\n"
    assert text_of(answer, "content") == "So it is."


def test_an_answer_without_reasoning(maybe: Server) -> None:
    answer = ask(maybe, "A <think>b</think>")
    assert message_of(answer) == (None, "A <think>b</think>")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_the_prompt_may_open_it(thinks: Server) -> None:
    answer = ask(thinks, f"{OPENED}So.\n</think>\n\nYes")
    assert message_of(answer) == ("So.", "Yes")
    assert text_of(answer, "reasoning") == "So.\n</think>\n\n"


def test_or_close_it(maybe: Server) -> None:
    closed = "<think>\n\n</think>\n\n"
    for options in ({"chat_template_kwargs": {"enable_thinking": False}},
                    {"reasoning_effort": "none"}):  # fmt: skip
        answer = maybe.chat(say(f"{closed}<think>x"), logprobs=True, **options)
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "<think>x"
        assert "reasoning" not in choice["message"]
        assert "part" not in choice["logprobs"]["content"][0]


def test_an_end_while_reasoning(thinks: Server) -> None:
    """The model's end, and the limit's, at every place of a block."""
    thought = "one two three"
    whole = ask(thinks, f"{OPENED}{thought}")
    assert message_of(whole) == (thought, "")
    total = whole["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == total
    for limit in range(1, 9):
        answer = ask(thinks, f"{OPENED}{thought}", max_tokens=limit)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == limit
        assert thought.startswith(message_of(answer)[0] or "")


def test_stop_strings_count_in_the_content_only(thinks: Server, maybe: Server) -> None:
    thought = "Answer: maybe.\n\n"
    for server, opened in ((thinks, OPENED), (maybe, "<think>")):
        text = f"{opened}{thought}</think>\n\nSo. Answer: yes"
        answer = ask(server, text, stop=["Answer:", "\n\n"])
        assert message_of(answer) == ("Answer: maybe.", "So. ")
        assert answer["choices"][0]["stop_reason"] == "Answer:"
    plain = ask(maybe, "So. Answer: yes", stop="Answer:")
    assert message_of(plain) == (None, "So. ")


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}


@pytest.mark.parametrize("length", range(7))
def test_a_schema_binds_from_the_end_of_the_reasoning(
    thinks: Server, maybe: Server, length: int
) -> None:
    """At every place of a block: the text behind the marker is not what the model wanted."""
    thought = "{x" * length
    for server, opened in ((thinks, OPENED), (maybe, "<think>")):
        text = f"{opened}{thought}</think>\n```json"
        answer = ask(server, text, response_format=FORMAT, max_tokens=120)
        reasoning, content = message_of(answer)
        assert (reasoning or "") == thought
        assert (content or "").startswith("{")
        if answer["choices"][0]["finish_reason"] == "stop":
            assert list(json.loads(content or "")) == ["a"]
    obeyed = ask(maybe, '{"a": 3}', response_format=FORMAT)
    assert message_of(obeyed) == (None, '{"a": 3}')


def test_calls_behind_reasoning(thinks: Server) -> None:
    text = f"{OPENED}I call <tool_call>.</think>\n{called()}"
    answer = ask(thinks, text, tools=[WEATHER])
    assert message_of(answer) == ("I call <tool_call>.", None)
    assert calls_of(answer["choices"][0]) == [("get_weather", PARIS)]
    # Bound by a grammar, reasoning is text: the tokens of other markers do not occur in it.
    text = f"{OPENED}I call.</think>\n{called()}"
    forced = ask(thinks, text, tools=[WEATHER], tool_choice="required")
    assert message_of(forced) == ("I call.", None)
    assert calls_of(forced["choices"][0]) == [("get_weather", PARIS)]


def test_several_choices_and_usage_as_it_grows(thinks: Server) -> None:
    text = f"{OPENED}Hm.</think>Yes"
    answer = thinks.chat(say(text), n=2)
    one = thinks.chat(say(text))
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(thinks.ids("Hm.</think>")) * 2
    assert [c["message"] for c in answer["choices"]] == [one["choices"][0]["message"]] * 2
    body = {"messages": [{"role": "user", "content": say(text)}], "temperature": 0}
    options = {"continuous_usage_stats": True, "include_usage": True}
    for event in thinks.stream(CHAT, {**body, "stream_options": options}):
        usage = event["usage"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 0 <= reasoning <= usage["completion_tokens"]


def refused(server: Server, param: str, **options: object) -> str:
    body = {"messages": [{"role": "user", "content": "x"}], **options}
    answer = server.post(CHAT, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    return str(answer.json()["error"]["message"])


def test_an_effort_that_the_template_does_not_take(maybe: Server, thinks: Server) -> None:
    assert "none" in refused(maybe, "reasoning_effort", reasoning_effort="high")
    refused(maybe, "reasoning_effort", reasoning_effort="much")
    refused(
        maybe, "reasoning_effort", reasoning_effort="none",
        chat_template_kwargs={"enable_thinking": True},
    )  # fmt: skip
    assert "off" in refused(thinks, "reasoning_effort", reasoning_effort="none")


def test_reasoning_of_earlier_messages(maybe: Server) -> None:
    def asked(**said: object) -> list[dict[str, object]]:
        return [{"role": "assistant", "content": "a", **said}, {"role": "user", "content": "x"}]

    for said in ({"reasoning": "R"}, {"reasoning_content": "R", "reasoning": "R"}):
        body = {"messages": asked(**said), "max_tokens": 1, "return_token_ids": True}
        prompt = maybe.post(CHAT, body).json()["prompt_token_ids"]
        assert "a[R]" in maybe.text.text_of(prompt)
    wrong = "messages[0].reasoning_content"
    refused(maybe, wrong, messages=asked(reasoning="R", reasoning_content="S"))
    refused(maybe, "messages[0].reasoning", messages=asked(reasoning="R", role="user"))
    refused(maybe, "messages[0].reasoning", messages=asked(reasoning=7, reasoning_content="S"))


def test_an_effort_that_the_template_takes() -> None:
    template = HERMES.replace("<assistant>{%", "<assistant>{{ reasoning_effort or '' }}{%")
    with talking_server(template) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                "return_token_ids": True, "reasoning_effort": "low"}  # fmt: skip
        ids = server.post(CHAT, body).json()["prompt_token_ids"]
        assert server.text.text_of(ids).endswith("<assistant>low")


def test_parsers_are_the_servers_choice() -> None:
    with talking_server(THINKS, options={"reasoning_parser": "none"}) as server:
        answer = server.chat(say(f"{OPENED}a</think>b"))
        assert answer["choices"][0]["message"]["content"] == "a</think>b"
        assert server.get("/server_info").json()["reasoning_parser"] == "none"
    with saying_server(options={"reasoning_parser": "think"}) as server:
        answer = server.chat(say("<think>a</think>b"))
        assert answer["choices"][0]["message"]["reasoning"] == "a"
        assert server.get("/server_info").json()["reasoning_parser"] == "think"
