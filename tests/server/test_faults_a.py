"""Log-probabilities over HTTP: faults by their numbers in docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_completions import arrays, join

from support.serving import Server, say
from support.talking import HERMES, WEATHER, talking_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def entries(server: Server, **options: Any) -> list[dict[str, Any]]:
    answer = server.chat("free", logprobs=True, ignore_eos=True, **options)
    return answer["choices"][0]["logprobs"]["content"]


def test_each_route_has_its_own_shape(server: Server) -> None:
    """A03: chat has entries and completions have arrays, streamed or not; neither has both."""
    options = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "free"}], "logprobs": True, **options}
    chat["top_logprobs"] = 2
    completion = {"prompt": "free", "logprobs": 2, **options}
    for path, body, keys in (
        (CHAT, chat, {"content", "refusal"}),
        (COMPLETIONS, completion, {"tokens", "token_logprobs", "top_logprobs", "text_offset"}),
    ):
        whole = [server.post(path, body).json()]
        choices = [c for event in [*whole, *server.stream(path, body)] for c in event["choices"]]
        shapes = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert len(shapes) > 1
        assert all(set(shape) == keys for shape in shapes)
        for entry in [e for shape in shapes for e in shape.get("content", ())]:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert {frozenset(top) for top in entry["top_logprobs"]} == {
                frozenset(("token", "logprob", "bytes"))
            }


def test_alternatives_that_share_a_text_are_all_there(server: Server) -> None:
    """A06: parts of characters have one name, and each is an alternative of its own."""
    found = entries(server, top_logprobs=20, max_tokens=12, return_token_ids=True)
    shared = 0
    for entry in found:
        tops = entry["top_logprobs"]
        assert len({top["token_id"] for top in tops}) == len(tops) == 20
        shared += len({top["token"] for top in tops}) < 20
    assert shared > 0


@pytest.mark.parametrize("mode", ["raw", "processed", "both"])
def test_values_are_finite_where_a_grammar_leaves_one_token(server: Server, mode: str) -> None:
    """A12: `Server.chat` fails on NaN and Infinity."""
    schema = {"enum": ["sunny"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.chat(
        "free", response_format=wanted, logprobs=True, top_logprobs=20, logprobs_mode=mode
    )
    choice = answer["choices"][0]
    assert choice["message"]["content"] == '"sunny"'
    values = [t["logprob"] for e in choice["logprobs"]["content"] for t in e["top_logprobs"]]
    assert len(values) == 20 * answer["usage"]["completion_tokens"]
    assert all(-9999.0 <= value <= 0 for value in values)
    assert (min(values) == -9999.0) == (mode == "processed")


@pytest.fixture(scope="module")
def tools() -> Iterator[Server]:
    with talking_server(HERMES, num_drafts=4, wrong_every=3) as running:
        yield running


def test_one_wish_said_in_two_ways_has_one_answer(tools: Server) -> None:
    """A28: streamed with tools on one route, without on another."""
    body = {
        "messages": [{"role": "user", "content": "free"}],
        "tools": [WEATHER],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
        "return_token_ids": True,
    }
    events = tools.stream(CHAT, body)
    records = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    prompt = next(event["prompt_token_ids"] for event in events if "prompt_token_ids" in event)
    options = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    native = {"input_ids": prompt, "sampling_params": options, "return_logprob": True}
    meta = tools.stream("/generate", {**native, "top_logprobs_num": 3})[-1]["meta_info"]
    assert len(records) == 12
    assert [[r["logprob"], r["token_id"]] for r in records] == [
        entry[:2] for entry in meta["output_token_logprobs"]
    ]
    assert [[t["logprob"] for t in r["top_logprobs"]] for r in records] == [
        [top[0] for top in tops] for tops in meta["output_top_logprobs"]
    ]


def test_each_choice_of_each_prompt_has_its_own_values(server: Server) -> None:
    """A31: those that its prompt has alone."""
    prompts = [say("canary"), "free of it", say("ab") + "c", "x"]
    options = {"n": 2, "echo": True, "logprobs": 2, "temperature": 1, "seed": 3, "max_tokens": 6}
    together = server.complete(prompts, ignore_eos=True, **options)["choices"]
    assert [choice["index"] for choice in together] == list(range(8))
    for i, prompt in enumerate(prompts):
        alone = server.complete(prompt, ignore_eos=True, **options)["choices"]
        for mine, one in zip(together[2 * i : 2 * i + 2], alone, strict=True):
            assert mine["text"].startswith(prompt)
            assert mine | {"index": 0} == one | {"index": 0}


def test_text_that_is_held_back_takes_no_record_with_it(server: Server) -> None:
    """A36: tokens that might begin a stop string are recorded as they were drawn."""
    body = {"prompt": say("Sunny day, Sunny"), "temperature": 2.0, "seed": 4, "max_tokens": 30,
            "ignore_eos": True, "logprobs": 1}  # fmt: skip
    plain = server.complete(**body)["choices"][0]
    text = plain["text"]
    held = [text[i : i + 3] + "\x7f" for i in range(0, 30, 2) if text[i : i + 3].isascii()]
    assert len(held) > 3
    assert not any(stop in text for stop in held)
    with_stops = {**body, "stop": held[:16]}
    choice = server.complete(**with_stops)["choices"][0]
    assert choice == plain
    assert arrays(join(server.stream(COMPLETIONS, with_stops))) == arrays(plain)
    _, values, tops, _ = arrays(plain)
    assert any(value < max(top.values()) for value, top in zip(values, tops, strict=True))
