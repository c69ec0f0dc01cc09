"""Step costs: the laws of their lookup, and files that say the same when they come back."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.models.weights import ModelError
from emberline.verify import foreign_costs
from emberline.verify.cost_files import load_costs, load_profile, save_profile
from emberline.verify.cost_profile import CostProfile, MeasuredOn
from emberline.verify.step_cost import StepCosts

# Lookup


def table(
    reqs: tuple[int, ...] = (1, 2, 4, 8, 16),
    tokens_each: tuple[int, ...] = (1, 2, 3, 5, 8),
    base: float = 0.030,
    per_req: float = 0.002,
    per_token: float = 0.001,
) -> StepCosts:
    """A machine whose cost is a sum; drafting costs a fifth of a token each."""
    return StepCosts(
        tuple(
            (r, r * n, base + per_req * r + per_token * r * n) for r in reqs for n in tokens_each
        ),
        tuple((r, k, 0.004 + 0.2 * per_token * r * k) for r in reqs for k in (1, 2, 4, 7)),
    )


def seconds(costs: StepCosts, num_reqs: int, *tokens: int) -> list[float]:
    found: list[float] = costs.target_seconds(num_reqs, np.array(tokens)).tolist()
    return found


@st.composite
def rows(draw: st.DrawFn, *, rising: bool) -> dict[int, dict[int, float]]:
    """Measured seconds by requests and tokens."""
    found = {}
    for num_reqs in draw(st.sets(st.integers(1, 64), min_size=1, max_size=5)):
        tokens = sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=6)))
        values = [draw(st.floats(1e-4, 10.0)) for _ in tokens]
        if rising:
            values.sort()
        found[num_reqs] = dict(zip(tokens, values, strict=True))
    return found


def made(found: dict[int, dict[int, float]]) -> StepCosts:
    return StepCosts(tuple((r, t, s) for r, row in found.items() for t, s in row.items()), ())


@settings(max_examples=200, deadline=None)
@given(rows(rising=False), st.integers(1, 200))
def test_more_tokens_never_cost_less(found: dict[int, dict[int, float]], num_reqs: int) -> None:
    values = made(found).target_seconds(num_reqs, np.arange(1, 1500))
    assert (values > 0).all()
    assert (np.diff(values) >= -1e-9 * values[1:]).all()


@settings(max_examples=200, deadline=None)
@given(rows(rising=True))
def test_points_come_back_exactly(found: dict[int, dict[int, float]]) -> None:
    costs = made(found)
    for num_reqs, row in found.items():
        assert seconds(costs, num_reqs, *row) == list(row.values())


@settings(max_examples=200, deadline=None)
@given(rows(rising=True), st.integers(1, 80), st.integers(1, 700))
def test_between_points_lies_between_them(
    found: dict[int, dict[int, float]], num_reqs: int, num_tokens: int
) -> None:
    costs = made(found)
    (value,) = seconds(costs, num_reqs, num_tokens)
    below = max((r for r in found if r <= num_reqs), default=min(found))
    above = min((r for r in found if r >= num_reqs), default=max(found))
    neighbours = [seconds(costs, r, num_tokens)[0] for r in (below, above)]
    if num_reqs > max(found):
        assert value >= seconds(costs, max(found), num_tokens)[0] * (1 - 1e-9)
    else:
        assert min(neighbours) * (1 - 1e-9) <= value <= max(neighbours) * (1 + 1e-9)
    if num_reqs in found:
        row = found[num_reqs]
        lower = [s for t, s in row.items() if t <= num_tokens] or [min(row.values())]
        upper = [s for t, s in row.items() if t >= num_tokens]
        assert value >= max(lower) * (1 - 1e-9)
        assert not upper or value <= min(upper) * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(rows(rising=False), st.lists(st.integers(1, 100), min_size=2, max_size=5))
def test_an_answer_does_not_depend_on_earlier_ones(
    found: dict[int, dict[int, float]], asked: list[int]
) -> None:
    used = made(found)
    for num_reqs in asked:
        expected = seconds(made(found), num_reqs, 1, 50, 700)
        assert seconds(used, num_reqs, 1, 50, 700) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 600))
def test_a_machine_that_is_a_sum_is_known_everywhere(reqs: int, each: int, chunk: int) -> None:
    tokens = reqs * each + chunk
    (value,) = seconds(table(), reqs, tokens)
    assert value == pytest.approx(0.030 + 0.002 * reqs + 0.001 * tokens)


def test_past_the_last_point_the_last_slope_goes_on() -> None:
    costs = StepCosts(((1, 1, 0.10), (1, 5, 0.11), (1, 10, 0.21)), ())
    assert seconds(costs, 1, 20, 1010) == pytest.approx([0.41, 20.21])
    assert seconds(costs, 7, 20) == pytest.approx([0.41])  # one row says nothing of requests


def test_before_the_first_point_the_first_value_holds() -> None:
    costs = StepCosts(((2, 4, 0.1), (2, 8, 0.3), (4, 8, 0.4)), ())
    assert seconds(costs, 2, 1, 4) == [0.1, 0.1]
    assert seconds(costs, 1, 4, 8) == [0.1, 0.3]


def test_a_point_dearer_than_a_later_one_was_disturbed() -> None:
    costs = StepCosts(((1, 1, 0.030), (1, 2, 0.090), (1, 4, 0.032), (1, 8, 0.040)), ())
    assert seconds(costs, 1, 1, 2, 4, 8) == [0.030, 0.032, 0.032, 0.040]


def test_more_requests_are_never_cheaper_past_the_last() -> None:
    costs = StepCosts(((1, 1, 0.05), (1, 9, 0.06), (2, 2, 0.04), (2, 18, 0.09)), ())
    assert seconds(costs, 8, 2)[0] >= 0.04
    assert seconds(costs, 8, 18)[0] > seconds(costs, 4, 18)[0] > 0.09


def test_drafting_costs_by_requests_and_depth() -> None:
    costs = table()
    assert costs.draft_seconds(0, 7) == costs.draft_seconds(4, 0) == 0.0
    assert costs.draft_seconds(4, 4) == pytest.approx(0.004 + 0.0002 * 16)
    assert costs.draft_seconds(12, 5) == pytest.approx(0.004 + 0.0002 * 60)
    assert StepCosts(costs.target, ()).draft_seconds(4, 4) == 0.0


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ((), (), "target is empty"),
        (((0, 1, 0.1),), (), r"target\[0\]: requests must be an integer from 1, got 0"),
        (((1, -1, 0.1),), (), r"target\[0\]: tokens must be an integer from 0, got -1"),
        (((1, 1, 0.1), (1, 2.0, 0.1)), (), r"target\[1\]: tokens must be an integer"),
        (((1, 1, 0.0),), (), r"target\[0\]: seconds must be positive"),
        (((1, 1, float("nan")),), (), r"target\[0\]: seconds must be positive and finite"),
        (((1, 1, True),), (), r"target\[0\]: seconds must be positive and finite, got True"),
        (((1, 1, 0.1), (1, 1, 0.2)), (), r"target\[1\]: 1 requests with 1 tokens come twice"),
        (((1, 1),), (), r"target\[0\] must be requests, tokens and seconds"),
        (((1, 1, 0.1),), ((1, 1, -0.1),), r"draft\[0\]: seconds must be positive"),
        (((1, 1, 0.1),), (("1", 1, 0.1),), r"draft\[0\]: requests must be an integer"),
    ],
)
def test_points_without_meaning_are_refused(target: Any, draft: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCosts(target, draft)


# Files

FACTS = MeasuredOn(
    model="small (0011aabb)",
    draft="draft (2233ccdd)",
    dtype="bfloat16",
    device="cpu",
    processor="A Processor",
    num_cores=4,
    threads=3,
    layout="compact",
    max_num_reqs=16,
    max_draft_tokens=7,
    context_length=256,
    torch="2.13.0",
    emberline="0.1.0",
)
PROFILE = CostProfile(table(), FACTS, "2026-01-02T03:04:05+00:00")


def file(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    return path


def whole(profile: CostProfile, num_reqs: int, num_tokens: int) -> float:
    """A step in which every request drafts a whole block."""
    drafting = profile.costs.draft_seconds(num_reqs, profile.measured_on.max_draft_tokens)
    return seconds(profile.costs, num_reqs, num_tokens)[0] + drafting


def test_a_native_file_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_profile(path, PROFILE)
    assert load_profile(path) == PROFILE
    assert load_costs(path) == PROFILE.costs
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_profile(path, PROFILE)
    with pytest.raises(TypeError):
        save_profile(path, replace(PROFILE, date=object()))  # type: ignore[arg-type]
    assert load_profile(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


def native() -> dict[str, Any]:
    return {
        "format": "emberline-step-costs",
        "version": 1,
        "date": "2026-01-02",
        "measured_on": {name: getattr(FACTS, name) for name in FACTS.__slots__},
        "target": [[1, 1, 0.1], [1, 2, 0.2]],
        "draft": [],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"date": 5}, "date must be a string"),
        ({"target": 5}, "target must be a list"),
        ({"target": [[1, 1]]}, r"target\[0\] must be requests, tokens and seconds"),
        ({"target": [[1, 1, "0.1"]]}, r"target\[0\]: seconds must be positive"),
        ({"draft": None}, "draft must be a list"),
        ({"measured_on": {}}, "measured_on must hold just model"),
        ({"measured_on": native()["measured_on"] | {"threads": "1"}}, "measured_on.threads"),
    ],
)
def test_a_damaged_native_file_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = file(tmp_path, native() | change)
    for load in (load_costs, load_profile):
        with pytest.raises(ModelError, match=message) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "emberline profile" in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content, message in (("{", "expected JSON"), ("[]", "JSON object"), ("{}", "no cost")):
        path = tmp_path / "costs.json"
        path.write_text(content)
        with pytest.raises(ModelError, match=message):
            load_costs(path)
    with pytest.raises(ModelError, match="cannot be read"):
        load_costs(tmp_path / "absent.json")
    with pytest.raises(ModelError, match="format must be"):
        load_profile(file(tmp_path, SGLANG))


# Files of other engines, as those engines write them

SGLANG = {
    "sample_batch_tokens": [8, 16, 32, 64],
    "sample_steps_per_sec": [100.0, 80.0, 50.0, 25.0],
    "max_batch_tokens": 128,
}
SGLANG_ADDITIVE = {
    "bias_seconds": 0.01,
    "bs_probes": [2, 4, 8],
    "alpha_seconds": [0.0, 0.001, 0.004],
    "m_probes": [8, 16, 64],
    "theta_seconds": [0.0, 0.002, 0.02],
}
TENSORRT_LLM = {
    "token_counts": [0, 16, 64],
    "step_time_ms": [1.0, 2.0, 8.0],
    "fixed_overhead_ms": 3.0,
    "batch_sizes": [2, 8],
    "batch_overhead_ms": [0.0, 1.5],
    "minimum_predicted_gain": 0.04,
    "_meta": {"encoding": "decomposed"},
}


def digest(value: object) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


FINGERPRINT = {"gpu": "a GPU", "max_draft_len": 5, "rank_local_graph_batch_sizes": [2, 4]}
TENSORRT_LLM_V2 = {
    "schema_version": 2,
    "minimum_predicted_gain": 0.02,
    "cost_tables": {
        "2": {"token_counts": [0, 6], "step_time_ms": [6.0, 5.0]},
        "4": {"token_counts": [0, 8, 16, 24], "step_time_ms": [9.0, 6.0, 7.0, 8.0]},
    },
    "engine_fingerprint": FINGERPRINT,
    "engine_fingerprint_sha256": digest(FINGERPRINT),
    "measurements": [],
}
FOREIGN = {
    "sglang": SGLANG,
    "sglang-additive": SGLANG_ADDITIVE,
    "tensorrt-llm": TENSORRT_LLM,
    "tensorrt-llm-v2": TENSORRT_LLM_V2,
}


def lerp(at: float, counts: list[int], values: list[float]) -> float:
    return float(np.interp(at, counts, values))


def test_a_diagonal_of_sglang_depends_on_tokens_alone(tmp_path: Path) -> None:
    costs = load_costs(file(tmp_path, SGLANG))
    for num_reqs in (1, 5, 60):
        assert seconds(costs, num_reqs, 8, 16, 32, 64) == pytest.approx([0.01, 0.0125, 0.02, 0.04])
        assert seconds(costs, num_reqs, 24) == pytest.approx([0.01625])
    assert costs.draft_seconds(4, 7) == 0.0


def test_an_additive_table_of_sglang_is_its_sum_within_its_probes(tmp_path: Path) -> None:
    costs = load_costs(file(tmp_path, SGLANG_ADDITIVE))
    for num_reqs in range(2, 9):
        for num_tokens in range(8, 65):
            expected = (
                0.01
                + lerp(num_reqs, [2, 4, 8], [0.0, 0.001, 0.004])
                + lerp(num_tokens, [8, 16, 64], [0.0, 0.002, 0.02])
            )
            assert seconds(costs, num_reqs, num_tokens) == pytest.approx([expected])


def test_a_table_of_tensorrt_llm_is_its_sum_within_its_breakpoints(tmp_path: Path) -> None:
    costs = load_costs(file(tmp_path, TENSORRT_LLM))
    for num_reqs in range(2, 9):
        for num_tokens in range(0, 65, 4):
            milliseconds = (
                3.0
                + lerp(num_reqs, [2, 8], [0.0, 1.5])
                + lerp(num_tokens, [0, 16, 64], [1.0, 2.0, 8.0])
            )
            assert seconds(costs, num_reqs, num_tokens) == pytest.approx([milliseconds / 1e3])
    plain = {key: TENSORRT_LLM[key] for key in ("token_counts", "step_time_ms")}
    assert seconds(load_costs(file(tmp_path, plain)), 3, 16) == pytest.approx([0.002])


def test_a_v2_table_of_tensorrt_llm_has_the_untrimmed_step_at_zero_tokens(tmp_path: Path) -> None:
    costs = load_costs(file(tmp_path, TENSORRT_LLM_V2))
    assert (2, 12, 0.006) in costs.target  # 2 requests of 1 + 5 tokens
    assert seconds(costs, 2, 6, 12) == pytest.approx([0.005, 0.006])
    # Measured as a trimmed step too, that one counts.
    assert seconds(costs, 4, 8, 16, 24) == pytest.approx([0.006, 0.007, 0.008])


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_was_read_is_written_the_same(tmp_path: Path, kind: Any) -> None:
    """Equal as costs: another file may say them with another bias, or one cell less."""
    costs = load_costs(file(tmp_path, FOREIGN[kind]))
    facts = replace(FACTS, max_draft_tokens=5, draft=None)
    path = tmp_path / "again.json"
    save_profile(path, CostProfile(costs, facts, "2026"), kind)
    again = load_costs(path)
    for num_reqs, num_tokens, value in again.target:
        assert seconds(costs, num_reqs, num_tokens) == pytest.approx([value])
    for num_reqs, num_tokens, value in costs.target:
        assert seconds(again, num_reqs, num_tokens) == pytest.approx([value])


def test_the_diagonal_keeps_whole_blocks_with_their_drafting(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_profile(path, PROFILE, "sglang")
    data = json.loads(path.read_text())
    assert data["sample_batch_tokens"] == [8, 16, 32, 64, 128]
    assert data["max_batch_tokens"] == 128
    rates = [1 / whole(PROFILE, r, 8 * r) for r in (1, 2, 4, 8, 16)]
    assert data["sample_steps_per_sec"] == pytest.approx(rates)


@pytest.mark.parametrize("kind", ["sglang-additive", "tensorrt-llm"])
def test_a_sum_is_exported_without_loss(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "costs.json"
    save_profile(path, PROFILE, kind)
    again = load_costs(path)
    for num_reqs, num_tokens, _ in PROFILE.costs.target:
        expected = whole(PROFILE, num_reqs, num_tokens)
        assert seconds(again, num_reqs, num_tokens) == pytest.approx([expected])


@settings(max_examples=50, deadline=None)
@given(rows(rising=False))
def test_any_table_makes_lawful_additive_ones(found: dict[int, dict[int, float]]) -> None:
    profile = CostProfile(made(found), FACTS, "2026")
    data = foreign_costs.write("sglang-additive", profile)
    assert data["bias_seconds"] > 0
    assert min(data["alpha_seconds"]) == 0 == data["theta_seconds"][0]
    assert (np.diff(data["theta_seconds"]) >= 0).all()
    foreign_costs.read("sglang-additive", data)
    data = foreign_costs.write("tensorrt-llm", profile)
    assert min(data["step_time_ms"]) > 0
    assert min(data["batch_overhead_ms"]) >= 0
    foreign_costs.read("tensorrt-llm", data)


def test_a_v2_table_keeps_to_what_tensorrt_llm_accepts() -> None:
    reqs = tuple(2**i for i in range(9))
    profile = replace(PROFILE, costs=table(reqs, (1, 2, 3, 4, 5, 6, 7, 8)))
    data = foreign_costs.write("tensorrt-llm-v2", profile)
    assert data["engine_fingerprint_sha256"] == digest(data["engine_fingerprint"])
    assert data["engine_fingerprint"]["rank_local_graph_batch_sizes"] == list(reqs)
    trimmed, cells = 0, []
    for key, cost_table in data["cost_tables"].items():
        zero, *counts = cost_table["token_counts"]
        assert zero == 0
        assert counts == sorted(set(counts))
        assert all(int(key) <= count < 8 * int(key) for count in counts)
        assert len(counts) <= 4
        trimmed += len(counts)
        pairs = zip(cost_table["token_counts"], cost_table["step_time_ms"], strict=True)
        cells += [(int(key), count, value) for count, value in pairs]
    assert trimmed <= 32
    names = ("rank_local_graph_batch_size", "rank_local_verifier_budget", "step_time_ms")
    assert cells == [tuple(cell[name] for name in names) for cell in data["measurements"]]
    (_, _, milliseconds), *_ = cells
    assert milliseconds == pytest.approx(1e3 * whole(profile, 1, 8))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("sglang", {"sample_batch_tokens": []}, "sample_batch_tokens must be a list"),
        ("sglang", {"sample_batch_tokens": [8, 8, 16, 32]}, "sample_batch_tokens must hold rising"),
        ("sglang", {"sample_batch_tokens": [8, 16.0, 32, 64]}, "sample_batch_tokens must hold"),
        ("sglang", {"sample_steps_per_sec": [1.0]}, "sample_steps_per_sec must be a list of 4"),
        (
            "sglang",
            {"sample_steps_per_sec": [1, 1, 1, 0]},
            "sample_steps_per_sec must be finite and pos",
        ),
        ("sglang", {"max_batch_tokens": 63}, "max_batch_tokens must be an integer from 64"),
        ("sglang-additive", {"bias_seconds": 0}, "bias_seconds must be finite and positive"),
        ("sglang-additive", {"bias_seconds": None}, "bias_seconds must be finite"),
        ("sglang-additive", {"alpha_seconds": [0, -1, 0]}, "alpha_seconds must be finite and not"),
        ("sglang-additive", {"bs_probes": [0, 1, 2]}, "bs_probes must hold rising integers from 1"),
        ("sglang-additive", {"m_probes": None}, "m_probes must be a list"),
        ("sglang-additive", {"theta_seconds": [0, 1]}, "theta_seconds must be a list of 3"),
        ("tensorrt-llm", {"step_time_ms": [1.0, 2.0, "3"]}, "step_time_ms must be finite"),
        ("tensorrt-llm", {"step_time_ms": [0, 2, 8]}, "step_time_ms must be finite and positive"),
        ("tensorrt-llm", {"fixed_overhead_ms": -1.0}, "fixed_overhead_ms must be finite"),
        ("tensorrt-llm", {"batch_overhead_ms": [1.0]}, "batch_overhead_ms must be a list of 2"),
        ("tensorrt-llm", {"batch_sizes": [8, 2]}, "batch_sizes must hold rising"),
        ("tensorrt-llm-v2", {"schema_version": 3}, "schema_version must be 2"),
        ("tensorrt-llm-v2", {"cost_tables": {}}, "cost_tables must be an object"),
        ("tensorrt-llm-v2", {"cost_tables": {"02": {}}}, r"cost_tables\['02'\] must be a table"),
        ("tensorrt-llm-v2", {"cost_tables": {"2": {}}}, r"cost_tables\['2'\]: token_counts must"),
        ("tensorrt-llm-v2", {"engine_fingerprint": {}}, "engine_fingerprint.max_draft_len"),
        ("tensorrt-llm-v2", {"engine_fingerprint_sha256": "0"}, "engine_fingerprint_sha256 is not"),
    ],
)
def test_a_damaged_foreign_file_is_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    path = file(tmp_path, FOREIGN[kind] | change)
    with pytest.raises(ModelError, match=message) as caught:
        load_costs(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "emberline profile" in str(caught.value)


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    save_profile(link, PROFILE)
    assert link.is_symlink()
    assert load_profile(target) == PROFILE


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # so that nobody waits for the other end
    save_profile(pipe, PROFILE)
    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1 << 16))["format"]
    os.close(reader)
