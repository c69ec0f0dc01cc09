"""Requests that run out of time end with what they have; requests that rank first run first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from emberline.server.app import create_app

from support.serving import NAME, Server, saying_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "free",
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0,
}
CHAT_LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "free"}],
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0,
}


@pytest.fixture(scope="module", params=[0, 4])
def slow(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(num_drafts=request.param, wrong_every=2, delay=0.05, max_num_reqs=2) as made:
        yield made


def aborts(server: Server) -> float:
    name = f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{NAME}"}}'
    [line] = [one for one in server.get("/metrics").text.splitlines() if one.startswith(name)]
    return float(line.split()[-1])


def test_what_it_has_is_answered(slow: Server) -> None:
    whole = slow.post(COMPLETIONS, LONG).json()["choices"][0]["text"]
    before = aborts(slow)
    answer = slow.complete(**{**LONG, "logprobs": 2, "timeout": 0.5})
    [choice], count = answer["choices"], answer["usage"]["completion_tokens"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
    assert 0 < count < 200
    assert len(choice["logprobs"]["tokens"]) == count
    assert choice["text"]
    assert whole.startswith(choice["text"])
    assert aborts(slow) == before + 1
    slow.alive()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_ends_as_streams_do(slow: Server, path: str) -> None:
    body = {**(LONG if path == COMPLETIONS else CHAT_LONG), "timeout": 0.5}
    events = slow.stream(path, {**body, "stream_options": {"include_usage": True}})
    *_, end, usage = events
    [choice] = end["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
    assert 0 < usage["usage"]["completion_tokens"] < 200
    assert "error" not in str(events)
    slow.alive()


def test_the_time_counts_from_the_arrival(slow: Server) -> None:
    """What never came to run is answered too: no text, and no values that nobody computed."""
    with ThreadPoolExecutor() as pool:
        busy = [pool.submit(slow.post, COMPLETIONS, LONG) for _ in range(2)]
        slow.until(lambda state: state.num_running == 2)
        body = {**LONG, "max_tokens": 5, "timeout": 0.2}
        began = time.monotonic()
        answer = slow.complete(**{**body, "echo": True, "logprobs": 1, "n": 2})
        assert time.monotonic() - began < 2
        prompt = slow.ids("free")
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == 0
        for choice in answer["choices"]:
            assert (choice["text"], choice["stop_reason"]) == ("free", "timeout")
            assert choice["logprobs"]["tokens"] == [slow.text.token_str(i) for i in prompt]
            assert choice["logprobs"]["token_logprobs"] == [None] * len(prompt)
        answer = slow.complete(**{**body, "prompt_logprobs": 1})
        assert answer["choices"][0]["prompt_logprobs"] is None
        events = slow.stream(CHAT, {**CHAT_LONG, "timeout": 0.2, "prompt_logprobs": 1})
        assert events[-1]["choices"][0]["stop_reason"] == "timeout"
        assert events[0]["prompt_logprobs"] is None
        assert all(one.result(30).json()["choices"][0]["finish_reason"] == "length" for one in busy)
    slow.alive()


def test_one_choice_may_finish_and_another_run_out_of_time(slow: Server) -> None:
    body = {"prompt": ["<say>ab</say>", "free"], "max_tokens": 200, "temperature": 0}
    answer = slow.post(COMPLETIONS, {**body, "timeout": 1.0}).json()
    reasons = [(choice["finish_reason"], choice["stop_reason"]) for choice in answer["choices"]]
    assert reasons == [("stop", None), ("abort", "timeout")]
    slow.alive()


def test_the_official_client_reads_it(slow: Server) -> None:
    with openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=NAME, prompt="free", max_tokens=200, extra_body={"timeout": 0.3, "priority": -1}
        )
    assert answer.choices[0].finish_reason == "abort"


def test_a_limit_of_the_server() -> None:
    with saying_server(delay=0.05, options={"request_timeout": 1.0}) as server:
        began = time.monotonic()
        own = server.complete(**{**LONG, "timeout": 0.2})
        assert time.monotonic() - began < 0.8
        [choice] = server.complete(**LONG)["choices"]
        assert choice["stop_reason"] == own["choices"][0]["stop_reason"] == "timeout"
        assert len(choice["text"]) > len(own["choices"][0]["text"])
        for path, body in ((COMPLETIONS, LONG), (CHAT, CHAT_LONG)):
            refusal = server.post(path, {**body, "timeout": 1.1})
            assert refusal.status_code == 400
            assert refusal.json()["error"]["param"] == "timeout"
            assert "at most 1 s" in refusal.json()["error"]["message"]
        server.alive()


@pytest.mark.parametrize("limit", [0, -1, 1e9])
def test_a_limit_without_a_meaning(slow: Server, limit: float) -> None:
    with pytest.raises(ValueError, match="request_timeout"):
        create_app(slow.engine, slow.tokenizer, NAME, request_timeout=limit)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_lower_priorities_run_first_and_equals_by_arrival(path: str) -> None:
    ended: list[int] = []
    with (
        saying_server(delay=0.01, max_num_reqs=1) as server,
        ThreadPoolExecutor() as pool,
    ):

        def ask(number: int, priority: int) -> None:
            body = LONG if path == COMPLETIONS else CHAT_LONG
            answer = server.post(path, {**body, "max_tokens": 10, "priority": priority})
            assert answer.status_code == 200, answer.text
            ended.append(number)

        first = pool.submit(server.post, COMPLETIONS, LONG)
        server.until(lambda state: state.num_running == 1)
        asked = []
        for number, priority in enumerate([5, 0, 5, -3, 0]):
            asked.append(pool.submit(ask, number, priority))
            server.until(lambda state, count=number + 1: state.num_waiting == count)
        for one in (first, *asked):
            one.result(30)
        assert ended == [3, 1, 4, 0, 2]
        server.alive()
