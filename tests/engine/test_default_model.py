"""The embedded default model with its shipped draft: bitwise equality, rescoring, stops, seeds."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from emberline.cache.page_pool import PagePool
from emberline.config import EngineConfig, SchedulerConfig
from emberline.engine.engine import Engine
from emberline.hub import resolve_model
from emberline.llm import LLM, Completion
from emberline.types import FinishReason, SamplingParams
from emberline.verify.planner import Threshold, VerifyAll

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that reverses a list.",
    "A box holds 12 pens. How many pens are in 7 boxes? Explain step by step.",
    "Tell me a short story about a lighthouse keeper and a lost boat. " * 6,
]


@cache
def loaded(dtype: str) -> LLM:
    return LLM(config=EngineConfig(dtype=dtype), progress=False)  # type: ignore[arg-type]


def variant(
    dtype: str,
    *,
    layout="compact",
    planner=None,
    chunk=512,
    drafts=True,
    num_reqs=16,
    num_pages=None,
    prefix_cache=True,
) -> LLM:
    """The same weights under other settings."""
    base = loaded(dtype)
    parts = replace(base.engine.parts, layout=layout, planner=planner or VerifyAll())
    if not drafts:
        parts = replace(parts, drafter=None)
    config = replace(
        base.engine.config,
        scheduler=SchedulerConfig(prefill_chunk=chunk, max_num_reqs=num_reqs),
        cache=replace(base.engine.config.cache, prefix_cache=prefix_cache),
    ).on("cpu")
    num_pages = num_pages or base.engine.config.cache.num_tokens // parts.page_size
    pool = PagePool(num_pages + 1, parts.page_size)
    llm = LLM.__new__(LLM)
    llm.__dict__.update(base.__dict__)
    llm.engine = Engine(parts, pool, config, base.engine.info)
    return llm


def ask(llm: LLM, params: SamplingParams, questions=QUESTIONS, together=True) -> list[Completion]:
    ids = [llm.chat_ids([{"role": "user", "content": q}]) for q in questions]
    if together:
        return [choices[0] for choices in llm.generate(ids, params)]
    return [llm.generate([i], params)[0][0] for i in ids]


GREEDY = SamplingParams(temperature=0, max_tokens=48, logprobs=3, prompt_logprobs=1)


@cache
def plain(dtype: str) -> list[Completion]:
    return ask(variant(dtype, drafts=False), GREEDY, together=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "planner", "chunk", "together"),
    [
        ("compact", VerifyAll(), 512, False),
        ("compact", Threshold(0.5), 16, True),
        ("static", VerifyAll(), 16, True),
        ("static", Threshold(0.5), 512, True),
    ],
)
def test_draft_layout_trimming_chunks_and_batch_change_no_bit(
    dtype, layout, planner, chunk, together
):
    llm = variant(dtype, layout=layout, planner=planner, chunk=chunk)
    got = ask(llm, GREEDY, together=together)
    bitwise = llm.engine.info["bitwise"]
    for answer, expected in zip(got, plain(dtype), strict=True):
        assert answer.stats.acceptance_length > 1.2
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        if bitwise:
            assert answer.logprobs == expected.logprobs
            assert answer.prompt_logprobs == expected.prompt_logprobs
        else:
            tolerance = 1e-4 if dtype == "float32" else 0.1  # the dtype's own noise
            for a, b in zip(answer.logprobs, expected.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_order_batch_size_cache_and_preemption_change_no_bit(dtype):
    """Greedy and seeded requests that share prefixes, in several orders and batches."""
    bare = variant(dtype, drafts=False, prefix_cache=False)
    rhyme = QUESTIONS[3] + "Make it rhyme."
    tasks = [
        (
            bare.chat_ids([{"role": "user", "content": text}]),
            SamplingParams(temperature=(0, 0.9)[i % 2], seed=i, max_tokens=10 + i, logprobs=2),
        )
        for i, text in enumerate([QUESTIONS[0], QUESTIONS[3], rhyme, QUESTIONS[0], QUESTIONS[1]])
    ]
    expected = [bare.generate([ids], params)[0][0] for ids, params in tasks]
    for seed, num_reqs, num_pages in ((0, 2, None), (5, 8, 13)):
        llm = variant(
            dtype, planner=Threshold(0.5), chunk=48, num_reqs=num_reqs, num_pages=num_pages
        )
        order = random.Random(seed).sample(range(5), 5)
        got = llm.generate([tasks[i][0] for i in order], [tasks[i][1] for i in order])
        snapshot = llm.engine.snapshot()
        assert snapshot.prefix_hit_tokens > 0
        assert (snapshot.num_preemptions > 0) == (num_pages is not None)
        for i, (answer,) in zip(order, got, strict=True):
            assert answer.token_ids == expected[i].token_ids
            if llm.engine.info["bitwise"]:
                assert answer.logprobs == expected[i].logprobs


def test_trimming_really_trims():
    got = ask(variant("bfloat16", planner=Threshold(0.5)), GREEDY)
    drafted = sum(a.stats.num_drafted for a in got)
    assert 0 < sum(a.stats.num_verified for a in got) < 0.9 * drafted


def test_logprobs_agree_with_plain_transformers():
    """Over 200 generated tokens and the prompt: within 1e-4 in float32."""
    from transformers import AutoModelForCausalLM

    llm = variant("float32")
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=100, logprobs=5, prompt_logprobs=5, ignore_eos=True
    )
    answers = ask(llm, params, QUESTIONS[1:3])
    folder = resolve_model(None, progress=False).path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert sum(len(a.token_ids) for a in answers) == 200
    for question, answer in zip(QUESTIONS[1:3], answers, strict=True):
        prompt = llm.chat_ids([{"role": "user", "content": question}])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
        expected = logits.double().log_softmax(-1)
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        records = [*answer.prompt_logprobs[1:], *answer.logprobs]
        for row, record in enumerate(records):
            assert abs(record.logprob - float(expected[row, record.token_id])) < 1e-4
            top = expected[row, list(record.top_ids)]
            assert (torch.tensor(record.top_logprobs).double() - top).abs().max() < 1e-4


def test_a_seeded_text_is_the_same_with_and_without_draft_and_beside_others():
    params = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=40),
        *(SamplingParams(temperature=0.3 * i, max_tokens=20 + i) for i in range(7)),
    ]
    llm, bare = variant("bfloat16"), variant("bfloat16", drafts=False)
    ids = llm.chat_ids([{"role": "user", "content": QUESTIONS[0]}])
    alone = llm.generate([ids], params[0])[0][0]
    assert alone.stats.num_accepted > 0
    without = bare.generate([ids], params[0])[0][0]
    beside = llm.generate([ids] * 8, params)[0][0]
    assert alone.token_ids == without.token_ids == beside.token_ids


def test_stops_in_the_middle_of_an_accepted_block():
    llm, bare = variant("float32"), variant("float32", drafts=False)
    base = ask(bare, SamplingParams(temperature=0, max_tokens=40, logprobs=2), QUESTIONS[1:2])[0]
    num_tried = 0
    for end in range(5, 30, 5):
        # A stop string that straddles two tokens, ending in the middle of some block.
        two = llm.tokenizer.decode(base.token_ids[end - 1 : end + 1])
        stop = two[1:-1] if len(two) > 3 else two
        first = base.text.find(stop)
        if first < 0 or not stop:
            continue
        num_tried += 1
        params = SamplingParams(temperature=0, max_tokens=40, logprobs=2, stop=[stop])
        got = ask(llm, params, QUESTIONS[1:2])[0]
        expected = ask(bare, params, QUESTIONS[1:2])[0]
        assert got.token_ids == expected.token_ids
        assert got.logprobs == expected.logprobs
        assert got.text == expected.text == base.text[:first]
        assert got.finish_reason is FinishReason.STOP
        assert got.stop_reason == stop
        assert len(got.logprobs) == len(got.token_ids)
    assert num_tried >= 3
