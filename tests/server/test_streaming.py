"""Streams: joined, they are the whole answer; usage, endings and records where clients look."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.serving import NAME, Server, say

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ["Sunny day", "a🙂b👍🏽c 你好", "\n\n", "one. two. three."]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"max_tokens": 5},
    "stop": {"stop": ["two", "ny d", "👍"]},
    "ids": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    "sampled": {"temperature": 1.0, "seed": 11, "max_tokens": 9},
    "special": {"skip_special_tokens": False},
}


def chat_body(text: str, **options: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **options}


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the calls before."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def join_chat(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    text, records, ids, ends = "", [], [], []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["delta"].get("content", "")
                records += (choice["logprobs"] or {"content": []})["content"]
                ids += choice.get("token_ids", [])
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return {"text": text, "records": records, "ids": ids, "ends": ends}


@pytest.mark.parametrize("text", [*map(say, TEXTS), "free"])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_a_joined_chat_stream_is_the_whole_answer(server: Server, text: str, option: str) -> None:
    """A05, A07, A20, D34, record by record."""
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 20, **OPTIONS[option]}
    whole = server.post(CHAT, chat_body(text, **options)).json()
    events = server.stream(CHAT, chat_body(text, stream_options={"include_usage": True}, **options))
    joined, choice = join_chat(events), whole["choices"][0]
    assert joined["text"] == choice["message"]["content"]
    assert joined["records"] == choice["logprobs"]["content"]
    assert joined["ids"] == choice.get("token_ids", [])
    assert joined["ends"] == [choice["finish_reason"]]
    assert without_cached(events[-1]["usage"]) == without_cached(whole["usage"])
    assert len(joined["records"]) == whole["usage"]["completion_tokens"]
    assert events[-1]["emberline"] == whole["emberline"]


def test_the_train_of_chunks(server: Server) -> None:
    events = server.stream(
        CHAT, chat_body(say("hello"), stream_options={"include_usage": True}, logprobs=True)
    )
    first, *middle, end, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all(event["choices"][0]["finish_reason"] is None for event in [first, *middle])
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(event["usage"] is None for event in events[:-1])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    # A chunk a step: all its tokens and their records together.
    steps = 1 + usage["emberline"]["speculation"]["steps"]
    assert len(middle) <= steps
    assert sum(len(event["choices"][0]["logprobs"]["content"]) for event in middle) == 6


def test_no_usage_chunk_unless_asked(server: Server) -> None:
    for path, body in (
        (CHAT, chat_body(say("hi"))),
        (COMPLETIONS, {"prompt": say("hi"), "temperature": 0}),
    ):
        events = server.stream(path, body)
        assert all(event["choices"] and "usage" not in event for event in events)
        assert events[-1]["emberline"]["speculation"]["steps"] >= 0
        assert all("emberline" not in event for event in events[:-1])


def test_continuous_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(
        COMPLETIONS, {"prompt": say("hello"), "temperature": 0, "stream_options": options}
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(server.ids(say("hello")))}


def test_a_record_goes_out_before_its_text(server: Server) -> None:
    """A07: the parts of an emoji have records although their text must wait."""
    events = server.stream(CHAT, chat_body(say("🙂🙂🙂"), logprobs=True))
    seen = b""
    for count, event in enumerate(events, 1):
        choice = event["choices"][0]
        for record in (choice["logprobs"] or {"content": []})["content"]:
            seen += bytes(record["bytes"])
        shown = join_chat(events[:count])["text"]
        assert shown == seen.decode("utf-8", "ignore")


def test_choices_of_a_stream_end_each_once(server: Server) -> None:
    events = server.stream(
        CHAT, chat_body("free", n=3, temperature=1.2, seed=3, max_tokens=7, ignore_eos=True)
    )
    whole = server.post(
        CHAT, chat_body("free", n=3, temperature=1.2, seed=3, max_tokens=7, ignore_eos=True)
    ).json()
    for index in range(3):
        joined = join_chat(events, index)
        assert joined["ends"] == ["length"]
        assert joined["text"] == whole["choices"][index]["message"]["content"]
    assert [one["index"] for one in events[-1]["emberline"]["choices"]] == [0, 1, 2]


def test_prompt_ids_and_logprobs_come_first(server: Server) -> None:
    events = server.stream(CHAT, chat_body(say("hi"), return_token_ids=True, prompt_logprobs=0))
    assert len(events[0]["prompt_logprobs"]) == len(events[0]["prompt_token_ids"])
    assert all("prompt_token_ids" not in event for event in events[1:])
    events = server.stream(
        COMPLETIONS, {"prompt": say("hi"), "return_token_ids": True, "prompt_logprobs": 0}
    )
    assert events[0]["choices"][0]["prompt_token_ids"] == server.ids(say("hi"))
    assert len(events[0]["choices"][0]["prompt_logprobs"]) == len(server.ids(say("hi")))
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": say("Sunny 🙂")}],
        temperature=0,
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    text, count, usage = "", 0, None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            count += len(choice.logprobs.content) if choice.logprobs else 0
        usage = chunk.usage or usage
    assert (text, count) == ("Sunny 🙂", usage.completion_tokens)


def test_answers_are_the_same_side_by_side(server: Server) -> None:
    """B13: LEN with many at once, mixed options."""
    from concurrent.futures import ThreadPoolExecutor

    bodies = [
        chat_body(
            say("🙂ab." * (1 + i % 4)),
            max_tokens=1 + 5 * i % 13,
            logprobs=i % 3 != 0,
            **({"top_logprobs": i % 5} if i % 3 else {}),
            **({"stop": "b."} if i % 4 == 0 else {}),
        )
        for i in range(24)
    ]

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = server.post(CHAT, body).json()
        return {"choices": answer["choices"], "usage": without_cached(answer["usage"])}

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, bodies))
    for body, answer in zip(bodies, together, strict=True):
        if body["logprobs"]:
            records = answer["choices"][0]["logprobs"]["content"]
            assert len(records) == answer["usage"]["completion_tokens"]
        assert ask(body) == answer
    server.alive()
