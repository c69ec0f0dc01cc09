"""EAGLE-3 in whole engines, on the recorded checkpoint: drafts are the recorded ones whatever ran.

An entry of its KV depends on the token after its own: that is where chunks, the prefix cache and
preemption could show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.cache.page_pool import PagePool
from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.engine.build import load_models
from emberline.engine.engine import Engine
from emberline.engine.step import StepParts
from emberline.sampling.keys import KeyedDraws
from emberline.types import Request, SamplingParams, SpeculationStats
from emberline.verify.planner import VerifyAll

from support.engines import Answer, ask, collect, run

GOLDEN = Path(__file__).parents[1] / "golden"
PAGE, NUM_PAGES, MAX_LEN = 8, 120, 256


@cache
def traces() -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = json.loads((GOLDEN / "eagle3/trace.json").read_text())[
        "traces"
    ]
    return recorded


@cache
def parts(drafts: int | None) -> StepParts:
    """Target and draft, loaded once; engines take turns in their pages."""
    config = EngineConfig(
        dtype="float32",
        cache=CacheConfig(page_size=PAGE),
        speculation=SpeculationConfig(num_draft_tokens=drafts),
        poison_padding=True,
    ).on("cpu")
    target, drafter = load_models(
        GOLDEN / "target", GOLDEN / "eagle3", config, torch.float32, 1 + NUM_PAGES, None
    )
    return StepParts(
        target=target,
        drafter=drafter,
        planner=VerifyAll(),
        draws=KeyedDraws(),
        history=torch.zeros(8, MAX_LEN, dtype=torch.int64),
        page_size=PAGE,
        layout="compact",
        eos_ids=frozenset(),
    )


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """Other tests count what is alive."""
    yield
    parts.cache_clear()


def make(
    *,
    num_pages: int = NUM_PAGES,
    prefix_cache: bool = True,
    drafts: int | None = None,
    **scheduler: int,
) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(max_num_reqs=8, **scheduler),
    ).on("cpu")
    return Engine(parts(drafts), PagePool(1 + num_pages, PAGE), config)


def greedy(count: int = 64) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


def requests(count: int = 64) -> list[Request]:
    return [
        Request(str(i), tuple(trace["prompt_ids"]), greedy(count))
        for i, trace in enumerate(traces())
    ]


def num_accepted(trace: dict[str, Any], steps: int) -> int:
    return sum(trace["accept_lengths"][:steps]) - steps


def assert_recorded(answer: Answer, trace: dict[str, Any]) -> None:
    """The recorded tokens in the recorded blocks; only the last block may be cut."""
    assert answer.token_ids == trace["output_ids"]
    blocks = [len(output.token_ids) for output in answer.outputs[1:]]
    assert blocks[:-1] == trace["accept_lengths"][: len(blocks) - 1]
    assert blocks[-1] <= trace["accept_lengths"][len(blocks) - 1]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_blocks_are_the_recorded_ones_however_prompts_are_cut(chunk: int) -> None:
    answers = run(make(prefill_chunk=chunk), requests())
    for i, trace in enumerate(traces()):
        assert_recorded(answers[str(i)], trace)


def test_blocks_are_the_recorded_ones_through_preemption() -> None:
    engine = make(num_pages=29, prefill_chunk=16)
    answers = run(engine, requests())
    assert engine.snapshot().num_preemptions > 0
    for i, trace in enumerate(traces()):
        answer = answers[str(i)]
        assert answer.token_ids == trace["output_ids"]
        # A request that came back may have found all but its anchor, and drafts at once.
        steps = len(answer.outputs) - 1
        assert answer.last.stats.num_accepted >= num_accepted(trace, steps) - 7


@pytest.mark.parametrize("length", [16, 17, 23])
def test_a_warm_cache_drafts_as_a_cold_one(length: int) -> None:
    """Prompts that end with a page, and beside it."""
    prompt = traces()[0]["prompt_ids"][:length]
    engine = make()
    cold, warm = ask(engine, prompt, greedy(20)), ask(engine, prompt, greedy(20))
    assert cold.last.num_cached_tokens == 0
    assert warm.last.num_cached_tokens == (length - 1) // PAGE * PAGE
    assert warm.token_ids == cold.token_ids
    assert warm.last.stats == cold.last.stats
    turn = [*prompt, *cold.token_ids[:18], *prompt[:3]]
    again = ask(engine, turn, greedy(20))
    fresh = ask(make(prefix_cache=False), turn, greedy(20))
    assert again.last.num_cached_tokens >= (length + 18 - 1) // PAGE * PAGE
    assert again.token_ids == fresh.token_ids
    assert again.last.stats == fresh.last.stats


def test_an_entry_is_not_taken_where_the_next_token_differs() -> None:
    prompt = traces()[0]["prompt_ids"][: 2 * PAGE]
    engine = make()
    ask(engine, [*prompt, 40], greedy(4))
    other = [*prompt, 41, 42, 43]
    warm, fresh = ask(engine, other, greedy(20)), ask(make(prefix_cache=False), other, greedy(20))
    assert warm.last.num_cached_tokens == PAGE
    assert warm.token_ids == fresh.token_ids
    assert warm.last.stats == fresh.last.stats


def test_aborted_and_repeated_requests_leave_others_alone() -> None:
    engine = make(prefill_chunk=16)
    answers = {request.request_id: Answer() for request in requests()}
    for request in requests():
        engine.add(request)
    for number in range(400):
        if not engine.has_work:
            break
        for output in engine.step():
            collect(answers.setdefault(output.request_id, Answer()), output)
        if number in (3, 6, 9):
            again = traces()[number // 3]["prompt_ids"]
            engine.add(Request(f"gone {number}", tuple(again), greedy()))
        if number in (5, 8, 11):
            engine.abort(f"gone {number - 2}")
    assert engine.snapshot().kv_usage == 0
    for i, trace in enumerate(traces()):
        assert_recorded(answers[str(i)], trace)


def stats_of(engine: Engine, seed: int) -> tuple[list[int], SpeculationStats]:
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=seed, accept="rejection")
    answer = ask(engine, traces()[1]["prompt_ids"], params)
    return answer.token_ids, answer.last.stats


def test_a_seeded_answer_is_the_same_cold_and_warm() -> None:
    engine = make()
    for seed in range(2):
        assert stats_of(engine, seed) == stats_of(engine, seed) == stats_of(make(), seed)


@pytest.mark.parametrize("drafts", [1, 3, 10])
def test_as_many_drafts_as_are_asked_for(drafts: int) -> None:
    """Fewer than it was trained for are a prefix; more go on in the same way."""
    trace = traces()[0]
    answer = ask(make(drafts=drafts), trace["prompt_ids"], greedy(20))
    assert answer.token_ids == trace["output_ids"][:20]
    assert max(len(output.token_ids) for output in answer.outputs) <= drafts + 1
    first = trace["accept_lengths"][0]
    assert len(answer.outputs[1].token_ids) == min(first, drafts + 1)
