"""Completions: four parallel arrays, echo, offsets, many prompts, stops."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import openai
import pytest
from openai.types import Completion

from support.serving import NAME, Server, say, saying_server


def arrays(choice: dict[str, Any]) -> tuple[list[Any], ...]:
    logprobs = choice["logprobs"]
    found = tuple(
        logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert len(set(map(len, found))) == 1
    return found


def test_the_official_client_reads_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=say("hello"), temperature=0, logprobs=2)
    Completion.model_validate(answer.model_dump())
    choice = answer.choices[0]
    assert (answer.object, choice.text, choice.finish_reason) == (
        "text_completion",
        "hello",
        "stop",
    )
    assert choice.logprobs.tokens == [*"hello", "<eos>"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("asked", "width"), [(0, 1), (1, 1), (5, 5), (True, 1), (40, 40)])
def test_the_chosen_token_is_among_the_alternatives(server: Server, asked: int, width: int) -> None:
    """A18, and the identical float that likelihood harnesses compare."""
    choice = server.complete(say("hey"), logprobs=asked)["choices"][0]
    tokens, values, tops, _ = arrays(choice)
    for token, value, top in zip(tokens, values, tops, strict=True):
        assert top[token] == value == max(top.values())
        assert 1 <= len(top) <= width  # two ids of one text share an entry
    assert server.complete(say("hey"))["choices"][0]["logprobs"] is None
    assert server.complete(say("hey"), logprobs=False)["choices"][0]["logprobs"] is None


def test_a_sampled_token_outside_the_best_is_added(server: Server) -> None:
    choice = server.complete(
        "free", logprobs=1, temperature=3.0, seed=3, max_tokens=30, ignore_eos=True
    )["choices"][0]
    tokens, values, tops, _ = arrays(choice)
    assert any(len(top) == 2 for top in tops)
    assert all(top[token] >= value for token, value, top in zip(tokens, values, tops, strict=True))


@pytest.mark.parametrize("prompt", ["plain text", "Sunny 🙂 ü", "a the\n\nb"])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt_and_offsets_rebuild_the_text(
    server: Server, prompt: str, max_tokens: int, stream: bool
) -> None:
    """A19, A22, D08."""
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "ignore_eos": True}
    if stream:
        events = server.stream("/v1/completions", {"prompt": prompt, "temperature": 0, **body})
        choice = join(events)
    else:
        choice = server.complete(prompt, **body)["choices"][0]
    tokens, values, tops, offsets = arrays(choice)
    num_prompt = len(server.ids(prompt))
    text = choice["text"]
    assert text.startswith(prompt)
    assert len(tokens) == num_prompt + max_tokens
    assert (values[0], tops[0]) == (None, None)
    assert all(value <= 0 for value in values[1:])
    for token, value, top in zip(tokens[1:], values[1:], tops[1:], strict=True):
        # Several parts of characters share one name; the entry then holds the best of them.
        assert top[token] == value or ("\ufffd" in token and top[token] > value)
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert text[offset : offset + len(token)] == token
    if max_tokens == 0:
        assert (text, choice["finish_reason"]) == (prompt, "length")


def join(events: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice from the chunks of a stream."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    joined: dict[str, Any] = {"text": "", "logprobs": {name: [] for name in names}}
    for event in events:
        for choice in event["choices"]:
            joined["text"] += choice["text"]
            for name in names if choice["logprobs"] else ():
                joined["logprobs"][name] += choice["logprobs"][name]
            joined["finish_reason"] = choice["finish_reason"]
    return joined


def test_echo_without_logprobs_and_of_ids(server: Server) -> None:
    ids = [*server.ids(say("yes") + " "), server.tokenizer.eos_token_id]
    choice = server.complete(ids, echo=True, max_tokens=2)["choices"][0]
    assert choice["text"].startswith("yes ")  # special ids add no text
    choice = server.complete(ids, echo=True, max_tokens=0, skip_special_tokens=False)["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("<say>yes</say> <eos>", None)
    choice = server.complete(say("yes"), echo=True)["choices"][0]
    assert choice["text"] == "<say>yes</say>yes"  # a text is echoed as it was written


@pytest.mark.parametrize("form", ["texts", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_prompt_major(server: Server, form: str, stream: bool) -> None:
    """A31."""
    words = ["one", "two", "three"]
    prompts: list[Any] = [say(word) for word in words]
    if form == "ids":
        prompts = [server.ids(prompt) for prompt in prompts]
    body = {"n": 2, "logprobs": 1, "echo": True, "max_tokens": 8, "temperature": 1, "seed": 1}
    if stream:
        events = server.stream("/v1/completions", {"prompt": prompts, **body})
        texts = [""] * 6
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        answer = server.complete(prompts, **body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        texts = [choice["text"] for choice in answer["choices"]]
        for i, choice in enumerate(answer["choices"]):
            word = words[i // 2]
            assert len(arrays(choice)[0]) == len(server.ids(say(word))) + len(word) + 1
        assert answer["usage"]["prompt_tokens"] == sum(len(server.ids(say(w))) for w in words)
    shown = "<say>{0}</say>{0}" if form == "texts" else "{0}{0}"
    assert texts == [shown.format(word) for word in words for _ in range(2)]


def test_a_batch_answers_as_its_prompts_alone(server: Server) -> None:
    """A29, B16: with and without logprobs, different lengths."""
    prompts = [say("x" * length) + "!" for length in (1, 9, 3, 14, 6)]
    together = server.complete(prompts, logprobs=2, max_tokens=12)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        alone = server.complete(prompt, logprobs=2, max_tokens=12)["choices"][0]
        assert alone | {"index": 0} == choice | {"index": 0}


STOPS = [
    (["\n"], "\nab", "", 1),  # A37: the very first token completes it
    (["ny"], "Sunny day", "Sun", 2),
    (["nn"], "Sunny day", "Su", 2),  # inside two tokens
    (["Sunnyqq"], "Sunny day", "Sunny day", 6),  # A36: begins, never completes
    (["🙂"], "a🙂b", "a", 5),
    (["y d", "day"], "Sunny day", "Sunn", 4),
    (["xyz", "b"], "abc", "a", 2),
]


@pytest.mark.parametrize(("stop", "says", "text", "count"), STOPS)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_the_text_and_records_stay_whole(
    server: Server, stop: list[str], says: str, text: str, count: int, include: bool
) -> None:
    """A36, A37 and LEN: tokens that complete a stop string are counted and reported."""
    body = {"stop": stop, "logprobs": 1, "include_stop_str_in_output": include, "max_tokens": 30}
    answer = server.complete(say(says), return_token_ids=True, **body)
    choice = answer["choices"][0]
    found = next((s for s in stop if s in says), None)
    assert choice["text"] == (text + found if include and found else text)
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (found if found != "day" else "y d")
    count = count if found else count + 1  # EOS
    assert len(arrays(choice)[0]) == len(choice["token_ids"]) == count
    assert answer["usage"]["completion_tokens"] == count
    events = server.stream("/v1/completions", {"prompt": say(says), "temperature": 0, **body})
    joined = join(events)
    assert joined["text"] == choice["text"]
    assert arrays(joined) == arrays(choice)


def test_min_tokens_outlasts_eos_and_stop_strings(server: Server) -> None:
    """C11, C17."""
    for least in range(1, 9):
        answer = server.complete(say("ab"), min_tokens=least, max_tokens=12)
        assert answer["usage"]["completion_tokens"] >= max(least, 3)
        answer = server.complete(say("a.b.c.d.e."), min_tokens=least, stop=".", max_tokens=12)
        expected = least if least % 2 == 0 else least + 1
        assert answer["usage"]["completion_tokens"] == expected


def test_a_stop_id_ends_the_text_before_it(server: Server) -> None:
    letter = server.ids("c")[0]
    for include, text in ((False, "ab"), (True, "abc")):
        answer = server.complete(
            say("abcd"),
            stop_token_ids=[letter],
            include_stop_str_in_output=include,
            logprobs=0,
        )
        choice = answer["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (text, letter)
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]


def test_logit_bias_forbids_a_token_everywhere(server: Server) -> None:
    """C14, B07: never emitted, while raw logprobs stay what they were."""
    plain = server.complete("free", max_tokens=20, ignore_eos=True, return_token_ids=True)
    banned = plain["choices"][0]["token_ids"][2]
    answer = server.complete(
        "free", max_tokens=60, ignore_eos=True, return_token_ids=True,
        logit_bias={str(banned): -100}, logprobs=5,
    )  # fmt: skip
    choice = answer["choices"][0]
    assert banned not in choice["token_ids"]
    # At the first place where the ban matters the raw list still names the banned token first.
    assert next(iter(choice["logprobs"]["top_logprobs"][2])) == server.text.token_str(banned)


def test_greedy_logprobs_are_the_models_own(server: Server) -> None:
    """A15, A24, B01, B03: against the target itself, for prompt and answer."""
    answer = server.complete(
        "abc", echo=True, logprobs=2, max_tokens=25, ignore_eos=True, return_token_ids=True
    )
    choice = answer["choices"][0]
    ids = server.ids("abc") + choice["token_ids"]
    for position in range(1, len(ids)):
        own = server.target.logits_after(ids[:position]).log_softmax(-1)
        value = choice["logprobs"]["token_logprobs"][position]
        assert value == pytest.approx(float(own[ids[position]]), abs=1e-5)


def test_top_p_and_top_k_leave_raw_logprobs_alone(server: Server) -> None:
    """A12, A14: raw is raw; processed has the floor for what cannot be drawn."""
    body = {"prompt": "free", "max_tokens": 1, "logprobs": 5, "temperature": 0}
    raw = [
        server.complete(**body | more)["choices"][0]["logprobs"]
        for more in ({}, {"top_p": 0.1}, {"top_k": 1}, {"top_p": 0.5, "min_p": 0.9})
    ]
    assert all(one == raw[0] for one in raw)
    sampled = {"temperature": 1, "top_k": 1, "logprobs_mode": "processed"}
    processed = server.complete(**body | sampled)
    [values] = processed["choices"][0]["logprobs"]["top_logprobs"]
    assert sorted(values.values(), reverse=True)[0] == 0.0
    assert min(values.values()) == -9999.0


def test_prompt_logprobs_from_a_start(server: Server) -> None:
    """A41."""
    prompt = "abcdefgh"
    whole = server.complete(prompt, max_tokens=0, prompt_logprobs=2)["choices"][0]
    for start in (0, 1, 3, 7):
        part = server.complete(
            prompt, max_tokens=0, prompt_logprobs=2, prompt_logprobs_start=start
        )["choices"][0]["prompt_logprobs"]
        first = max(start, 1)
        assert part[:first] == [None] * first
        assert part[first:] == whole["prompt_logprobs"][first:]


def test_offsets_are_running_lengths(server: Server) -> None:
    tokens, _, _, offsets = arrays(server.complete(say("Sunny the"), logprobs=0)["choices"][0])
    assert offsets == list(accumulate(map(len, tokens[:-1]), initial=0))


def test_best_of_and_default_limit(server: Server) -> None:
    assert server.complete(say("x"), best_of=1)["choices"][0]["text"] == "x"
    assert len(server.complete(say("x"), best_of=2, n=2)["choices"]) == 2
    answer = server.complete("free", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    # The default fits what the context has left.
    answer = server.complete(server.ids("a") * 250, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 6


def test_default_limits_fit_the_kv_cache() -> None:
    """It holds less than the context here, and the client named no limit that could be too high."""
    with saying_server(num_pages=40) as server:
        room = server.engine.max_request_tokens
        assert room < server.engine.max_model_len
        prompt = server.ids("a") * (room - 5)
        answer = server.complete(prompt, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 5
        options = {"ignore_eos": True}
        reply = server.post("/generate", {"input_ids": prompt, "sampling_params": options})
        assert reply.json()["meta_info"]["completion_tokens"] == 5


def test_answers_that_end_at_the_context_limit(server: Server) -> None:
    """D27: the same with every drafter; a block never runs past the limit."""
    letter = server.ids("a")
    for length in range(249, 256):
        for limit in ({}, {"max_tokens": 256 - length}):
            answer = server.complete(letter * length, ignore_eos=True, **limit)
            assert answer["usage"]["total_tokens"] == 256
            assert answer["choices"][0]["finish_reason"] == "length"
    server.alive()
