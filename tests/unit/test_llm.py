"""The offline front door refuses what it would otherwise misread. No model is loaded."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import get_args

import numpy as np
import pytest
import torch

from emberline.encoding import FIELDS, ROLES, chat_ids, encode, encode_pairs, encode_prediction
from emberline.llm import LLM
from emberline.server.chat_body import Message as ServerMessage
from emberline.types import FinishReason, InvalidRequest, SamplingParams

from support.engines import make_engine
from support.paged import PrefixDrafter, PrefixTarget
from support.serving import make_tokenizer


@pytest.fixture
def llm():
    llm = LLM.__new__(LLM)  # nothing may be touched before the refusal
    llm.tokenizer = None
    return llm


@pytest.mark.parametrize(("verb", "param"), [("generate", "prompts"), ("score", "texts")])
@pytest.mark.parametrize("text", ["Hello", ""])
def test_a_lone_string_is_not_a_list_of_prompts(llm, verb, param, text):
    with pytest.raises(InvalidRequest, match="wrap one") as caught:
        getattr(llm, verb)(text)
    assert caught.value.param == param


@pytest.mark.parametrize("prompts", [None, 5, iter(["a"])])
def test_prompts_are_a_list(llm, prompts):
    with pytest.raises(InvalidRequest, match="wrap one") as caught:
        llm.generate(prompts)
    assert caught.value.param == "prompts"


def test_prompts_may_be_an_array():
    llm = over(PrefixTarget())
    rows = np.array([[1, 2], [3, 1]])
    answers = llm.generate(rows, GREEDY)
    assert answers == llm.generate(rows.tolist(), GREEDY)


def test_a_refusal_says_which_prompt_it_is_about():
    llm = over(PrefixTarget())
    for wrong, reason in (
        ([], "empty"),
        ("\ud800", "surrogate"),
        ([99], "outside"),
        ([1.5], "ids"),
    ):
        with pytest.raises(InvalidRequest, match=f"{reason}.* \\(number 2 of 2\\)"):
            llm.generate([[1], wrong])
        with pytest.raises(InvalidRequest, match=reason) as caught:
            llm.generate([wrong])
        assert "number" not in str(caught.value)
    assert not llm.engine.has_work


def test_a_conversation_has_a_message(llm):
    with pytest.raises(InvalidRequest, match="messages is empty"):
        llm.chat([])


def test_only_the_engine_says_that_a_prompt_is_too_long(caplog):
    """The tokenizer library has a warning of its own, which speaks of indexing errors."""
    tokenizer = copy.copy(make_tokenizer())
    tokenizer.model_max_length = 4
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        assert len(encode(tokenizer, "abcdefgh")) > 4
        assert len(encode_prediction(tokenizer, "abcdefgh")) > 4
        assert len(chat_ids(tokenizer, [{"role": "user", "content": "abcdefgh"}])) > 4
        assert len(encode_pairs(tokenizer, [("a", "abcdefgh")])[0][0]) > 4
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.records == []


class Silent:
    """A text stream that says nothing."""

    watches = True  # asked about every token

    def push(self, token_id, *, check_stop=True):
        return None

    def take(self, final=False):
        return ""

    def stream(self, params):
        return self


def over(target: PrefixTarget, **options: int) -> LLM:
    llm = LLM.__new__(LLM)
    llm.engine = make_engine(target, PrefixDrafter(target, 3, wrong_every=4), **options)
    llm.tokenizer = OneToken()
    llm.token_text = Silent()
    llm._ids = itertools.count()
    llm._mail = {}
    return llm


class OneToken:
    """A tokenizer whose every conversation is one token."""

    def apply_chat_template(self, *_, **__):
        return [3]


TWO = SamplingParams(n=2, max_tokens=3)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def test_several_choices_are_not_cut_to_one():
    llm = over(PrefixTarget())
    for call in (lambda: llm.chat([{"role": "user"}], TWO), lambda: next(llm.stream([3], TWO))):
        with pytest.raises(InvalidRequest, match="use generate") as caught:
            call()
        assert caught.value.param == "n"
    assert not llm.engine.has_work


def test_more_prompts_than_the_queue_holds_under_preemption():
    target = PrefixTarget()
    llm = over(target, max_queue=1, num_pages=16)
    prompts = [[3 + i, 5, 9] for i in range(8)]
    answers = llm.generate(prompts, GREEDY)
    assert llm.engine.snapshot().num_preemptions > 0
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == target.greedy(prompt, 30)


@pytest.mark.parametrize("prompt", [[1.5, 2], ["a"], [True], None, 7, b"a"])
def test_what_are_no_token_ids_are_refused_and_harm_nobody(prompt):
    target = PrefixTarget()
    llm = over(target)
    for call in (lambda: llm.generate([prompt], GREEDY), lambda: llm.score([prompt])):
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.param == "prompt"
    assert not llm.engine.has_work
    right = np.array([3, 5, 9])
    assert list(llm.generate([right], GREEDY)[0][0].token_ids) == target.greedy([3, 5, 9], 30)


@pytest.mark.parametrize(("message", "key"), [({"role": "user"}, "content"), ({}, "")])
def test_a_message_has_a_role_and_content(llm, message, key):
    with pytest.raises(InvalidRequest, match=rf"messages\[1\] has no {key}"):
        llm.chat([{"role": "user", "content": "x"}, message])


@pytest.mark.parametrize("content", [1, True, {"a": 1}])
def test_what_is_said_is_text(llm, content):
    with pytest.raises(InvalidRequest, match=r"messages\[1\].content"):
        llm.chat([{"role": "user", "content": "x"}, {"role": "user", "content": content}])


def test_a_template_that_refuses_is_no_traceback():
    tokenizer = copy.copy(make_tokenizer())
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(InvalidRequest, match="template refused") as caught:
        chat_ids(tokenizer, [{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "bogus", "content": "x"}, r"messages\[1\].role"),
        ({"role": "user", "content": "x", "foo": 1}, r"messages\[1\].foo"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[1\].content"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"messages\[1\].tool_calls must be"),
        ({"role": "assistant", "content": "x", "reasoning": "y"}, "shows no reasoning"),
        (
            {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "z"},
            "differs from reasoning",
        ),
        ({"role": "assistant", "tool_calls": 5}, r"messages\[1\].tool_calls must be"),
        ({"role": "assistant", "tool_calls": {"id": "a"}}, r"messages\[1\].tool_calls must be"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "no tool calls of earlier turns"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "shows no reasoning"),
        ({"role": "tool", "content": "x"}, r"messages\[1\].tool_call_id is missing"),
        ({"role": "tool", "content": "x", "tool_call_id": "a"}, "no call before it has the id"),
    ],
)
def test_messages_are_those_of_the_server(message, where):
    with pytest.raises(InvalidRequest, match=where):
        chat_ids(make_tokenizer(), [{"role": "user", "content": "x"}, message])


def test_messages_mean_what_they_mean_to_the_server():
    tokenizer = copy.copy(make_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    asked = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]
    plain = [{**asked[0], "role": "system", "content": "a\nb"}, *asked[1:]]
    assert chat_ids(tokenizer, asked) == chat_ids(tokenizer, plain)
    written_out = [{**one, "name": None, "refusal": None} for one in plain]
    assert chat_ids(tokenizer, written_out) == chat_ids(tokenizer, plain)
    assert set(ROLES) == set(get_args(ServerMessage.model_fields["role"].annotation))
    assert set(FIELDS) == ServerMessage.model_fields.keys() - {"refusal"}  # always null there


def test_a_text_too_long_to_score_is_not_said_to_lack_an_answer():
    llm = over(PrefixTarget())
    limit = llm.engine.max_request_tokens
    with pytest.raises(
        InvalidRequest, match=rf"has {limit + 1} tokens; the .* is {limit}: shorten"
    ):
        llm.score([[3] * (limit + 1)])


@pytest.mark.parametrize("pair", ["ab", b"ab", ("a",), ("a", "b", "c"), None, 5])
def test_pairs_are_pairs(pair):
    with pytest.raises(InvalidRequest, match=r"pairs\[1\] must be") as caught:
        encode_pairs(make_tokenizer(), [("a", "b"), pair])
    assert caught.value.param == "pairs"


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], ["temperature"]])
def test_options_are_sampling_params(llm, params):
    with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
        llm.generate(["a"], params)
    with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
        llm.chat([{"role": "user", "content": "x"}], params)


def test_messages_are_no_text(llm):
    for messages in ("hi", ["hi"]):
        with pytest.raises(InvalidRequest, match="role, content"):
            llm.chat(messages)


def test_predictions_change_no_answer_and_are_counted():
    target = PrefixTarget()
    llm = over(target)
    prompts = [[3 + i, 5, 9] for i in range(3)]
    right = target.greedy(prompts[0], 30)
    answers = llm.generate(prompts, GREEDY, predictions=[right, None, [1, 2, 3]])
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == target.greedy(prompt, 30)
    counts = [answer.stats.num_predicted_accepted for (answer,) in answers]
    assert counts[0] >= 26
    assert counts[1] == 0
    with pytest.raises(InvalidRequest, match="1 predictions for 3 prompts"):
        llm.generate(prompts, GREEDY, predictions=[right])


def test_streams_and_calls_may_overlap():
    target = PrefixTarget()
    llm = over(target)
    first, second = llm.stream([4, 5], GREEDY), llm.stream([6, 7], GREEDY)
    tokens = {"first": list(next(first).token_ids), "second": list(next(second).token_ids)}
    (answer,) = llm.generate([[8, 9]], GREEDY)[0]
    for a, b in itertools.zip_longest(first, second):
        tokens["first"] += a.token_ids if a else ()
        tokens["second"] += b.token_ids if b else ()
    assert list(answer.token_ids) == target.greedy([8, 9], 30)
    assert tokens["first"] == target.greedy([4, 5], 30)
    assert tokens["second"] == target.greedy([6, 7], 30)
    assert not llm._mail


def test_one_broken_answer_does_not_lose_the_others():
    target = PrefixTarget()
    target.overrides[(2, 2)] = torch.full((32,), torch.nan)
    bad, good = llm_answers = [c[0] for c in over(target).generate([[2, 2], [3, 3]], GREEDY)]
    assert len(llm_answers) == 2
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error
    assert list(good.token_ids) == target.greedy([3, 3], 30)


def test_an_interrupted_call_leaves_nothing_running(monkeypatch):
    target = PrefixTarget()
    llm = over(target)
    steps = iter(range(3))

    def step():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return type(llm.engine).step(llm.engine)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4, 5], [6, 7]], GREEDY)
    llm.engine.step()
    assert not llm.engine.has_work
    assert not llm._mail
