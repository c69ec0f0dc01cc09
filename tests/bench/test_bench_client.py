"""One request to servers of other shapes: what counts as an answer, and what as a failure."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest

from emberline.bench.client import Client, RequestRecord, request_body
from emberline.bench.prompts import Prompt
from emberline.bench.settings import RequestSettings, ServerSettings

from support.fake_server import (
    DONE,
    HANG_UP,
    Asked,
    Reply,
    chat_chunk,
    event,
    fake_server,
    json_reply,
    usage_chunk,
)

ANSWER = [chat_chunk("a"), chat_chunk("b", "stop"), usage_chunk(3, 2), DONE]


def ask(
    reply: Reply | Callable[[Asked], Reply], *, times: int = 1, timeout: float = 10.0
) -> list[RequestRecord]:
    """Send requests one after the other; the last argument's records."""

    async def run(url: str) -> list[RequestRecord]:
        client = Client(ServerSettings(base_url=url, timeout=timeout), keep_text=True)
        try:
            return [await client.send(b'{"prompt": "x"}', i) for i in range(times)]
        finally:
            client.close()

    with fake_server(reply if callable(reply) else lambda _asked: reply) as server:
        return asyncio.run(run(server.url))


def test_an_answer() -> None:
    [record] = ask(Reply(ANSWER))
    assert record.failure is None
    assert record.text == "ab"
    assert len(record.chunk_times) == 2
    assert (record.prompt_tokens, record.completion_tokens) == (3, 2)
    assert record.cached_tokens is None
    assert record.finish_reason == "stop"
    assert record.start <= record.sent <= record.chunk_times[0] <= record.end


def test_the_same_answer_however_its_bytes_are_cut() -> None:
    whole = b"".join(ANSWER)
    for size in (1, 5, 64):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        [record] = ask(Reply(parts))
        assert (record.text, record.completion_tokens, record.failure) == ("ab", 2, None)


def test_times_are_those_of_arrival() -> None:
    """The role and the usage are no output; what follows the finish_reason is no latency."""
    parts = [
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        0.15,
        chat_chunk("a"),
        0.25,
        chat_chunk("bc", "stop"),
        0.2,
        usage_chunk(3, 3),
        DONE,
    ]
    [record] = ask(Reply(parts))
    first, second = record.chunk_times
    assert first - record.start >= 0.15
    assert second - record.start >= 0.4
    assert second - first > 0.1
    assert record.end == second
    assert record.completion_tokens == 3


def test_output_without_content() -> None:
    """Reasoning, tool calls and records whose text is held back are tokens that have come."""
    deltas = [
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"reasoning": "hm"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"delta": {"content": ""}, "logprobs": {"content": [{"token": "x"}]}},
        {"delta": {"content": None}, "logprobs": None},
        {"text": "completions"},
        {"text": "", "logprobs": {"tokens": []}},
        {"text": "", "token_ids": [4]},
        {"delta": {}, "finish_reason": "stop"},
    ]
    [record] = ask(Reply([event({"choices": [delta]}) for delta in deltas]))
    assert record.failure is None
    assert len(record.chunk_times) == 6
    assert record.text == "hmhmcompletions"
    assert record.completion_tokens is None  # no usage: not guessed


def test_cached_tokens_and_acceptance() -> None:
    told = {"speculation": {"steps": 2, "emitted": 5, "verified": 8, "accepted": 3}}
    usage = {"prompt_tokens_details": {"cached_tokens": 64}}
    last = usage_chunk(100, 6, usage=usage, emberline=told)
    [record] = ask(Reply([chat_chunk("a", "stop"), last, DONE]))
    assert record.cached_tokens == 64
    assert record.acceptance is not None
    assert record.acceptance.length == 2.5
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    meta = {"meta_info": {"spec_verify_ct": 4, "completion_tokens": 12}}
    [record] = ask(Reply([chat_chunk("a"), event({"choices": [{**choice, **meta}]})]))
    assert record.acceptance is not None
    assert record.acceptance.length == 3.0


def overloaded(_asked: Asked) -> Reply:
    return json_reply({"error": {"message": "the queue\nis full", "type": "rate_limit"}}, 429)


FAILURES = {
    "status": (overloaded, "http_429", "the queue is full"),
    "plain text": (Reply([b"<html>oops</html>"], 502, "text/html"), "http_502", "oops"),
    "empty": (Reply([], 503, "text/plain"), "http_503", "(empty body)"),
    "redirect": (Reply([], 307), "http_307", "(empty body)"),
    "error event": (
        Reply([chat_chunk("a"), event({"error": {"message": "gave up"}}), DONE]),
        "error_event",
        "gave up",
    ),
    "no json": (Reply([event("{oops")]), "bad_event", "{oops"),
    "no object": (Reply([event([1])]), "bad_event", "[1]"),
    "no choice": (Reply([event({"choices": [5]})]), "bad_event", "5"),
    "not streamed": (
        json_reply({"choices": [{"message": {"content": "x"}}]}),
        "not_a_stream",
        "without an event stream",
    ),
    "unfinished": (Reply([chat_chunk("a"), DONE]), "unfinished", "finish_reason"),
    "aborted": (Reply([chat_chunk("a"), chat_chunk(finish="abort"), DONE]), "aborted", "whole"),
    "cut": (Reply([chat_chunk("a"), HANG_UP]), "disconnected", "before the answer"),
    "no answer": (Reply(raw=b""), "disconnected", "before the answer"),
    "no http": (Reply(raw=b"SSH-2.0-OpenSSH\r\n\r\n"), "protocol", "not HTTP/1.1"),
    "slow": (Reply([chat_chunk("a"), 5.0, chat_chunk("b", "stop")]), "timeout", "within 0.3 s"),
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_failures_have_a_kind_and_the_servers_words(name: str) -> None:
    reply, kind, message = FAILURES[name]
    [record] = ask(reply, timeout=0.3 if name == "slow" else 10.0)  # type: ignore[arg-type]
    assert record.failure is not None
    assert record.failure.kind == kind
    assert message in record.failure.message
    assert "\n" not in record.failure.message


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = Client(ServerSettings(base_url=f"http://127.0.0.1:{port}"))
    record = asyncio.run(client.send(b"{}"))
    assert record.failure is not None
    assert record.failure.kind == "connect"


def test_connections_are_kept_and_given_up_as_the_server_says() -> None:
    def run(reply: Reply) -> int:
        with fake_server(lambda _asked: reply) as server:

            async def several() -> None:
                client = Client(ServerSettings(base_url=server.url))
                for _ in range(3):
                    assert (await client.send(b"{}")).failure is None
                client.close()

            asyncio.run(several())
            assert len(server.posts) == 3
            return server.connections

    assert run(Reply(ANSWER)) == 1
    assert run(Reply(ANSWER, keep_alive=False)) == 3


def test_a_kept_connection_that_was_closed_meanwhile_costs_no_request() -> None:
    asked: list[Asked] = []

    def answer(request: Asked) -> Reply:
        asked.append(request)
        # The second request meets a connection that the server gives up without a word.
        return Reply(raw=b"") if len(asked) == 2 else Reply(ANSWER)

    records = ask(answer, times=2)
    assert [record.failure for record in records] == [None, None]
    assert len(asked) == 3


def test_a_failure_leaves_no_bytes_for_the_next_request() -> None:
    replies = iter([Reply([chat_chunk("a"), 0.6, chat_chunk("late", "stop")]), Reply(ANSWER)])
    first, second = ask(lambda _asked: next(replies), times=2, timeout=0.3)
    assert first.failure is not None
    assert (second.failure, second.text) == (None, "ab")


def body(prompt: Prompt, asked: RequestSettings, **server: str) -> dict[str, object]:
    settings = ServerSettings(**server)  # type: ignore[arg-type]
    return json.loads(request_body(prompt, settings, asked, "m"))


def test_bodies() -> None:
    asked = RequestSettings(
        max_tokens=9, temperature=0.5, seed=3, ignore_eos=True, logprobs=2,
        extra_body={"speculate": False, "temperature": 0.7},
    )  # fmt: skip
    common = {
        "model": "m", "temperature": 0.7, "stream": True, "stream_options": {"include_usage": True},
        "seed": 3, "ignore_eos": True, "speculate": False,
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    assert body(Prompt("x"), asked) == {**common, **chat, "max_tokens": 9}
    found = body(Prompt((4, 5), max_tokens=2), asked, endpoint="completions")
    assert found == {**common, "prompt": [4, 5], "logprobs": 2, "max_tokens": 2}
    plain = body(Prompt("x"), RequestSettings())
    assert not {"seed", "ignore_eos", "logprobs", "top_logprobs"} & set(plain)


def test_headers_and_key_are_sent() -> None:
    with fake_server(lambda _asked: Reply(ANSWER)) as server:
        client = Client(
            ServerSettings(base_url=server.url, api_key="k", headers=(("X-Tenant", "t"),))
        )

        async def run() -> None:
            assert (await client.send(b"{}")).failure is None
            client.close()

        asyncio.run(run())
        [asked] = server.posts
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer k"
    assert asked.headers["x-tenant"] == "t"
    assert asked.headers["content-type"] == "application/json"
