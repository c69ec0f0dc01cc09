"""What a GPU's step is broken down into, from spans that are known."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from emberline.types import SamplingParams

from gpu import breakdown
from gpu.breakdown import (
    Needs,
    Span,
    activity,
    answer_length,
    busy_seconds,
    run_steps,
    waiting_seconds,
)
from gpu.breakdown_models import Subject, numbers, random_subject
from gpu.host_parts import CALLS, HostParts

STEPS = 6


@pytest.fixture(scope="module")
def subject() -> Subject:
    tokens = answer_length(STEPS, 8)
    return random_subject("tiny", "cpu", "float32", "threshold", 3, tokens)


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 1), (2, 4)], 3), ([(2, 4), (0, 3)], 4), ([(0, 9), (1, 2), (3, 4)], 9)],
)
def test_time_in_which_something_ran(spans: list[tuple[float, float]], length: float) -> None:
    assert busy_seconds(spans) == length


def test_activity_of_steps() -> None:
    # Two steps of a model of two layers: a kernel a layer, and one more a step.
    layer = [Span("layer", t, t + 0.25, int(t)) for t in (0.0, 0.25, 1.0, 1.25)]
    spans = [*layer, Span("head", 0.5, 0.75, 0), Span("head", 1.5, 2.0, 1)]
    seen = activity(spans, Counter({"cudaGraphLaunch": 2}), 2, 2)
    assert seen.launches == 3
    assert seen.layer_launches == 1
    assert seen.calls == {"cudaGraphLaunch": 1}
    assert seen.busy == pytest.approx(0.875)
    assert seen.idle == pytest.approx(0.125)
    assert seen.waits == pytest.approx(0.125)
    assert [name for name, _, _ in seen.by_name] == ["layer", "head"]


def test_gaps_within_a_launch_are_not_the_hosts() -> None:
    spans = [Span("a", 0.0, 1.0, 7), Span("b", 2.0, 3.0, 7), Span("a", 3.5, 4.0, 8)]
    # A kernel that starts early overlaps the one before it.
    spans.append(Span("b", 3.75, 5.0, 8))
    assert waiting_seconds(spans) == pytest.approx(0.5)


def test_nothing_seen_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing run"):
        activity([], Counter(), 1, 1)


@pytest.mark.parametrize("speculate", [False, True])
def test_steps_are_timed_and_leave_nothing(subject: Subject, speculate: bool) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=answer_length(STEPS, subject.engine.max_draft_tokens),
        ignore_eos=True,
        speculate=speculate,
    )
    steps = run_steps(subject.engine, subject.prompts(3), params, STEPS)
    assert len(steps.walls) == STEPS
    assert (steps.emitted > 3 * STEPS) == speculate
    assert 64 < steps.context < 64 + answer_length(STEPS, 4)
    row = steps.row()
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert row["host_us"] > 0
    assert not subject.engine.has_work
    assert subject.engine.snapshot().kv_usage == 0


def test_a_request_that_ends_is_an_error(subject: Subject) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, speculate=False)
    with pytest.raises(RuntimeError, match="fewer steps"):
        run_steps(subject.engine, subject.prompts(1), params, STEPS)


def test_waiting_is_not_the_hosts_time(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    class Signal:
        def wait(self) -> None:
            breakdown.time.sleep(0.02)

    monkeypatch.setattr(breakdown, "WAITS", ((Signal, "wait"),))
    engine, step = subject.engine, type(subject.engine).step
    monkeypatch.setattr(type(engine), "step", lambda self: (Signal().wait(), step(self))[1])
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    steps = run_steps(engine, subject.prompts(1), params, 3)
    waited = [wall - host for wall, host in zip(steps.walls, steps.hosts, strict=True)]
    assert all(0.019 < seconds < 0.2 for seconds in waited)


def test_bytes_that_a_step_needs(subject: Subject) -> None:
    target = {"model.embed_tokens.weight": (10, 4), "lm_head.weight": (10, 4), "a": (3,)}
    draft = {"markov_head.markov_w1.weight": (10, 2), "b": (5,)}
    assert numbers(target, draft) == (43, 45)
    assert numbers({"model.embed_tokens.weight": (10, 4)}, {}) == (40, 0)
    needs = Needs(target=100, draft=10, kv_token=2, draft_kv_token=1)
    assert needs.step(4, 50, drafts=False) == 100 + 400
    assert needs.step(4, 50, drafts=True) == 110 + 600
    # Three layers of two KV heads of eight, keys and values in float32; the draft has one layer.
    assert subject.needs.kv_token == 3 * 2 * 8 * 2 * 4
    assert subject.needs.draft_kv_token == 2 * 8 * 2 * 4


def test_a_call_is_charged_what_is_its_own() -> None:
    parts = HostParts()
    inner = parts.timed("inner", lambda: time.sleep(0.03))

    def work() -> None:
        inner()
        time.sleep(0.01)
        inner()

    outer = parts.timed("outer", work)
    for _ in range(2):
        outer()
    inner()  # a step of nothing else
    row = parts.row()
    assert list(row) == ["inner", "outer"]
    median, mean = row["inner"]
    assert median >= 60_000 > mean * 0.9 >= 40_000
    median, mean = row["outer"]
    assert 10_000 <= median < 30_000
    assert mean == pytest.approx(median * 2 / 3, rel=0.5)


def test_every_part_of_a_host_is_still_called_so() -> None:
    for owner, function, _ in CALLS:
        assert callable(getattr(owner, function))
    with HostParts().counting():
        pass
