"""Structured output over HTTP: what was asked for is what comes, or a refusal that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from emberline.server.lark import literal
from emberline.server.protocol import CompletionBody, parse_body
from emberline.server.structured import StructuralTag, asked_grammar
from emberline.types import InvalidRequest

from support.serving import Server, say, saying_server, strict

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR, "strict": None}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": COLOUR, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module", params=[{}, {"num_drafts": 5}, {"num_drafts": 4, "wrong_every": 3}],
                ids=["plain", "drafted", "often wrong"])  # fmt: skip
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(**request.param) as running:
        yield running


def ask(server: Server, path: str, text: str, **options: object) -> tuple[str, str]:
    """Text and finish reason of an answer in which the model wants to say `text`."""
    prompt: dict[str, Any] = {"prompt": say(text)}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": say(text)}]}
    body = {"temperature": 0, "max_tokens": 150, **prompt, **options}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    choice = strict(answer.content)["choices"][0]
    said = choice["message"]["content"] if path == CHAT else choice["text"]
    events = server.stream(path, body)
    parts = [event["choices"][0] for event in events if event["choices"]]
    texts = [p["delta"].get("content", "") if path == CHAT else p["text"] for p in parts]
    assert "".join(texts) == said
    return said, choice["finish_reason"]


WAYS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "json"),
    ({"guided_json": COLOUR}, "json"),
    ({"guided_json": json.dumps(COLOUR)}, "json"),
    ({"structured_outputs": {"json": COLOUR}}, "json"),
    ({"response_format": {"type": "json_object"}}, "object"),
    ({"structured_outputs": {"json_object": True}}, "object"),
    ({"guided_regex": "(red|blue)[0-9]{3}/"}, "(red|blue)[0-9]{3}/"),
    ({"structured_outputs": {"regex": "a{4}"}}, "a{4}"),
    ({"guided_choice": ["yes, do", "no\n", 'q"']}, 'yes, do|no\n|q"'),
    ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
    ({"guided_grammar": 'start: "x" ("y" | "z")+ "."'}, r"x[yz]+\."),
    ({"structured_outputs": {"grammar": 'root ::= "ab" | "cd"'}}, "ab|cd"),
]


@pytest.mark.parametrize(("options", "kind"), WAYS, ids=[str(way)[:60] for way, _ in WAYS])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_comes_is_what_was_asked_for(
    server: Server, path: str, options: dict[str, Any], kind: str
) -> None:
    said, finish = ask(server, path, "I like pink.", **options)
    if finish == "length":
        return
    assert finish == "stop"
    if kind == "json":
        assert json.loads(said)["colour"] in ("red", "blue")
    elif kind == "object":
        assert isinstance(json.loads(said), dict)
    else:
        assert re.fullmatch(kind, said)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_matches_is_left_alone(server: Server, path: str) -> None:
    right = '{"colour": "blue", "n": 7}'
    assert ask(server, path, right, response_format=FORMAT) == (right, "stop")
    assert ask(server, path, "pink", response_format={"type": "text"}) == ("pink", "stop")
    tagged = f"It is <f=a>{right}</f> so."
    assert ask(server, path, tagged, response_format=TAG) == (tagged, "stop")
    assert ask(server, path, "none", structured_outputs={"structural_tag": TAG})[0] == "none"
    text = json.dumps(TAG)
    assert ask(server, path, tagged, structured_outputs={"structural_tag": text})[0] == tagged


def test_a_structure_binds_from_its_trigger_on(server: Server) -> None:
    said, finish = ask(server, CHAT, "So <f=b>{}", response_format=TAG)
    assert said.startswith("So <f=a>{")
    assert finish == "length" or said.index("</f>")


def test_records_of_a_bound_answer(server: Server) -> None:
    answer = server.chat(
        say("no"), response_format=FORMAT, logprobs=True, top_logprobs=3, max_tokens=100
    )
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    processed = server.chat(
        say("no"), response_format=FORMAT, logprobs=True, top_logprobs=3, max_tokens=100,
        logprobs_mode="processed",
    )  # fmt: skip
    first = processed["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "{"
    assert first["logprob"] == 0.0
    assert [top["logprob"] for top in first["top_logprobs"][1:]] == [-9999.0] * 2


BAD: list[tuple[str, object, str]] = [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "$ref": "#/no"}}}, "response_format"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "wat"}}}, "response_format"),
    ("response_format", {"type": "yaml"}, "response_format"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", {**TAG, "triggers": ["<g="]}, "response_format"),
    ("guided_json", "{", "guided_json"),
    ("guided_json", 7, "guided_json"),
    ("guided_regex", "[", "guided_regex"),
    ("guided_choice", [], "guided_choice"),
    ("guided_choice", ["a", ""], "guided_choice"),
    ("guided_grammar", "start: nothing", "guided_grammar"),
    ("guided_grammar", "root ::= (", "guided_grammar"),
    ("structured_outputs", {"regex": "["}, "structured_outputs.regex"),
    ("structured_outputs", {"json": {"type": 5}}, "structured_outputs.json"),
    ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag"),
    ("structured_outputs", {"whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "param"), BAD, ids=[f"{f}={v!r:.40}" for f, v, _ in BAD]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_schema_is_refused(
    server: Server, path: str, field: str, value: object, param: str
) -> None:
    body = {"prompt": "x"} if path == COMPLETIONS else {
        "messages": [{"role": "user", "content": "x"}]}  # fmt: skip
    for stream in (False, True):
        answer = server.post(path, {**body, field: value, "stream": stream})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text


def test_the_compiler_is_quoted_and_nothing_is_harmed(server: Server) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}
    message = {"role": "user", "content": "x"}
    answer = server.post(CHAT, {"messages": [message], "response_format": wrong})
    assert "does not compile" in answer.json()["error"]["message"]
    nothing = {"messages": [message], "structured_outputs": {"regex": r"[^\s\S]"}}
    told = server.post(CHAT, nothing).json()["error"]["message"]
    assert told == "the regex does not compile: nothing can match it"
    for name, value in (("min_tokens", 2), ("ignore_eos", True)):
        body = {"messages": [message], "response_format": FORMAT, name: value}
        assert server.post(CHAT, body).json()["error"]["param"] == name
    server.alive()


def test_two_wishes_contradict_each_other() -> None:
    body = parse_body(
        CompletionBody,
        json.dumps({"prompt": "", "guided_regex": "a", "response_format": FORMAT}).encode(),
    )
    with pytest.raises(InvalidRequest, match="response_format and guided_regex"):
        asked_grammar(body, {})


def test_named_tokens_are_no_text_to_a_grammar() -> None:
    tokens = {"<f>": 7, "<f>>": 8}
    assert literal('a<f>"<f>>', tokens) == '"a" <[7]> "\\"" <[8]>'
    assert literal("", tokens) == ""
    assert literal("<g>", tokens) == '"<g>"'
    assert StructuralTag.model_validate(TAG).structures[0].end == "</f>"


@pytest.mark.parametrize("stream", [False, True])
def test_options_that_leave_no_token_are_the_clients_doing(server, stream) -> None:
    eos = server.ids("<eos>")
    body = {"prompt": "a", "max_tokens": 4, "allowed_token_ids": eos, "min_tokens": 2}
    answer = server.post("/v1/completions", body | {"stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "no_token"
    assert "allowed_token_ids" in error["message"]
    server.alive()
