"""Chat answers: OpenAI's shapes through the official client, one record a token, raw bytes."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletion

from support.serving import NAME, Server, say

TEXTS = {
    "ascii": "Sunny day",
    "emoji": "a🙂b👍🏽c",
    "cjk": "你好,世界",
    "combining": "e\u0301 n\u0303",  # letters with combining marks
    "newline": "\n\nx",
}


def ask(client: openai.OpenAI, text: str, **options: object) -> ChatCompletion:
    return client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": say(text)}],
        temperature=0,
        **options,  # type: ignore[arg-type]
    )


def test_the_official_client_reads_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client, "hello")
    ChatCompletion.model_validate(answer.model_dump())
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.index) == ("chat.completion", NAME, 0)
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len("hello") + 1  # and EOS


def test_logprobs_without_top_logprobs_have_empty_alternatives(client: openai.OpenAI) -> None:
    """A01."""
    entries = ask(client, "hi", logprobs=True).choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["h", "i", "<eos>"]
    assert all(entry.top_logprobs == [] for entry in entries)


@pytest.mark.parametrize("name", list(TEXTS))
def test_one_record_a_token_and_bytes_join_to_the_text(client: openai.OpenAI, name: str) -> None:
    """A03, A07, A08, D34 and LEN."""
    answer = ask(client, TEXTS[name], logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert choice.message.content == TEXTS[name]
    assert choice.logprobs.refusal is None
    assert len(entries) == answer.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries) == TEXTS[name].encode()
    assert all(entry.token for entry in entries)


def test_alternatives_belong_to_their_own_step(client: openai.OpenAI) -> None:
    """A04, A06, A17: k of them, ordered, under 0, the greedy choice first with the same float."""
    entries = ask(client, "Sunny 🙂!", logprobs=True, top_logprobs=20).choices[0].logprobs.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0
        first = entry.top_logprobs[0]
        assert (first.token, first.logprob, first.bytes) == (
            entry.token,
            entry.logprob,
            entry.bytes,
        )


def test_eos_among_the_alternatives_is_named(client: openai.OpenAI) -> None:
    """A10."""
    last = ask(client, "x", logprobs=True, top_logprobs=5).choices[0].logprobs.content[-1]
    assert (last.token, last.bytes) == ("<eos>", [])
    assert "<eos>" in [top.token for top in last.top_logprobs]


def test_special_tokens_are_text_when_not_skipped(server: Server) -> None:
    answer = server.chat(say("x"), logprobs=True, skip_special_tokens=False)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "x<eos>"
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined == b"x<eos>"


def test_content_parts_roles_and_template_options(server: Server) -> None:
    parts = [{"type": "text", "text": "<say>a"}, {"type": "text", "text": "b</say>"}]
    assert server.chat(parts)["choices"][0]["message"]["content"] == "a\nb"
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": say("no")},
        {"role": "assistant", "content": "no", "refusal": None, "tool_calls": []},
        {"role": "user", "content": say("yes"), "name": None},
    ]
    body = {"messages": messages, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "yes"
    text = server.text.text_of(answer["prompt_token_ids"])
    assert text.startswith("<system>be brief<user><say>no</say><assistant>no<user>")
    body = {**body, "add_generation_prompt": False, "chat_template_kwargs": {"suffix": "!"}}
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()
    assert server.text.text_of(answer["prompt_token_ids"]).endswith("<user><say>yes</say>!")


def test_n_choices_in_order_with_one_prompt_count(server: Server) -> None:
    answer = server.chat(say("ab"), n=3, logprobs=True, temperature=1, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"ab"}
    alone = server.chat(say("ab"))["usage"]
    assert answer["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * alone["completion_tokens"]
    assert [one["index"] for one in answer["emberline"]["choices"]] == [0, 1, 2]


def test_choices_differ_and_repeat_with_a_seed(server: Server) -> None:
    """D30, C21: independent draws, the same set again with the same seed."""

    def texts(**options: object) -> list[str]:
        body = {"n": 6, "max_tokens": 6, "temperature": 1.1, "ignore_eos": True, **options}
        return [c["message"]["content"] for c in server.chat("free", **body)["choices"]]

    for accept in ("rejection", "coupled"):
        first = texts(seed=7, accept=accept)
        assert len(set(first)) >= 4
        assert texts(seed=7, accept=accept) == first
    assert len(set(texts())) >= 4


def test_default_temperature_samples(server: Server) -> None:
    """C27: top_k alone does not make it greedy."""
    body = {"messages": [{"role": "user", "content": "free"}], "top_k": 50, "max_tokens": 6}
    texts = {
        server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        for _ in range(8)
    }
    assert len(texts) >= 4


def test_the_default_limit_is_the_context(server: Server) -> None:
    answer = server.chat("free", ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", range(1, 13))
def test_the_cap_cuts_ids_records_and_usage_alike(server: Server, field: str, count: int) -> None:
    """B05, D37: inside a block, inside a character; an unfinished character is held back."""
    answer = server.chat(say("a🙂b👍"), logprobs=True, return_token_ids=True, **{field: count})
    choice = answer["choices"][0]
    full = "a🙂b👍".encode()
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == min(count, 11)
    assert answer["usage"]["completion_tokens"] == min(count, 11)
    assert choice["message"]["content"] == full[:count].decode("utf-8", "ignore")
    assert choice["finish_reason"] == ("length" if count < 11 else "stop")


def test_return_token_ids_and_id_names(server: Server) -> None:
    """A33: every alternative shows its own id."""
    answer = server.chat(
        say("hey"),
        logprobs=True,
        top_logprobs=3,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*server.ids("hey"), server.tokenizer.eos_token_id]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert (entry["token"], entry["token_id"]) == (f"token_id:{token_id}", token_id)
        tops = entry["top_logprobs"]
        assert len({top["token"] for top in tops}) == 3
        assert all(top["token"] == f"token_id:{top['token_id']}" for top in tops)


def test_chosen_ids_are_scored_at_every_position(server: Server) -> None:
    ids = server.ids("hz")
    answer = server.chat(say("hey"), logprobs=True, logprob_token_ids=ids)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [list(entry["token_id_logprobs"]) for entry in entries] == [list(map(str, ids))] * 4
    assert entries[0]["token_id_logprobs"][str(ids[0])] == entries[0]["logprob"]
    assert entries[1]["token_id_logprobs"][str(ids[0])] < -5


def test_prompt_logprobs_on_chat(server: Server) -> None:
    """A39."""
    answer = server.chat("hello", prompt_logprobs=1, max_tokens=1, return_token_ids=True)
    entries = answer["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert entries[0] is None
    for token_id, entry in zip(answer["prompt_token_ids"][1:], entries[1:], strict=True):
        own = entry[str(token_id)]
        assert own["logprob"] <= 0
        assert own["decoded_token"] == server.text.token_str(token_id)
        assert 1 in {one["rank"] for one in entry.values()}


def test_how_the_call_was_speculated_is_told(server: Server) -> None:
    """B08, E16: drafting goes on with logprobs, and the counts are exact."""
    for options in ({}, {"logprobs": True, "top_logprobs": 2}):
        stats = server.chat(say("a long enough answer"), **options)["emberline"]["speculation"]
        assert stats["accepted"] == sum(stats["accepted_per_position"])
        assert stats["verified"] == sum(stats["verified_per_position"])
        assert stats["emitted"] == 20  # the first of 21 tokens comes with the prompt
        assert stats["acceptance_length"] == stats["emitted"] / stats["steps"]
        if server.engine.max_draft_tokens:
            assert stats["acceptance_length"] > 1.5
    off = server.chat(say("a long enough answer"), speculate=False)["emberline"]["speculation"]
    assert (off["drafted"], off["steps"]) == (0, 20)  # E20


def test_harmless_fields_are_accepted(server: Server) -> None:
    answer = server.chat(
        say("ok"),
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        logit_bias={},
        stop=None,
        top_logprobs=None,
        n=1,
        model=NAME,
    )
    assert answer["choices"][0]["message"]["content"] == "ok"
