"""Every figure's definition, on timelines made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberline.bench.acceptance import Acceptance
from emberline.bench.client import Failure, RequestRecord
from emberline.bench.metrics import (
    LevelRun,
    LevelSummary,
    e2e,
    in_flight,
    itl,
    spread,
    summarize,
    tpot,
    ttft,
)
from emberline.bench.settings import ClosedLoop

# Starts at 10.0; 1 token at 10.5, then steps of 3 and 2 tokens; the answer's end is its last chunk.
RECORD = RequestRecord(
    index=0,
    start=10.0,
    sent=10.1,
    end=11.0,
    chunk_times=(10.5, 10.8, 11.0),
    prompt_tokens=7,
    completion_tokens=6,
    cached_tokens=2,
    finish_reason="length",
)
FAILED = RequestRecord(index=1, start=10.0, sent=10.0, end=14.0, failure=Failure("http_500", "no"))


def summary(*records: RequestRecord, **changes: object) -> LevelSummary:
    run = LevelRun(level=ClosedLoop(2), origin=10.0, records=records)
    return summarize(replace(run, **changes))  # type: ignore[arg-type]


def test_one_request() -> None:
    assert ttft(RECORD) == pytest.approx(0.5)
    assert e2e(RECORD) == pytest.approx(1.0)
    assert itl(RECORD) == pytest.approx([0.3, 0.2])  # of chunks
    assert tpot(RECORD, 6) == pytest.approx(0.5 / 5)  # of tokens
    assert tpot(RECORD, None) is None
    assert tpot(RECORD, 1) is None


def test_an_answer_without_output_has_a_first_token_and_no_gaps() -> None:
    empty = replace(RECORD, chunk_times=(), completion_tokens=1)
    assert ttft(empty) == e2e(empty)
    assert itl(empty) == []
    assert summary(empty).itl_ms is None


def test_the_sums_of_a_level() -> None:
    later = replace(RECORD, index=2, start=11.0, sent=11.0, end=12.0, chunk_times=(11.25, 12.0))
    row = summary(RECORD, later)
    assert (row.ok, row.failed, row.failures) == (2, 0, ())
    assert row.duration_seconds == pytest.approx(2.0)
    assert row.requests_per_second == pytest.approx(1.0)
    assert row.output_tokens_per_second == pytest.approx(12 / 2.0)
    assert row.total_tokens_per_second == pytest.approx((12 + 14) / 2.0)
    assert row.cached_tokens == 4
    assert row.tokens_per_chunk == pytest.approx(12 / 5)
    assert row.counted_by == "usage"
    assert row.finish_reasons == {"length": 2}
    assert row.ttft_ms is not None
    assert row.ttft_ms.mean == pytest.approx((500 + 250) / 2)
    assert row.itl_ms is not None
    assert row.itl_ms.count == 3
    assert row.tpot_ms is not None
    assert row.tpot_ms.median == pytest.approx((100 + 150) / 2)
    assert row.tokens_per_second_per_user == pytest.approx(1000 / 125)
    assert row.send_lag_ms is not None
    assert row.send_lag_ms.max == pytest.approx(100)


def test_failures_count_as_failures_and_nothing_else() -> None:
    row = summary(RECORD, FAILED, replace(FAILED, failure=Failure("timeout", "late")), FAILED)
    assert (row.ok, row.failed) == (1, 3)
    assert [(f.kind, f.count, f.message) for f in row.failures] == [
        ("http_500", 2, "no"),
        ("timeout", 1, "late"),
    ]
    assert row.e2e_ms is not None
    assert row.e2e_ms.count == 1
    assert row.completion_tokens == 6
    assert row.duration_seconds == pytest.approx(4.0)  # they took the server's time
    assert row.in_flight_peak == 4


def test_nothing_answered() -> None:
    row = summary(FAILED)
    assert row.requests_per_second == 0.0
    assert row.ttft_ms is row.tpot_ms is row.itl_ms is row.e2e_ms is None
    assert row.output_tokens_per_second is None
    assert summary().duration_seconds == 0.0


def test_what_the_server_does_not_count_is_unknown() -> None:
    silent = replace(RECORD, prompt_tokens=None, completion_tokens=None, cached_tokens=None)
    for records in ((silent,), (RECORD, silent)):
        row = summary(*records)
        assert row.completion_tokens is row.prompt_tokens is row.cached_tokens is None
        assert row.output_tokens_per_second is row.total_tokens_per_second is None
        assert row.counted_by == "unknown"
    assert summary(silent).tpot_ms is None
    run = LevelRun(level=ClosedLoop(1), origin=10.0, records=(replace(silent, text="a b c"),))
    counted = summarize(run, lambda text: len(text.split()))
    assert counted.counted_by == "tokenizer"
    assert counted.completion_tokens == 3
    assert counted.tpot_ms is not None
    assert counted.tpot_ms.mean == pytest.approx(500 / 2)
    assert counted.prompt_tokens is counted.total_tokens_per_second is None


@pytest.mark.parametrize(
    ("spans", "mean", "peak"),
    [
        ([], 0.0, 0),
        ([(0.0, 2.0)], 1.0, 1),
        ([(0.0, 1.0), (1.0, 2.0)], 1.0, 1),  # one follows the other
        ([(0.0, 2.0), (1.0, 4.0)], 5 / 4, 2),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5, 1),  # idle between
    ],
)
def test_requests_in_flight(spans: list[tuple[float, float]], mean: float, peak: int) -> None:
    assert in_flight(spans) == (pytest.approx(mean), peak)


def test_percentiles_are_interpolated() -> None:
    found = spread([i / 1000 for i in range(1, 12)])
    assert found is not None
    assert (found.count, found.mean, found.median) == (11, pytest.approx(6), pytest.approx(6))
    assert found.p90 == pytest.approx(10)
    assert found.p99 == pytest.approx(10.9)
    assert found.max == pytest.approx(11)


def test_acceptance_weighs_steps_and_prefers_answers_to_counters() -> None:
    def with_steps(steps: int, emitted: int) -> RequestRecord:
        told = Acceptance(source="answer", steps=steps, emitted=emitted, verified=9, accepted=1)
        return replace(RECORD, acceptance=told)

    counters = Acceptance(source="/metrics", steps=1, emitted=9)
    row = summary(with_steps(1, 4), with_steps(9, 18), RECORD, counters=counters)
    assert row.acceptance_length == pytest.approx(22 / 10)  # not the mean of 4 and 2
    assert row.acceptance is not None
    assert row.acceptance.source == "answer"
    assert row.acceptance.rate == pytest.approx(2 / 18)
    assert summary(RECORD, counters=counters).acceptance_length == 9
    assert summary(RECORD).acceptance_length is None
