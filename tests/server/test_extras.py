"""Extensions of both endpoints: two distributions, annotations, all of V, what may be drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import Server, say, saying_server, strict

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
V = 270  # the served vocabulary, padding included
ORIGINS = {"accepted", "recovered", "bonus", "decoded"}
FREE = {"max_tokens": 12, "ignore_eos": True}


def ask(server: Server, path: str, **options: Any) -> dict[str, Any]:
    prompt = {"prompt": "free"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = server.post(path, {**prompt, **FREE, **options})
    assert answer.status_code == 200, answer.text
    return strict(answer.content)


def refused(server: Server, path: str, **options: Any) -> dict[str, Any]:
    prompt = {"prompt": "free"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = server.post(path, {**prompt, **options})
    assert answer.status_code == 400, answer.text
    return strict(answer.content)["error"]


def chat_entries(server: Server, **options: Any) -> list[dict[str, Any]]:
    return ask(server, CHAT, logprobs=True, **options)["choices"][0]["logprobs"]["content"]


# Both distributions


def test_chat_has_both_distributions_in_one_entry(server: Server) -> None:
    options = {"temperature": 0.7, "seed": 3, "top_logprobs": 4}
    raw = chat_entries(server, logprobs_mode="raw", **options)
    processed = chat_entries(server, logprobs_mode="processed", **options)
    both = chat_entries(server, logprobs_mode="both", **options)
    assert [one | {"processed": None} for one in raw] == [one | {"processed": None} for one in both]
    for one, twin in zip(both, processed, strict=True):
        wanted = {"logprob": twin["logprob"], "top_logprobs": twin["top_logprobs"]}
        assert one["processed"] == wanted
    assert any(one["logprob"] != one["processed"]["logprob"] for one in both)
    assert all("processed" not in one for one in [*raw, *processed])


def test_completions_have_both_distributions_in_parallel_arrays(server: Server) -> None:
    options = {"temperature": 0.7, "seed": 3, "logprobs": 2, "logprob_token_ids": [7, 9]}

    def arrays(mode: str, **more: Any) -> dict[str, Any]:
        answer = ask(server, COMPLETIONS, logprobs_mode=mode, **options, **more)
        return answer["choices"][0]["logprobs"]

    raw, processed, both = map(arrays, ("raw", "processed", "both"))
    for name in ("token_logprobs", "top_logprobs", "token_id_logprobs"):
        assert both[name] == raw[name]
        assert both[f"processed_{name}"] == processed[name]
        assert f"processed_{name}" not in raw
    echoed = arrays("both", echo=True)
    length = len(server.ids("free"))
    assert echoed["processed_token_logprobs"] == [None] * length + both["processed_token_logprobs"]
    assert echoed["processed_top_logprobs"][:length] == [None] * length
    assert len({len(values) for values in echoed.values()}) == 1


def test_what_could_not_be_drawn_is_finite_there(server: Server) -> None:
    [only] = chat_entries(server, top_k=1, top_logprobs=3, logprobs_mode="both", max_tokens=1)
    assert only["processed"]["logprob"] == 0
    rest = [one["logprob"] for one in only["processed"]["top_logprobs"][1:]]
    assert rest == [-9999.0] * 2
    assert all(-9999.0 < one["logprob"] < 0 for one in only["top_logprobs"])


# Annotations


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_annotations_agree_with_the_counts(server: Server, path: str) -> None:
    wanted = {"logprobs": True, "annotations": True, "temperature": 0}
    answer = ask(server, path, **wanted)
    logprobs = answer["choices"][0]["logprobs"]
    if path == CHAT:
        notes = [entry["annotation"] for entry in logprobs["content"]]
    else:
        notes = logprobs["annotations"]
    stats = answer["emberline"]["speculation"]
    assert len(notes) == answer["usage"]["completion_tokens"]
    assert notes[0] == {
        "step": 0,
        "origin": "decoded",
        "draft_token_id": None,
        "draft_token": None,
        "confidence": None,
    }
    assert {note["origin"] for note in notes} <= ORIGINS
    assert sum(note["origin"] == "accepted" for note in notes) == stats["accepted"]
    steps = [note["step"] for note in notes]
    assert steps == sorted(steps)
    assert len(set(steps)) == stats["steps"] + 1
    for note in notes:
        drafted = note["draft_token_id"] is not None
        assert drafted == (note["origin"] in ("accepted", "recovered"))
        assert (note["draft_token"] is not None) == drafted


def test_annotations_are_off_unless_asked(server: Server) -> None:
    assert all("annotation" not in entry for entry in chat_entries(server))
    arrays = ask(server, COMPLETIONS, logprobs=1)["choices"][0]["logprobs"]
    assert set(arrays) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streams_carry_both_and_annotations(server: Server, path: str) -> None:
    options = {
        **FREE, "logprobs": True, "logprobs_mode": "both", "annotations": True, "seed": 5,
    }  # fmt: skip
    prompt = {"prompt": "free"} if path == COMPLETIONS else {"messages": MESSAGES}
    whole = ask(server, path, **options)["choices"][0]["logprobs"]
    events = server.stream(path, prompt | options)
    parts = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    for name, values in whole.items():
        if values is not None:
            assert [value for part in parts for value in part[name]] == values


def test_annotations_need_logprobs(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        assert refused(server, path, annotations=True)["param"] == "annotations"


# The whole vocabulary


def test_minus_one_is_the_whole_vocabulary(server: Server) -> None:
    answer = ask(server, COMPLETIONS, logprobs=-1, return_tokens_as_token_ids=True, max_tokens=3)
    arrays = answer["choices"][0]["logprobs"]
    for chosen, top in zip(arrays["token_logprobs"], arrays["top_logprobs"], strict=True):
        assert len(top) == V
        assert math.isclose(sum(map(math.exp, top.values())), 1, abs_tol=1e-5)
        assert chosen in top.values()
    for path in (CHAT, COMPLETIONS):
        answer = ask(server, path, prompt_logprobs=-1, max_tokens=1)
        place = answer if path == CHAT else answer["choices"][0]
        first, *rest = place["prompt_logprobs"]
        assert first is None
        assert {len(entry) for entry in rest} == {V}
    echoed = ask(server, COMPLETIONS, logprobs=-1, echo=True, max_tokens=0)
    assert len(echoed["choices"][0]["logprobs"]["tokens"]) == len(server.ids("free"))


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    with saying_server(num_drafts=3, options={"max_logprobs": 5}) as server:
        yield server
        server.alive()


@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": 6, "echo": True}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 6}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [*range(6)]}, "logprob_token_ids"),
        (CHAT, {"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_widths_are_bounded_by_the_server(
    narrow: Server, path: str, options: dict[str, Any], param: str
) -> None:
    for more in ({}, {"stream": True}):
        error = refused(narrow, path, **options, **more)
        assert error["param"] == param
        if options.get("top_logprobs") != -1:
            assert "at most 5" in error["message"]


def test_widths_within_the_bound_are_answered(narrow: Server) -> None:
    ask(narrow, COMPLETIONS, logprobs=5, logprob_token_ids=[1] * 5, echo=True)
    ask(narrow, CHAT, logprobs=True, top_logprobs=5, prompt_logprobs=5)
    assert narrow.get("/server_info").json()["max_logprobs"] == 5


# What may be drawn


def test_only_allowed_ids_are_drawn(server: Server) -> None:
    allowed = sorted(server.ids("xyz"))
    for path in (CHAT, COMPLETIONS):
        answer = ask(server, path, allowed_token_ids=allowed, seed=1, return_token_ids=True)
        assert set(answer["choices"][0]["token_ids"]) <= set(allowed)
    assert refused(server, CHAT, allowed_token_ids=[V])["param"] == "allowed_token_ids"
    assert refused(server, CHAT, allowed_token_ids=[])["param"] == "allowed_token_ids"


def test_bad_words_are_not_said(server: Server) -> None:
    assert server.complete(say("ab cd"), max_tokens=9)["choices"][0]["text"] == "ab cd"
    for word in ("b", " b", "b c", "ab cd"):
        text = server.complete(say("ab cd"), max_tokens=9, bad_words=[word])["choices"][0]["text"]
        assert word not in text
    both = server.complete(say("the the"), max_tokens=9, bad_words=["the"])["choices"][0]["text"]
    assert "the" not in both  # " the" is a token of its own
    text = server.chat(say("ab"), max_tokens=4, bad_words=["a"])["choices"][0]["message"]["content"]
    assert "a" not in text


@pytest.mark.parametrize(
    ("words", "param"),
    [([""], "bad_words[0]"), ([" "], "bad_words"), ("x", "bad_words"), (["x"] * 257, "bad_words")],
)
def test_words_without_a_meaning(server: Server, words: object, param: str) -> None:
    for path in (CHAT, COMPLETIONS):
        assert refused(server, path, bad_words=words)["param"] == param


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {"type": "object", "maxProperties": 0}}},
        {"guided_json": {"type": "object", "maxProperties": 0}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_completions_may_be_bound_to_json(server: Server, asked: dict[str, Any]) -> None:
    options = {"max_tokens": 60, "logit_bias": {str(server.ids("}")[0]): 30}}
    choice = server.complete("free", logprobs=1, **asked, **options)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["text"]), dict)


def test_completions_may_be_one_of_several_texts(server: Server) -> None:
    for asked in (
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        texts = {
            choice["text"]
            for seed in range(3)
            for choice in server.complete("free", temperature=1, seed=seed, n=3, **asked)["choices"]
        }
        assert texts == {"yes", "no"}
    error = refused(server, COMPLETIONS, guided_choice=["yes"], guided_regex="no")
    assert error["param"] in ("guided_choice", "guided_regex")
    assert refused(server, COMPLETIONS, guided_regex="a", min_tokens=2)["param"] == "min_tokens"


# Names


def test_a_call_is_named_by_its_client(server: Server) -> None:
    for path, prefix in ((CHAT, "chatcmpl"), (COMPLETIONS, "cmpl")):
        for _ in range(2):  # the same name may come again
            assert ask(server, path, request_id="job:7.a")["id"] == f"{prefix}-job:7.a"
        assert ask(server, path)["id"] != ask(server, path)["id"]
        for name in ("", "a b", "x" * 65, "é", "a\n", 5):
            assert refused(server, path, request_id=name)["param"] == "request_id"


@pytest.mark.parametrize(
    ("name", "value"), [("cache_salt", "x"), ("truncate_prompt_tokens", 5), ("suffix", "x")]
)
def test_what_is_not_there_is_refused_by_name(server: Server, name: str, value: object) -> None:
    for path in (CHAT, COMPLETIONS):
        error = refused(server, path, **{name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
