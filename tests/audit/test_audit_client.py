"""Both dialects come out as the same records; what a server lacks or breaks is told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberline.audit import native_api
from emberline.audit.client import Broken, Refused, Server
from emberline.audit.outcome import Malformed, NotSupported
from emberline.audit.records import Answer, Ask
from emberline.audit.settings import AuditError, AuditSettings

from support.scripted_lm import VOCAB, ScriptedLM, ids_of, scripted_server, text

PROMPT = "Once upon"


def talk(lm: ScriptedLM, act: Callable[[Server], Awaitable[Any]], **settings: Any) -> Any:
    async def run(url: str) -> Any:
        async with Server(url, AuditSettings(url=url, **settings)) as server:
            await server.discover()
            return await act(server)

    with scripted_server(lm) as server:
        return asyncio.run(run(server.url))


def ask(**given: Any) -> Callable[[Server], Awaitable[Answer]]:
    async def act(server: Server) -> Answer:
        return await server.ask(Ask(**{"prompt": tuple(ids_of(PROMPT)), "max_tokens": 4, **given}))

    return act


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("score_prompt", [False, True])
def test_dialects_say_the_same(stream, score_prompt):
    given = {"stream": stream, "score_prompt": score_prompt and not stream, "score_ids": (3, 7)}
    openai = talk(ScriptedLM(), ask(**given), api="openai")
    native = talk(ScriptedLM(), ask(**given), api="native")
    grown = talk(ScriptedLM(cumulative=False), ask(**given), api="native")
    assert native == grown
    assert len(openai.records) == 4
    assert openai.ids == native.ids
    for one, other in zip(openai.records, native.records, strict=True):
        assert one.logprob == other.logprob
        assert other.top == one.top[: len(other.top)]
        assert one.chosen == other.chosen
        assert set(one.chosen) == {3, 7}
    assert [r.logprob for r in openai.prompt] == [r.logprob for r in native.prompt]
    if given["score_prompt"]:
        assert openai.prompt[0].logprob is None
        assert tuple(r.key for r in openai.prompt) == tuple(ids_of(PROMPT))
    assert openai.completion_tokens == native.completion_tokens == 4
    assert openai.text.endswith(native.text)  # behind the prompt where it is echoed
    assert openai.finish_reason == native.finish_reason == "length"
    assert native.events == ((1, 1, 1, 1) if stream else ())
    assert openai.events == ((4,) if stream else ())


def test_the_dialect_is_found():
    async def features(server: Server) -> Any:
        return server.features

    assert talk(ScriptedLM(), features).api == "openai"
    found = talk(ScriptedLM(native_only=True), features)
    assert (found.api, found.ids, found.dtype, found.block) == ("native", True, "float32", 2)
    assert not found.openai
    # Ids are worth more than a dialect: one that tells none is left for one that does.
    found = talk(ScriptedLM(faults={"no ids"}), features)
    assert (found.api, found.ids, found.openai) == ("native", True, True)


def test_what_a_server_lacks_is_found():
    async def act(server: Server) -> Any:
        reads = [
            await server.lacks("accept", "rejection", "nonsense"),
            await server.lacks("logprobs_mode", "processed", "nonsense"),
        ]
        with pytest.raises(NotSupported, match="token ids"):
            await server.token_ids("x")
        return server.features, reads

    features, reads = talk(ScriptedLM(openai_only=True, faults={"no ids"}), act)
    assert (features.ids, features.ignore_eos) == (False, True)
    assert all("unknown field" in why for why in reads)
    _, reads = talk(ScriptedLM(openai_only=True, faults={"no ids"}, lenient=True), act)
    assert all("passes over" in why for why in reads)
    refusing = ScriptedLM(openai_only=True, refuses={"ignore_eos", "return_tokens_as_token_ids"})
    features, _ = talk(refusing, act)
    assert (features.ids, features.ignore_eos) == (False, False)


def test_tokens_are_texts_where_ids_are_not_told():
    answer = talk(ScriptedLM(openai_only=True, faults={"no ids"}), ask())
    assert "".join(map(str, answer.keys)) == answer.text


@pytest.mark.parametrize(
    ("faults", "error", "words"),
    [({"NaN"}, Malformed, "NaN"), ({"crash"}, Broken, "500: out of order")],
)
def test_broken_answers(faults, error, words):
    async def act(server: Server) -> None:
        with pytest.raises(error, match=words):
            await server.ask(Ask(prompt=(1, 2), max_tokens=2, options={"logit_bias": {"1": 1}}))

    talk(ScriptedLM(faults=faults), act)


def test_a_refusal_quotes_the_server():
    async def act(server: Server) -> None:
        with pytest.raises(Refused, match="400: unknown field min_p"):
            await server.ask(Ask(prompt=(1, 2), max_tokens=2, options={"min_p": 0.1}))

    talk(ScriptedLM(), act)


def test_a_server_that_wants_a_key():
    with pytest.raises(AuditError, match="--api-key"):
        talk(ScriptedLM(faults={"key"}), ask())


@pytest.mark.parametrize("api", ["auto", "native"])
def test_a_model_that_is_not_there_is_not_replaced_by_another(api):
    for lm in (ScriptedLM(native_only=True), ScriptedLM(refuses={"model"})):
        with pytest.raises(AuditError, match=r"--model other: .* lists hash"):
            talk(lm, ask(), model="other", api=api)
        assert talk(ScriptedLM(native_only=True), ask(), model="hash", api=api).records


def test_the_native_dialect_names_the_model_that_was_given():
    sent = native_api.body(Ask(prompt="x", max_tokens=1), "hash", ignore_eos=False)
    assert sent["model"] == "hash"
    assert "model" not in native_api.body(Ask(prompt="x", max_tokens=1), None, ignore_eos=False)


def test_nobody_answers():
    async def run() -> None:
        url = "http://127.0.0.1:9"
        async with Server(url, AuditSettings(url=url)) as server:
            await server.discover()

    with pytest.raises(AuditError, match="does not answer"):
        asyncio.run(run())


def test_choices_and_their_texts():
    async def act(server: Server) -> list[Answer]:
        return await server.choices(
            Ask(prompt=(1, 2), max_tokens=3, temperature=1.0, seed=5, n=3, num_top=2)
        )

    for api in ("openai", "native"):
        found = talk(ScriptedLM(), act, api=api)
        assert len(found) == 3
        assert all(answer.text == text(answer.ids) for answer in found)
        assert all(0 <= i < VOCAB for answer in found for i in answer.ids)
