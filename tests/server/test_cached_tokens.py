"""What the prefix cache shows of itself, with pages of 4 tokens: in the usage, in the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_around import counters

from support.serving import Server, saying_server


@pytest.fixture(params=[0, 4])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(num_drafts=request.param, max_num_reqs=4) as running:
        yield running


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_that_comes_again_is_found(server: Server) -> None:
    """C42: drafting or not, the hits are the same."""
    prompt = list(range(100, 130))
    assert cached(server.complete(prompt, max_tokens=3, ignore_eos=True)) == 0
    again = server.complete(prompt, max_tokens=3, ignore_eos=True)
    assert cached(again) == 28  # full pages, and one token is left to compute
    assert again["usage"]["prompt_tokens"] == 30
    assert cached(server.complete([*prompt[:10], 7, 7, 7], max_tokens=1)) == 8
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = server.stream("/v1/completions", {**body, "stream_options": options})
    assert cached(last) == 28
    assert {cached(event) for event in events} == {28}


def test_choices_that_share_a_prompt_count_what_none_of_them_computed(server: Server) -> None:
    """The others found what the first one computed, but computed it was."""
    prompts = [list(range(50, 70)), list(range(120, 145))]
    options: dict[str, Any] = {"n": 3, "max_tokens": 3, "ignore_eos": True}
    assert cached(server.complete(prompts, **options)) == 0
    assert cached(server.complete(prompts, **options)) == 16 + 24
    assert cached(server.complete([prompts[0], list(range(200, 215))], **options)) == 16


def test_scored_prompts_are_computed(server: Server) -> None:
    prompt = list(range(100, 120))
    server.complete(prompt, max_tokens=1)
    assert cached(server.complete(prompt, max_tokens=1, prompt_logprobs=1)) == 0
    partly = {"prompt_logprobs": 1, "prompt_logprobs_start": 10}
    assert cached(server.complete(prompt, max_tokens=1, **partly)) == 8


def test_the_metrics_count_tokens(server: Server) -> None:
    prompt = list(range(100, 130))
    before = counters(server)
    for _ in range(3):
        server.complete(prompt, max_tokens=3, ignore_eos=True)
    server.rest()
    after = counters(server)
    assert (
        after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] == 90
    )
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == 56
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert before["emberline:kv_cache_cached_perc"] == 0
    assert 7 / 1024 <= after["emberline:kv_cache_cached_perc"] < 10 / 1024
