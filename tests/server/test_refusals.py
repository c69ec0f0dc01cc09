"""What cannot be answered is refused at once, by name, in OpenAI's shape; the server lives on."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from support.serving import NAME, Server, saying_server, strict

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**7
V = 270  # the served vocabulary, padding included


def refused(
    server: Server, path: str, body: object, param: str | None = None, status: int = 400
) -> dict[str, Any]:
    began = time.monotonic()
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    assert time.monotonic() - began < 2
    error = strict(answer.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One setting: what is refused is refused before any drafter is asked."""
    with saying_server(num_drafts=4, wrong_every=3) as running:
        yield running


BOTH = [
    ("temperature", -1),  # D11
    ("temperature", 1e7),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", -0.5),
    ("top_p", 0),
    ("top_p", 3),
    ("top_k", -9),
    ("top_k", 2.5),
    ("min_p", 2),
    ("seed", 2**70),
    ("seed", "x"),
    ("n", HUGE),  # D02
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 1.0),
    ("logit_bias", {"999999999": 5}),  # D04
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"a": 5}),
    ("logit_bias", {"9" * 5000: 5}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {str(V): 1}),
    ("stop_token_ids", [V + 5]),  # D06
    ("stop", ""),  # D32
    ("stop", [""]),
    ("stop", ["", " x"]),
    ("stop", ["x"] * 100),
    ("frequency_penalty", 9),
    ("presence_penalty", "1"),
    ("repetition_penalty", 0),
    ("min_tokens", -1),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", V + 1),
    ("prompt_logprobs_start", 1),
    ("logprob_token_ids", [1]),
    ("logprobs_mode", "cooked"),
    ("accept", "maybe"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("tool_choice", "auto"),
    ("unheard_of", 1),
    (
        "response_format",  # D13
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}},
    ),
    ("guided_json", {"$ref": "#/no"}),
    ("guided_json", "x" * 2**20),
    ("guided_regex", "["),
    ("priority", 0.5),
    ("priority", "1"),
    ("priority", 2**31),
    ("priority", -(2**31) - 1),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", "1"),
    ("timeout", True),
    ("timeout", 1e9),
]


@pytest.mark.parametrize(("name", "value"), BOTH, ids=[f"{n}={v!r:.20}" for n, v in BOTH])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_without_a_meaning(server: Server, path: str, name: str, value: object) -> None:
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    refused(server, path, {**body, name: value}, name)
    if name not in ("stream", "stream_options"):
        refused(server, path, {**body, "stream": True, name: value}, name)


@pytest.mark.parametrize("value", [HUGE, 21, V, V + 1, -1, 2.5, "5", True])
def test_top_logprobs_out_of_range(server: Server, value: object) -> None:
    """D01, D15."""
    refused(server, CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": value},
            "top_logprobs")  # fmt: skip


@pytest.mark.parametrize("value", [HUGE, V + 1, -2, 2.5, "5", [1]])
def test_logprobs_out_of_range(server: Server, value: object) -> None:
    refused(server, COMPLETIONS, {"prompt": "x", "logprobs": value}, "logprobs")


CHAT_ONLY = [
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": []}, "messages"),  # D07
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "unwanted"}]}, "messages"),  # the template refuses
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "y"}]},
        "messages[0].tool_call_id",
    ),
    (  # the template shows none of these
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "y"}]},
        "messages[0].reasoning",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]},
        "messages[0].reasoning_content",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, None),
]


@pytest.mark.parametrize(("more", "param"), CHAT_ONLY)
def test_chat_refusals(server: Server, more: dict[str, Any], param: str | None) -> None:
    refused(server, CHAT, {"messages": MESSAGES, **more}, param)


def test_images_are_refused_by_name(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:x"}}
    text = {"type": "text", "text": "look"}
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": [text, part]}]})
    assert error["param"] == "messages[0].content[1].type"
    assert error["message"].endswith("only text parts are supported, not 'image_url'")


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (5, "messages[0].content"),
        (None, "messages[0].content"),
        ([5], "messages[0].content[0]"),
        ([{"text": "x"}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "text", "text": "x", "more": 1}], "messages[0].content[0].more"),
    ],
)
def test_contents_are_named_as_they_were_sent(server: Server, content: object, param: str) -> None:
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": content}]}, param)
    assert "TextPart" not in error["message"]
    assert ("may not be null" in error["message"]) == (content is None)


def test_a_null_prompt_is_named_so(server: Server) -> None:
    error = refused(server, COMPLETIONS, {"prompt": None}, "prompt")
    assert "may not be null" in error["message"]
    assert "may not be null" not in refused(server, COMPLETIONS, {}, "prompt")["message"]


@pytest.mark.parametrize(
    "name",
    [
        "messages", "conversation", "conversations", "self", "tools", "documents", "chat_template",
        "add_generation_prompt", "continue_final_message", "tokenize", "kwargs",
    ],
)  # fmt: skip
def test_template_arguments_that_are_taken(server: Server, name: str) -> None:
    error = refused(
        server, CHAT, {"messages": MESSAGES, "chat_template_kwargs": {name: None}},
        "chat_template_kwargs",
    )  # fmt: skip
    assert error["message"] == f"chat_template_kwargs may not set {name}"


def test_who_made_the_template_fail_is_named(server: Server) -> None:
    # The template calls this name: what is no function makes the library raise.
    broken = {"chat_template_kwargs": {"raise_exception": 1}}
    said = [{"role": "user", "content": "unwanted"}]
    error = refused(server, CHAT, {"messages": said}, "messages")
    assert error["message"].endswith("refused these messages: not here")
    error = refused(server, CHAT, {"messages": said, **broken}, "messages")
    assert error["message"].endswith("refused these messages")


COMPLETION_ONLY = [
    ({"prompt": ""}, "prompt"),  # D07
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [["x"]]}, "prompt"),
    ({"prompt": ["x", 1]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [V]}, "prompt"),  # D03
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [2**65]}, "prompt"),
    ({"prompt": [[1], [V]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["x"] * 200, "n": 2}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),  # without echo
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs_start": 1}, "prompt_logprobs_start"),
    ({"prompt": "abc", "prompt_logprobs": 1, "prompt_logprobs_start": 3}, "prompt_logprobs_start"),
    ({"prompt": "x" * 500}, "prompt"),
]


@pytest.mark.parametrize(("more", "param"), COMPLETION_ONLY)
def test_completion_refusals(server: Server, more: dict[str, Any], param: str) -> None:
    refused(server, COMPLETIONS, {"prompt": "x", **more}, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [0, -1, 10**6])
def test_a_limit_is_named_as_it_was_sent(server: Server, value: int, stream: bool) -> None:
    names = {"max_tokens", "max_completion_tokens"}
    for name in names:
        error = refused(server, CHAT, {"messages": MESSAGES, name: value, "stream": stream}, name)
        assert {one for one in names if one in error["message"]} == {name}
    both = {"max_tokens": value, "max_completion_tokens": value, "stream": stream}
    refused(server, CHAT, {"messages": MESSAGES, **both}, "max_tokens")


def test_which_prompt_of_several_is_refused(server: Server) -> None:
    for wrong, reason in (("", "empty"), ("x" * 500, "tokens"), ([V], "outside")):
        prompts = [[1], wrong] if isinstance(wrong, list) else ["x", wrong]
        error = refused(server, COMPLETIONS, {"prompt": prompts}, "prompt")
        assert reason in error["message"]
        assert error["message"].endswith("(number 2 of 2)")
    assert "number" not in refused(server, COMPLETIONS, {"prompt": ""}, "prompt")["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "metadata": {"a": NaN}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"',
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_no_strict_json(server: Server, body: bytes) -> None:
    """D11, raw."""
    refused(server, COMPLETIONS, body)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"prompt": "x", "prompt": "y"}', "prompt"),
        (b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}', "logit_bias"),
        (
            b'{"prompt": "x", "stream_options": {"a": [{"b": 1, "c": 2, "b": 3}]}}',
            "stream_options.a[0]",
        ),
        (b'{"prompt": "x", "\\u006e": 1, "n": 1}', "n"),
    ],
)
def test_a_key_that_is_given_twice(server: Server, body: bytes, key: str) -> None:
    assert refused(server, COMPLETIONS, body, key)["code"] == "duplicate_key"


def test_reasons_are_in_words_of_our_own(server: Server) -> None:
    message = refused(server, COMPLETIONS, {"prompt": [1, "x"]}, "prompt")["message"]
    assert message.startswith("prompt: must be a text, a list of texts")
    body = {"prompt": "x", "prompt_logprobs": -2}
    message = refused(server, COMPLETIONS, body, "prompt_logprobs")["message"]
    assert "at least 0, or -1" in message


def test_one_id_that_is_biased_twice(server: Server) -> None:
    body = {"prompt": "x", "logit_bias": {"05": 1, "5": 2}}
    assert "5 twice" in refused(server, COMPLETIONS, body, "logit_bias")["message"]
    server.complete("x", max_tokens=1, logit_bias={"05": 1})


def test_a_text_that_cannot_fit_is_never_tokenised(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = type(server.tokenizer).__call__

    def counting(self: object, text: str, **options: object) -> object:
        calls.append(len(text))
        return encode(self, text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(server.tokenizer), "__call__", counting)
    fits = len("<assistant>") * 256  # the longest token, as often as the context lets it
    for prompt, size in (("x" * 5000, 5000), (["x", "x" * 5000], 5000), ("é" * 4500, 9000)):
        error = refused(server, COMPLETIONS, {"prompt": prompt}, "prompt")
        assert f"has {size} bytes" in error["message"]
    messages = [{"role": "user", "content": "x" * 5000}]
    assert "cannot fit" in refused(server, CHAT, {"messages": messages}, "messages")["message"]
    assert all(call == 1 for call in calls)
    assert f"{fits} tokens" in refused(server, COMPLETIONS, {"prompt": "x" * fits})["message"]
    scored = {"max_tokens": 0, "echo": True}
    assert server.complete("<assistant>" * 256, **scored)["usage"]["prompt_tokens"] == 256


def test_a_body_that_is_announced_too_large_is_not_waited_for(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**26 + 1}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"too_large"' in answer
    server.alive()


def test_lengths_at_the_context_limit(server: Server) -> None:
    """D27: the last that fits is answered, one more is refused with the lengths."""
    letter = server.ids("a")
    for length in range(253, 258):
        for count in (1, 5):
            body = {"prompt": letter * length, "max_tokens": count, "ignore_eos": True}
            answer = server.post(COMPLETIONS, body)
            if length + count <= 256:
                assert answer.json()["usage"]["total_tokens"] == length + count
            else:
                error = refused(server, COMPLETIONS, body)
                assert "256" in error["message"]
                assert str(length) in error["message"]
    scored = {"prompt": letter * 256, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = server.post(COMPLETIONS, scored).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 256


def test_routes_models_and_methods(server: Server) -> None:
    refused(server, "/v1/embeddings", {}, status=404)
    refused(server, "/v1/models", {}, status=405)
    refused(server, CHAT + "/", {"messages": MESSAGES}, status=404)  # not an empty redirection
    error = refused(server, CHAT, {"messages": MESSAGES, "model": "gpt"}, "model", 404)
    assert error["code"] == "model_not_found"
    assert server.get("/v1/models/other").status_code == 404
    assert server.post(CHAT, {"messages": MESSAGES, "model": NAME, "max_tokens": 1}).is_success


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=NAME, messages=MESSAGES, n=129)
    assert refusal.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_the_server_lives_on(server: Server) -> None:
    """LIVE, after everything above."""
    server.alive()


def test_a_refused_call_leaves_its_neighbours_alone(server: Server) -> None:
    """D06: one bad prompt refuses the call; others run on as if alone."""
    expected = server.complete("free", max_tokens=12, ignore_eos=True)["choices"]
    refused(server, COMPLETIONS, {"prompt": ["free"] * 7 + ["x" * 400], "max_tokens": 200})
    assert server.complete("free", max_tokens=12, ignore_eos=True)["choices"] == expected
    server.alive()


def test_a_full_queue_says_when_to_come_back() -> None:
    with (
        saying_server(delay=0.02, max_num_reqs=1, max_queue=2) as server,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": "free", "max_tokens": 100, "ignore_eos": True}
        busy = [pool.submit(server.post, COMPLETIONS, body)]
        server.until(lambda state: state.num_running == 1)
        busy += [pool.submit(server.post, COMPLETIONS, body) for _ in range(2)]
        server.until(lambda state: state.num_waiting == 2)
        for more in ({}, {"stream": True}, {"n": 2}):
            answer = server.post(COMPLETIONS, {**body, **more})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert "queue of 2 requests is full" in error["message"]
            assert f"in {answer.headers['retry-after']} s" in error["message"]
        assert all(one.result(20).status_code == 200 for one in busy)
        server.alive()


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "n": 5}, "n"),
        (COMPLETIONS, {"prompt": ["x", "y", "z", "x", "y"]}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "y", "z"], "n": 2}, "prompt"),
        (CHAT, {"messages": MESSAGES, "n": 5}, "n"),
    ],
)
def test_a_call_that_the_queue_could_never_hold_is_refused(
    small_queue: Server, path: str, more: dict[str, Any], param: str
) -> None:
    error = refused(small_queue, path, {"max_tokens": 1, **more}, param)
    assert "a call may have 4, the length of the queue" in error["message"]
    refused(small_queue, path, {"max_tokens": 1, "stream": True, **more}, param)


def test_a_call_that_just_fits_the_queue_is_taken_whole(small_queue: Server) -> None:
    for _ in range(20):  # whatever the engine is doing when the choices arrive
        assert len(small_queue.complete("x", n=4, max_tokens=1)["choices"]) == 4


@pytest.fixture(scope="module")
def small_queue() -> Iterator[Server]:
    with saying_server(max_num_reqs=8, max_queue=4) as running:
        yield running
        running.alive()
