"""What `POST /generate` cannot honour it refuses by name; whatever the body, never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.server.native_body import SAMPLING_UNSUPPORTED, UNSUPPORTED, GenerateBody
from emberline.server.native_params import NativeSampling

from support.serving import Server, saying_server, strict

PATH = "/generate"
V = 270  # the served vocabulary, padding included


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with saying_server(num_drafts=3, wrong_every=4, max_model_len=64, max_queue=8) as running:
        yield running
        running.alive()


def refused(server: Server, body: dict[str, Any], param: str) -> str:
    answer = server.post(PATH, body)
    assert answer.status_code == 400, answer.text
    error = strict(answer.content)["error"]
    assert error["param"] == param, error
    return str(error["message"])


BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "x", "input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["x", ""]}, "text"),
    ({"text": 5}, "text"),
    ({"text": ["x", 5]}, "text"),
    ({"text": "x" * 100}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [V]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [1] * 65}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"text": "x", "rid": ""}, "rid"),
    ({"text": "x", "rid": "x" * 600}, "rid"),
    ({"text": "x", "rid": ["a"]}, "rid"),
    ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid"),
    ({"text": ["x"], "sampling_params": {"n": 2}, "rid": [5]}, "rid"),
    ({"text": "x", "return_logprob": "yes"}, "return_logprob"),
    ({"text": "x", "return_logprob": [True]}, "return_logprob"),
    ({"text": ["x", "y"], "return_logprob": [True]}, "return_logprob"),
    ({"text": "xy", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
    ({"text": "x", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "x", "logprob_start_len": 0.5}, "logprob_start_len"),
    ({"text": "x", "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": V + 1}, "top_logprobs_num"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 5000}, "top_logprobs_num"),
    ({"text": "x", "return_logprob": True, "token_ids_logprob": [V]}, "token_ids_logprob"),
    ({"text": "x", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
    ({"text": "x", "return_logprob": True, "token_ids_logprob": [1] * 2000}, "token_ids_logprob"),
    ({"text": "x", "token_ids_logprob": [[1]]}, "token_ids_logprob"),
    ({"text": ["x", "y"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
    ({"text": ["x", "y"], "token_ids_logprob": [[1], 2]}, "token_ids_logprob"),
    ({"text": "x", "annotations": [True]}, "annotations"),
    ({"text": ["x", "y"], "annotations": [True]}, "annotations"),
    ({"text": ["x", "y"], "annotations": "all"}, "annotations"),
    ({"text": "x", "logprobs_mode": "cooked"}, "logprobs_mode"),
    ({"text": "x", "accept": "maybe"}, "accept"),
    ({"text": "x", "sampling_params": {"accept": "maybe"}}, "sampling_params.accept"),
    ({"text": "x", "priority": 2**31}, "priority"),
    ({"text": "x", "timeout": 0}, "timeout"),
    ({"text": "x", "unheard_of": 1}, "unheard_of"),
    ({"text": "x", "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{}, {"n": 2}]}, "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{}, {"top_q": 2}]}, "sampling_params[1].top_q"),
    ({"text": ["x"], "sampling_params": [5]}, "sampling_params[0]"),
    (
        {"text": "x", "sampling_params": {"stop_token_ids": [-1]}},
        "sampling_params.stop_token_ids[0]",
    ),
    ({"text": "x", "sampling_params": 5}, "sampling_params"),
    ({"text": ["x"] * 9}, "text"),
]


@pytest.mark.parametrize(("body", "param"), BODIES, ids=[f"{body!r:.60}" for body, _ in BODIES])
@pytest.mark.parametrize("stream", [False, True])
def test_bodies_without_a_meaning(
    server: Server, body: dict[str, Any], param: str, stream: bool
) -> None:
    refused(server, {**body, "stream": stream}, param)


@pytest.mark.parametrize("name", ["text", "input_ids"])
def test_no_prompt_at_all_is_named_as_what_it_was_given_as(server: Server, name: str) -> None:
    assert refused(server, {name: []}, name).startswith(f"{name} is empty")


OPTIONS: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 3),
    ("top_k", -9),
    ("min_p", 2),
    ("n", 0),
    ("n", 129),
    ("n", 9),  # more than this server's queue could ever hold
    ("seed", 2**70),
    ("frequency_penalty", 9),
    ("presence_penalty", "1"),
    ("repetition_penalty", 0),
    ("max_new_tokens", -1),
    ("max_new_tokens", 64),
    ("max_new_tokens", 2.0),
    ("min_new_tokens", -1),
    ("stop", ""),
    ("stop", ["x"] * 100),
    ("stop_token_ids", [V + 5]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [V]),
    ("bad_words", [" "]),
    ("bad_words", ["x"] * 257),
    ("logit_bias", {"a": 5}),
    ("logit_bias", {str(V): 5}),
    ("logit_bias", {"5": 101}),
    ("ignore_eos", "no"),
    ("ebnf", "root ::= ("),
    ("ebnf", "x" * 20000),
    ("ebnf", "root ::= " + "(" * 4000),
    ("structural_tag", "{}"),
    ("structural_tag", '{"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b>"]}'),
    ("unheard_of", 1),
    ("spaces_between_special_tokens", False),
    ("stop_regex", "a+"),
    ("custom_params", {}),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=[f"{n}={v!r:.20}" for n, v in OPTIONS])
def test_options_without_a_meaning(server: Server, name: str, value: object) -> None:
    refused(server, {"text": "x", "sampling_params": {name: value}}, f"sampling_params.{name}")


@pytest.mark.parametrize("name", [*UNSUPPORTED])
def test_what_is_not_there_is_refused(server: Server, name: str) -> None:
    if not UNSUPPORTED[name] or UNSUPPORTED[name] == (False,):
        message = refused(server, {"text": "x", name: True}, name)
        assert "not supported" in message
    for value in (None, *UNSUPPORTED[name]):
        body = {"text": "x", name: value, "sampling_params": {"max_new_tokens": 1}}
        assert server.post(PATH, body).status_code == 200


def test_contradictions(server: Server) -> None:
    def differs(options: dict[str, Any], param: str, **body: Any) -> None:
        refused(server, {"text": "x", "sampling_params": options, **body}, param)

    differs({"seed": 1, "sampling_seed": 2}, "sampling_params.sampling_seed")
    differs({"regex": "a", "ebnf": 'root ::= "a"'}, "sampling_params.ebnf")
    differs({"min_new_tokens": 5, "max_new_tokens": 2}, "sampling_params.min_new_tokens")
    differs({"logprobs_mode": "raw"}, "logprobs_mode", logprobs_mode="both")
    differs({"speculate": True}, "speculate", speculate=False)


def test_errors_speak_of_the_fields_of_this_route(server: Server) -> None:
    options = {"max_new_tokens": 64}
    message = refused(
        server, {"text": "xy", "sampling_params": options}, "sampling_params.max_new_tokens"
    )
    assert "use max_new_tokens of at most 62" in message
    options = {"max_new_tokens": -1}
    message = refused(
        server, {"text": "xy", "sampling_params": options}, "sampling_params.max_new_tokens"
    )
    assert "at least 0" in message
    wide = {"text": "x", "return_logprob": True, "top_logprobs_num": 5000}
    message = refused(server, wide, "top_logprobs_num")
    assert message.startswith("top_logprobs_num asks for 5000")
    assert "(--max-logprobs)" in message


def test_logprob_fields_ask_for_nothing_without_return_logprob(server: Server) -> None:
    body = {
        "text": "x",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": False,
        "logprob_start_len": 1998,
        "top_logprobs_num": 5,
        "token_ids_logprob": [1, 2],
        "annotations": True,
    }
    meta = server.post(PATH, body).json()["meta_info"]
    assert not any("logprobs" in key or "annotations" in key for key in meta)


def test_annotations_of_some_prompts(server: Server) -> None:
    def annotated(**fields: Any) -> list[bool]:
        options = {"max_new_tokens": 2, "ignore_eos": True}
        body = {"text": ["x", "y", "z"], "sampling_params": options, **fields}
        metas = [one["meta_info"] for one in server.post(PATH, body).json()]
        assert all(len(meta.get("output_annotations", "xx")) == 2 for meta in metas)
        return ["output_annotations" in meta for meta in metas]

    some = [True, False, True]
    assert annotated(annotations=True, return_logprob=some) == some
    assert annotated(annotations=some, return_logprob=True) == some
    assert annotated(annotations=some, return_logprob=[True, True, False]) == [True, False, False]


def test_bans_hold(server: Server) -> None:
    def answer(options: dict[str, Any]) -> dict[str, Any]:
        options = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3, **options}
        body = {"text": "<say>abababababab</say>", "sampling_params": options}
        return dict(strict(server.post(PATH, body).content))

    assert set(answer({"allowed_token_ids": [30, 31]})["output_ids"]) <= {30, 31}
    assert "ab" in answer({"temperature": 0})["text"]
    assert "ab" not in answer({"temperature": 0, "bad_words": ["ab"]})["text"]


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**64, 0.5, 1e308, "", "x", "\x00", "🙂", "a" * 3000, [],
    [0], [[]], [[0]], [0.5], [None], ["x", None], ["x", "y"], [[1], [2]], {}, {"0": 1}, [{}],
    [{}, {}], [True, False], [[1], None], {"n": 2}, {"max_new_tokens": 0}, {"stop": "x", "n": 3},
    {"ebnf": "root ::= "}, {"structural_tag": {}}, {"json_schema": []},
]  # fmt: skip


@given(data=st.data())
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_an_odd_body_is_answered_or_refused(server: Server, data: st.DataObject) -> None:
    names = st.sampled_from([*GenerateBody.model_fields, *UNSUPPORTED, "unheard_of"])
    options = st.sampled_from([*NativeSampling.model_fields, *SAMPLING_UNSUPPORTED])
    values = st.sampled_from(ODD)
    body: dict[str, Any] = {"text": "abc", "sampling_params": {"max_new_tokens": 3}}
    body["sampling_params"] |= data.draw(st.dictionaries(options, values, max_size=2))
    body |= data.draw(st.dictionaries(names, values, max_size=3))
    answer = server.post(PATH, body)
    assert answer.status_code in (200, 400, 404, 429), (body, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
        assert parts[-1] == "[DONE]"
        assert all("error" not in strict(part) for part in parts[:-1]), body
    elif answer.status_code != 200:
        assert strict(answer.content)["error"]["message"]
    else:
        strict(answer.content)
