"""Responses: OpenAI's shapes through the official client, records, what is kept, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from support.responding import LOGPROBS, URL, refusal, respond
from support.serving import NAME, Server, say, saying_server


def part_of(response: dict[str, Any]) -> dict[str, Any]:
    [item] = response["output"]
    [part] = item["content"]
    return part


def prompt_text(server: Server, response: dict[str, Any]) -> str:
    return server.text.text_of(response["prompt_token_ids"])


def test_the_official_client_reads_an_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=NAME, input=say("hello"), temperature=0)
    Response.model_validate(answer.model_dump())
    assert (answer.object, answer.model, answer.status) == ("response", NAME, "completed")
    assert answer.output_text == "hello"
    assert answer.id.startswith("resp_")
    assert (answer.error, answer.incomplete_details) == (None, None)
    assert answer.completed_at >= answer.created_at
    usage = answer.usage
    assert usage.output_tokens == len("hello") + 1  # and EOS
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("text", ["Sunny day", "a🙂b👍🏽c", "你好", ""])
def test_records_are_those_of_chat(server: Server, text: str) -> None:
    chat = server.chat(say(text), logprobs=True, top_logprobs=3)
    response = respond(server, say(text), include=[LOGPROBS], top_logprobs=3)
    part = part_of(response)
    assert part["text"] == text
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    assert len(part["logprobs"]) == response["usage"]["output_tokens"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["emberline"]["speculation"] == chat["emberline"]["speculation"]


def test_the_client_reads_records(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=NAME, input=say("hi"), temperature=0, include=[LOGPROBS], top_logprobs=2
    )
    [h, i, eos] = answer.output[0].content[0].logprobs
    assert (h.token, i.token, eos.token) == ("h", "i", "<eos>")
    assert (bytes(h.bytes), eos.bytes) == (b"h", [])
    assert (h.top_logprobs[0].token, h.top_logprobs[0].logprob) == ("h", h.logprob)
    assert len(h.top_logprobs) == 2


def test_no_records_unless_included(server: Server) -> None:
    assert part_of(respond(server, say("hi")))["logprobs"] == []
    entries = part_of(respond(server, say("hi"), include=[LOGPROBS]))["logprobs"]
    assert [entry["top_logprobs"] for entry in entries] == [[], [], []]


def test_a_stop_string_cuts_the_text_and_not_the_records(server: Server) -> None:
    response = respond(server, say("one, two"), stop=[", t"], include=[LOGPROBS])
    part = part_of(response)
    assert (part["text"], response["status"]) == ("one", "completed")
    assert [entry["token"] for entry in part["logprobs"]] == [*"one", ",", " ", "t"]
    assert response["emberline"]["stop_reason"] == ", t"


def test_the_limit_makes_it_incomplete(server: Server) -> None:
    response = respond(server, say("hello"), max_output_tokens=3, include=[LOGPROBS])
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (part_of(response)["text"], response["completed_at"]) == ("hel", None)
    assert len(part_of(response)["logprobs"]) == response["usage"]["output_tokens"] == 3
    error = refusal(server, {"input": say("x"), "max_output_tokens": 5000})
    assert error["param"] == "max_output_tokens"
    assert "use max_output_tokens of at most" in error["message"]


def test_a_request_out_of_time_has_what_it_has() -> None:
    with saying_server(delay=0.05) as slow:
        options = {"ignore_eos": True, "max_output_tokens": 200, "timeout": 0.4}
        response = respond(slow, "free", include=[LOGPROBS], **options)
        assert (response["status"], response["emberline"]["stop_reason"]) == (
            "incomplete",
            "timeout",
        )
        assert response["incomplete_details"] == {"reason": None}
        assert 0 < len(part_of(response)["logprobs"]) == response["usage"]["output_tokens"] < 200
        slow.alive()


def test_ways_to_write_the_input(server: Server) -> None:
    text = say("yes")
    ways = [
        text,
        [{"role": "user", "content": text}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}],
        [{"role": "user", "content": text, "id": None, "status": None}],
    ]
    answers = [respond(server, way, return_token_ids=True) for way in ways]
    assert {part_of(answer)["text"] for answer in answers} == {"yes"}
    assert {prompt_text(server, answer) for answer in answers} == {f"<user>{text}<assistant>"}
    assert answers[0]["token_ids"] == [*server.ids("yes"), server.target.eos]


def test_instructions_come_first(server: Server) -> None:
    given = [{"role": "developer", "content": "d"}, {"role": "user", "content": say("ok")}]
    response = respond(server, given, instructions="be brief", return_token_ids=True)
    assert response["instructions"] == "be brief"
    text = prompt_text(server, response)
    assert text == "<system>be brief<system>d<user><say>ok</say><assistant>"


def test_output_items_go_back_in(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=NAME, input=say("one"), temperature=0, include=[LOGPROBS], top_logprobs=1
    )
    given = [{"role": "user", "content": say("one")}, *first.output]
    given.append({"role": "user", "content": say("two")})
    second = client.responses.create(
        model=NAME, input=given, temperature=0, extra_body={"return_token_ids": True}
    )
    assert second.output_text == "two"
    shown = server.text.text_of(second.prompt_token_ids)
    assert shown == "<user><say>one</say><assistant>one<user><say>two</say><assistant>"


def test_a_kept_response_is_continued(server: Server) -> None:
    first = respond(server, say("one"), instructions="now only")
    second = respond(server, say("two"), previous_response_id=first["id"])
    third = respond(
        server,
        say("three"),
        previous_response_id=second["id"],
        instructions="at last",
        return_token_ids=True,
    )
    assert third["previous_response_id"] == second["id"]
    assert prompt_text(server, third) == (
        "<system>at last<user><say>one</say><assistant>one<user><say>two</say><assistant>two"
        "<user><say>three</say><assistant>"
    )


def test_fetch_and_delete(server: Server, client: openai.OpenAI) -> None:
    made = respond(server, say("hi"), metadata={"a": "b"}, include=[LOGPROBS])
    assert server.get(f"{URL}/{made['id']}").json() == made
    kept = client.responses.retrieve(made["id"], include=[LOGPROBS])
    assert (kept.output_text, kept.metadata) == ("hi", {"a": "b"})
    client.responses.delete(made["id"])
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            call(made["id"])
        assert missing.value.param == "response_id"
    error = refusal(server, {"previous_response_id": made["id"]})
    assert (error["param"], error["code"]) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_what_is_not_to_be_kept_is_not(server: Server) -> None:
    made = respond(server, say("hi"), store=False)
    assert made["store"] is False
    assert server.get(f"{URL}/{made['id']}").status_code == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("starting_after=3", "starting_after"),
        (f"include={LOGPROBS}", "include"),
        ("include=reasoning.encrypted_content", "include"),
    ],
)
def test_what_cannot_be_fetched_is_refused(server: Server, query: str, param: str) -> None:
    made = respond(server, say("hi"))
    answer = server.get(f"{URL}/{made['id']}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_was_asked_is_shown(server: Server) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "metadata": {"run": "7"},
        "parallel_tool_calls": False,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "truncation": "disabled",
        "presence_penalty": 0.25,
        "user": "u",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    response = respond(server, say("hi"), **asked)
    assert {name: response[name] for name in asked} == asked
    for nothing in ({"background": False}, {"reasoning": {"effort": None}}, {"tools": []}):
        assert respond(server, say("hi"), **nothing)["status"] == "completed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"input": "<user>" * 300}, "input"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": False}}, "stream_options.include_usage"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[0].call_id",
        ),
        (  # the template shows neither
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}]},
            "input",
        ),
        (
            {
                "input": [
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                    {"role": "user", "content": "x"},
                ]
            },
            "input",
        ),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"annotations": True}, "annotations"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_refusals_name_the_field(server: Server, body: dict[str, Any], param: str | None) -> None:
    error = refusal(server, body)
    assert error["param"] == (param or "input[0].content[0].type")
    assert error["type"] == "invalid_request_error"
    if "stream_options" not in body:
        streamed = server.post(URL, {"input": "x", **body, "stream": True})
        assert (streamed.status_code, streamed.json()["error"]) == (400, error)


@pytest.mark.parametrize("given", [5, True, {"role": "user", "content": "x"}])
def test_an_input_that_is_neither_is_told_what_it_may_be(server: Server, given: object) -> None:
    error = refusal(server, {"input": given})
    assert error["param"] == "input"
    assert error["message"] == "input: must be a text or a list of items"


def test_a_refusal_speaks_of_this_api(server: Server) -> None:
    assert LOGPROBS in refusal(server, {"annotations": True})["message"]
    assert LOGPROBS in refusal(server, {"logprob_token_ids": [3]})["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2}, "n must be 1"),
        ({"messages": []}, "use input"),
        ({"max_tokens": 5}, "use max_output_tokens"),
        ({"max_completion_tokens": 5}, "use max_output_tokens"),
        ({"logprobs": True}, LOGPROBS),
        ({"response_format": {"type": "json_object"}}, "text.format"),
        ({"guided_json": {}}, "text.format"),
        ({"guided_regex": "a"}, "structured_outputs.regex"),
        ({"reasoning_effort": "low"}, "reasoning.effort"),
        ({"prediction": {"type": "content", "content": "x"}}, "not supported on this route"),
    ],
)
def test_fields_of_other_endpoints_say_what_to_do(
    server: Server, body: dict[str, Any], words: str
) -> None:
    error = refusal(server, body)
    assert error["param"] == next(iter(body))
    assert words in error["message"]


def test_another_model_and_another_method(server: Server) -> None:
    assert server.post(URL, {"input": "x", "model": "other"}).status_code == 404
    assert server.get(URL).status_code == 405


def test_extensions_reach_the_engine(server: Server) -> None:
    seeded = {"temperature": 1.5, "seed": 11, "ignore_eos": True, "max_output_tokens": 12}
    texts = {part_of(respond(server, "free", **seeded))["text"] for _ in range(2)}
    plain = part_of(respond(server, "free", **seeded, speculate=False))["text"]
    assert texts == {plain}
    response = respond(
        server,
        say("hi"),
        include=[LOGPROBS],
        top_logprobs=1,
        logprobs_mode="both",
        annotations=True,
        logprob_token_ids=[7],
        prompt_logprobs=0,
        return_tokens_as_token_ids=True,
        per_request_metrics="summary",
    )
    entry = part_of(response)["logprobs"][0]
    assert entry["token"] == f"token_id:{server.ids('h')[0]}"
    assert list(entry["token_id_logprobs"]) == ["7"]
    assert len(entry["processed"]["top_logprobs"]) == 1
    assert entry["annotation"]["step"] == 0
    assert len(response["prompt_logprobs"]) == response["usage"]["input_tokens"]
    assert response["metrics"]["time_to_first_token_ms"] > 0


def test_the_description_has_the_routes(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert set(paths[URL]) == {"post"}
    assert set(paths[URL + "/{response_id}"]) == {"get", "delete"}


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").rest()
