"""Predicted outputs over HTTP: the same text in fewer steps, and counts that add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.serving import Server, say, saying_server

CHAT = "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog, twice a day and never at night."


@pytest.fixture(scope="module", params=[0, 4])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(num_drafts=request.param, wrong_every=2, max_model_len=512) as running:
        yield running


def predicted(content: object) -> dict[str, Any]:
    return {"type": "content", "content": content}


def test_a_right_prediction_saves_steps(server: Server) -> None:
    plain = server.chat(say(TEXT))
    answer = server.chat(say(TEXT), prediction=predicted(TEXT))
    assert answer["choices"][0]["message"]["content"] == TEXT
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0.8 * len(server.ids(TEXT))
    steps = [a["emberline"]["speculation"]["steps"] for a in (plain, answer)]
    assert steps[1] < steps[0] / 3
    unasked = plain["usage"]["completion_tokens_details"]
    assert unasked["accepted_prediction_tokens"] == unasked["rejected_prediction_tokens"] == 0


def test_a_partly_wrong_one_counts_both_ways(server: Server) -> None:
    changed = TEXT.replace("brown", "green").replace("dog", "cat")
    for content in (changed, [{"type": "text", "text": changed[:20]},
                              {"type": "text", "text": changed[20:]}]):  # fmt: skip
        answer = server.chat(say(TEXT), prediction=predicted(content))
        assert answer["choices"][0]["message"]["content"] == TEXT
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20
        assert details["rejected_prediction_tokens"] > 0
        stats = answer["emberline"]["speculation"]
        counted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        assert counted <= stats["verified"]


def test_streams_and_several_choices(server: Server) -> None:
    one = server.chat(say(TEXT), prediction=predicted(TEXT))["usage"]["completion_tokens_details"]
    two = server.chat(say(TEXT), prediction=predicted(TEXT), n=2)["usage"]
    assert two["completion_tokens_details"] == {key: 2 * value for key, value in one.items()}
    body = {"messages": [{"role": "user", "content": say(TEXT)}], "temperature": 0,
            "prediction": predicted(TEXT), "stream_options": {"include_usage": True}}  # fmt: skip
    assert server.stream(CHAT, body)[-1]["usage"]["completion_tokens_details"] == one


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": say(TEXT)}],
            prediction={"type": "content", "content": TEXT},
            temperature=0,
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert (answer.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 40


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prediction": predicted("x"), "speculate": False}, "prediction"),
        ({"prediction": predicted("x" * 600)}, "prediction"),
        ({"prediction": predicted("x" * 10**6)}, "prediction"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": predicted([{"type": "image"}])}, "prediction.content[0].text"),
    ],
)
def test_what_is_no_prediction(server: Server, options: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **options}
    answer = server.post(CHAT, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param.split("[")[0])


def test_nothing_predicted_is_nothing(server: Server) -> None:
    answer = server.chat(say("a"), prediction=predicted(""))
    assert answer["choices"][0]["message"]["content"] == "a"
    assert server.post("/v1/completions", {"prompt": "a", "prediction": predicted("a")}).json()[
        "error"
    ]["param"] == "prediction"  # fmt: skip
