"""Requests: what is refused, with which field named, and what is derived."""

from __future__ import annotations

import dataclasses

import pytest

from emberline.types import (
    FinishReason,
    Grammar,
    InvalidRequest,
    QueueFull,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.5, 1e7, NAN, INF, True, "1")),
        *(("top_p", value) for value in (0.0, -0.5, 1.01, 3, NAN)),
        *(("top_k", value) for value in (-2, -9, 1.5, True)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN)),
        *(("seed", value) for value in (-(2**63) - 1, 2**64, 1.0, True)),
        *(("n", value) for value in (0, -1, 129, 10**7)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, INF)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, NAN)),
        *(("logit_bias", value) for value in ({-1: 0.0}, {0: 101.0}, {0: NAN}, {"a": 1.0}, 5, [])),
        *(("stop", value) for value in ("", ("",), ("a", ""), (3,), 5, None)),
        *(("stop_token_ids", value) for value in ((-1,), (1.5,), 5, "5", None)),
        *(("bad_words", value) for value in (5, "ab", [5], ["ab"], [[]])),
        *(("allowed_token_ids", value) for value in (5, "5", [])),
        ("min_tokens", -1),
        *(("max_tokens", value) for value in (0, -1, 1.0)),
        *(("logprobs", value) for value in (-2, 1.5, True)),
        *(("prompt_logprobs", value) for value in (-2, True)),
        ("prompt_logprobs_start", -1),
        *(("logprob_token_ids", value) for value in ((3,), 5)),
        ("logprobs_mode", "cooked"),
        ("accept", "always"),
    ],
)
def test_meaningless_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_a_bias_is_of_a_token_id() -> None:
    with pytest.raises(InvalidRequest, match="must map token ids to numbers, got the key '5'"):
        SamplingParams(logit_bias={"5": 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "top_p": 1e-6, "top_k": -1, "min_p": 1.0},
        {"temperature": 100.0, "seed": -(2**63), "n": 128},
        {"seed": 2**64 - 1, "logit_bias": {0: -100, 49151: 100}},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"min_tokens": 5, "max_tokens": 5},
        {"logprobs": 1024, "logprob_token_ids": [1, 1, 0]},
        {"repetition_penalty": 0.01, "frequency_penalty": -2, "presence_penalty": 2},
    ],
)
def test_extreme_but_meaningful_values_are_taken(options: dict[str, object]) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    for name, value in options.items():
        taken = getattr(params, name)
        assert (list(taken) if isinstance(value, list) else taken) == value


def test_a_minimum_over_the_maximum_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens 6 exceeds max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_params_cannot_change_under_the_engine() -> None:
    bias, stops = {3: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[4], stops[0] = 2.0, "b"
    assert dict(params.logit_bias) == {3: 1.0}
    assert params.stop == ("a",)
    assert SamplingParams(stop="end").stop == ("end",)
    with pytest.raises(TypeError):
        params.logit_bias[5] = 1.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=1e-9).greedy
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert SamplingParams().temperature == 1.0


@pytest.mark.parametrize(
    ("accept", "seed", "coupled"),
    [
        ("auto", None, False),
        ("auto", 0, True),
        ("rejection", 0, False),
        ("coupled", None, True),
    ],
)
def test_a_seed_couples_unless_told_otherwise(accept: str, seed: int | None, coupled: bool) -> None:
    assert SamplingParams(accept=accept, seed=seed).coupled is coupled  # type: ignore[arg-type]


def test_counts_of_steps_become_totals_and_rates() -> None:
    steps = {(7, 5, 2, 3, False): 3, (7, 5, 4, 5, True): 1, (0, 0, 0, 1, False): 2}
    stats = SpeculationStats(steps)
    assert (stats.num_steps, stats.num_drafted, stats.num_verified) == (6, 28, 20)
    assert (stats.num_accepted, stats.num_emitted) == (10, 16)
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_length == pytest.approx(16 / 6)
    assert stats.verified_per_pos == (4, 4, 4, 4, 4)
    assert stats.accepted_per_pos == (4, 4, 1, 1, 0)
    assert (stats.num_predicted, stats.num_predicted_accepted) == (5, 4)
    assert SpeculationStats().acceptance_rate == SpeculationStats().acceptance_length == 0.0
    assert (stats + stats).num_steps == 12


def test_an_output_with_a_reason_is_the_last() -> None:
    assert not RequestOutput("r").finished
    assert RequestOutput("r", finish_reason=FinishReason.LENGTH).finished


def test_a_full_queue_says_when_to_come_back() -> None:
    full = QueueFull(256)
    assert full.retry_after == 1
    assert "256" in str(full)


def test_the_histogram_of_accepted_drafts_reconciles_with_the_totals() -> None:
    steps = {(5, 5, accepted, accepted + 1, False): n for accepted, n in ((2, 2), (0, 1), (5, 1))}
    stats = SpeculationStats(steps)
    assert stats.accepted_histogram == (1, 0, 2, 0, 0, 1)
    assert sum(stats.accepted_histogram) == stats.num_steps
    counts = enumerate(stats.accepted_histogram)
    assert sum(length * steps for length, steps in counts) == stats.num_accepted


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: SamplingParams(bad_words=["x"]), "bad_words"),
        (lambda: SamplingParams(grammar="abc"), "grammar"),
        (lambda: Grammar("json_schema", {"type": "object"}), "grammar"),
        (lambda: Grammar("gbnf", "root"), "grammar"),
    ],
)
def test_other_types_are_refused_by_name(make, param):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == param
