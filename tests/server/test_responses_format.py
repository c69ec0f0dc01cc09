"""`text.format` of a response: what it asks for is enforced, and what is wrong with it is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from emberline.engine.grammar import GrammarCompiler

from support.engines import make_engine
from support.paged import PrefixDrafter
from support.serving import NAME, SayingTarget, Server, make_tokenizer, say, serve

URL = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": ["yes", "no"]}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tokenizer = make_tokenizer()
    target = SayingTarget(tokenizer)
    engine = make_engine(target, PrefixDrafter(target, 3, 3), num_pages=1024, eos_ids=(target.eos,))
    engine.grammars = GrammarCompiler(tokenizer, target.vocab_size, (target.eos,))
    with serve(engine, tokenizer, target) as running:
        yield running


def respond(server: Server, form: dict[str, Any], **options: object) -> dict[str, Any]:
    body = {"input": "free", "temperature": 0, "text": {"format": form}, "max_output_tokens": 60}
    answer = server.post(URL, {**body, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_obeyed(server: Server, temperature: float) -> None:
    form = {"type": "json_schema", "name": "verdict", "schema": SCHEMA, "strict": True}
    included = ["message.output_text.logprobs"]
    response = respond(server, form, temperature=temperature, seed=3, include=included)
    [part] = response["output"][0]["content"]
    assert json.loads(part["text"])["ok"] in ("yes", "no")
    assert (response["status"], response["text"]["format"]) == ("completed", form)
    assert len(part["logprobs"]) == response["usage"]["output_tokens"]
    server.alive()


def test_any_object(server: Server) -> None:
    response = respond(server, {"type": "json_object"}, input=say('{"a": [1]}'))
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"a": [1]}


def test_the_client_parses_its_own_types(server: Server) -> None:
    class Verdict(BaseModel):
        ok: bool

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.parse(
            model=NAME, input="free", text_format=Verdict, temperature=0, max_output_tokens=60
        )
    assert isinstance(answer.output_parsed, Verdict)


def test_other_ways_to_bind_the_answer(server: Server) -> None:
    wanted = {"choice": ["north", "south"]}
    response = respond(server, {"type": "text"}, structured_outputs=wanted)
    assert response["output"][0]["content"][0]["text"] in wanted["choice"]


@pytest.mark.parametrize(
    ("form", "param", "reason"),
    [
        ({"type": "json_schema", "name": "x"}, "text.format.schema", "missing"),
        ({"type": "json_schema", "schema": SCHEMA}, "text.format.name", "missing"),
        ({"type": "text", "schema": SCHEMA}, "text.format.schema", "json_schema"),
        ({"type": "json_object", "strict": True}, "text.format.strict", "json_schema"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "cat"}}, "text.format", "cat"),
        ({"type": "json_schema", "name": "x", "schema": 5}, "text.format.schema", "dictionary"),
    ],
)
def test_what_is_wrong_is_named(
    server: Server, form: dict[str, Any], param: str, reason: str
) -> None:
    answer = server.post(URL, {"input": "x", "text": {"format": form}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]


def test_two_ways_contradict_each_other(server: Server) -> None:
    body = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}
    error = server.post(URL, {"input": "x", **body}).json()["error"]
    assert error["param"] == "structured_outputs.regex"
    assert "text.format" in error["message"]
