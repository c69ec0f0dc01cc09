"""Acceptance from each server's own words."""

from __future__ import annotations

import pytest

from emberline.bench.acceptance import between, from_answer, read_counters

EMBERLINE = {"steps": 4, "drafted": 28, "verified": 20, "accepted": 6, "emitted": 9}
FORMS = {
    # The last block was cut: 4 steps and 6 accepted drafts, but 9 tokens emitted.
    "emberline": ({"emberline": {"speculation": EMBERLINE}}, 9 / 4, 6 / 20),
    "vllm": (
        {
            "metrics": {
                "speculative_decoding": {
                    "num_spec_steps": 5,
                    "num_accepted_draft_tokens": 10,
                    "num_draft_tokens": 25,
                    "mean_acceptance_length": 3.0,
                }
            }
        },
        3.0,
        0.4,
    ),
    "sglang": (
        {
            "meta_info": {
                "spec_verify_ct": 10,
                "completion_tokens": 26,
                "spec_num_correct_drafts": 15,
                "spec_num_proposed_drafts": 30,
            }
        },
        2.5,
        0.5,
    ),
    "sglang, older": (
        {"meta_info": {"spec_verify_ct": 10}, "usage": {"completion_tokens": 26}},
        2.6,
        None,
    ),
    "llama.cpp": (
        {"timings": {"predicted_n": 30, "draft_n": 40, "draft_n_accepted": 20}},
        3.0,
        0.5,
    ),
    "usage": (
        {
            "usage": {
                "completion_tokens": 30,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": 20,
                    "rejected_prediction_tokens": 60,
                },
            }
        },
        3.0,
        0.25,
    ),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_each_form(name: str) -> None:
    said, length, rate = FORMS[name]
    found = from_answer(said)
    assert found is not None
    assert found.length == pytest.approx(length)
    assert found.rate == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"usage": {"completion_tokens": 5}},
        {"usage": {"completion_tokens": 5, "completion_tokens_details": None}},
        # What servers without predictions fill in.
        {
            "usage": {
                "completion_tokens": 5,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
            }
        },
        {"timings": {"predicted_n": 30}},
        {"metrics": {"tokens_per_second": 30}},
        {"meta_info": {"completion_tokens": 4, "spec_verify_ct": 0}},
        {"emberline": {"speculation": None}, "metrics": [], "meta_info": "x", "timings": 3},
    ],
)
def test_nothing_is_made_of_nothing(said: dict[str, object]) -> None:
    assert from_answer(said) is None


def test_an_answer_of_one_token_has_no_steps_and_no_length() -> None:
    found = from_answer({"emberline": {"speculation": {"steps": 0, "emitted": 0}}})
    assert found is not None
    assert found.steps == 0
    assert found.length is None


def exposition(total: str, drafts: int, draft_tokens: int, accepted: int) -> str:
    lines = []
    for name, value in (
        ("num_drafts", drafts),
        ("num_draft_tokens", draft_tokens),
        ("num_accepted_tokens", accepted),
    ):
        lines.append(f"# TYPE vllm:spec_decode_{name} counter")
        # Two engines of one server: they add up.
        lines.append(f'vllm:spec_decode_{name}{total}{{model_name="m",engine="0"}} {value - 1}.0')
        lines.append(f'vllm:spec_decode_{name}{total}{{model_name="m",engine="1"}} 1.0')
    lines.append('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 99.0')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("total", ["_total", ""])
def test_counters_before_and_after(total: str) -> None:
    before = read_counters(exposition(total, 100, 700, 150))
    after = read_counters(exposition(total, 140, 980, 230))
    found = between(before, after)
    assert found is not None
    assert found.source == "/metrics"
    assert found.length == pytest.approx((40 + 80) / 40)
    assert found.rate == pytest.approx(80 / 280)
    assert between(after, after) is None  # nothing was speculated
    assert between(after, before) is None  # another process under the same address
    assert between({}, {}) is None


def test_our_own_counter_of_emitted_tokens_is_exact() -> None:
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    after = {names[0]: 10.0, names[1]: 20.0, "emberline:verify_emitted_tokens": 28.0}
    found = between(dict.fromkeys(after, 0.0), after)
    assert found is not None
    assert found.length == pytest.approx(2.8)


def test_counters_without_drafts() -> None:
    emitted = {
        "vllm:spec_decode_num_accepted_tokens": 20.0,
        "vllm:spec_decode_num_draft_tokens": 40.0,
    }
    found = between({}, emitted)
    assert found is not None
    assert (found.length, found.rate) == (None, pytest.approx(0.5))
    found = between({}, {**emitted, "vllm:spec_decode_num_emitted_tokens": 30.0})
    assert found is not None
    assert found.length == pytest.approx(3.0)
    found = between({}, {"sglang:spec_verify_calls": 10.0, "sglang:generation_tokens": 25.0})
    assert found is not None
    assert found.length == pytest.approx(2.5)
