"""What the times of requests amount to: the definition of every figure that is reported.

Owns the arithmetic, which docs/bench.md states in words. Knows nothing of HTTP. Only requests that
were answered in full count, but for `failed` and the requests in flight, which count all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from emberline.bench import acceptance
from emberline.bench.acceptance import Acceptance
from emberline.bench.client import RequestRecord
from emberline.bench.settings import Level

TokenCounter = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRun:
    """What one level of load gave. Times are `time.perf_counter()` seconds."""

    level: Level
    origin: float  # the level's start
    records: tuple[RequestRecord, ...]
    client_seconds: float = 0.0  # processor time of this program within the level
    interrupted: bool = False
    num_cut: int = 0  # requests in flight at an interruption; they have no record
    counters: Acceptance | None = None  # what the server's /metrics say of the level


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution in milliseconds; percentiles are interpolated linearly."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """Failures of one kind, and what the first of them said."""

    kind: str
    count: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """A row of the report. None: not known, or of no requests."""

    level: Level
    ok: int
    failed: int
    failures: tuple[FailureCount, ...]
    interrupted: bool
    num_cut: int
    duration_seconds: float
    in_flight_mean: float
    in_flight_peak: int
    requests_per_second: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    counted_by: str  # usage, tokenizer or unknown: where completion_tokens come from
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None
    tokens_per_second_per_user: float | None
    tokens_per_chunk: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    send_lag_ms: Spread | None
    finish_reasons: dict[str, int]
    acceptance: Acceptance | None
    acceptance_length: float | None
    client_busy: float  # share of the level's time in which this program computed


def ttft(record: RequestRecord) -> float:
    """Time to first token: from the clock's start to the first chunk that carries output.

    An answer without any output (its first token ends it) counts to its end.
    """
    first = record.chunk_times[0] if record.chunk_times else record.end
    return first - record.start


def e2e(record: RequestRecord) -> float:
    """End-to-end latency: from the clock's start to the answer's last output or finish_reason."""
    return record.end - record.start


def tpot(record: RequestRecord, num_tokens: int | None) -> float | None:
    """Time per output token after the first: (e2e - ttft) / (n - 1); None for n < 2 or unknown.

    The mean over tokens, however many of them a chunk carries.
    """
    if num_tokens is None or num_tokens < 2:
        return None
    return (e2e(record) - ttft(record)) / (num_tokens - 1)


def itl(record: RequestRecord) -> list[float]:
    """Inter-token latencies as a reader sees them: gaps between chunks that carry output.

    Under speculation a chunk carries a step's tokens, so this is the time of a step, not of a
    token. Chunks that come together are 0 apart.
    """
    times = record.chunk_times
    return [later - earlier for earlier, later in pairwise(times)]


def in_flight(spans: Iterable[tuple[float, float]]) -> tuple[float, int]:
    """Spans at the same time: the mean from the first start to the last end, and the peak."""
    spans = list(spans)
    if not spans:
        return 0.0, 0
    # At one moment ends come before starts: a request that follows another is not beside it.
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = sum(end - start for start, end in spans)
    return (busy / whole if whole else float(len(spans))), peak


def spread(seconds: Sequence[float]) -> Spread | None:
    """The distribution of times in seconds; None of none."""
    if not seconds:
        return None
    values = 1000 * np.asarray(seconds)
    median, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Spread(
        count=len(seconds),
        mean=float(values.mean()),
        median=median,
        p90=p90,
        p99=p99,
        max=float(values.max()),
    )


def summarize(run: LevelRun, count_tokens: TokenCounter | None = None) -> LevelSummary:
    """The figures of a level.

    `count_tokens` counts the texts of answers for which the server gave no usage; without it their
    length is unknown, and so are the sums that they belong to.
    """
    ok = [record for record in run.records if record.failure is None]
    counts = [_completion_tokens(record, count_tokens) for record in ok]
    completion, prompt = _sum(counts), _sum([record.prompt_tokens for record in ok])
    seconds = max((record.end for record in run.records), default=run.origin) - run.origin
    mean, peak = in_flight((record.start, record.end) for record in run.records)
    per_token = [value for value in map(tpot, ok, counts) if value is not None]
    tpots = spread(per_token)
    num_chunks = sum(len(record.chunk_times) for record in ok)
    reported = acceptance.total(r.acceptance for r in ok if r.acceptance is not None)
    speculated = reported or run.counters
    return LevelSummary(
        level=run.level,
        ok=len(ok),
        failed=len(run.records) - len(ok),
        failures=_failures(run.records),
        interrupted=run.interrupted,
        num_cut=run.num_cut,
        duration_seconds=seconds,
        in_flight_mean=mean,
        in_flight_peak=peak,
        requests_per_second=len(ok) / seconds if seconds else 0.0,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=_sum([record.cached_tokens for record in ok]),
        counted_by=_counted_by(ok, counts),
        output_tokens_per_second=_rate(completion, seconds),
        total_tokens_per_second=_rate(_sum([prompt, completion]), seconds),
        tokens_per_second_per_user=1000 / tpots.median if tpots and tpots.median else None,
        tokens_per_chunk=_rate(completion, num_chunks),
        ttft_ms=spread([ttft(record) for record in ok]),
        tpot_ms=tpots,
        itl_ms=spread([gap for record in ok for gap in itl(record)]),
        e2e_ms=spread([e2e(record) for record in ok]),
        send_lag_ms=spread([record.sent - record.start for record in run.records]),
        finish_reasons=dict(Counter(str(record.finish_reason) for record in ok)),
        acceptance=speculated,
        acceptance_length=speculated.length if speculated else None,
        client_busy=run.client_seconds / seconds if seconds else 0.0,
    )


def _completion_tokens(record: RequestRecord, count_tokens: TokenCounter | None) -> int | None:
    if record.completion_tokens is not None or count_tokens is None or record.text is None:
        return record.completion_tokens
    return count_tokens(record.text)


def _counted_by(ok: Sequence[RequestRecord], counts: Sequence[int | None]) -> str:
    if None in counts or not ok:
        return "unknown"
    return "usage" if all(r.completion_tokens is not None for r in ok) else "tokenizer"


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum, unknown if a part is or if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _rate(count: int | None, per: float) -> float | None:
    return count / per if count is not None and per else None


def _failures(records: Sequence[RequestRecord]) -> tuple[FailureCount, ...]:
    found = [record.failure for record in records if record.failure is not None]
    return tuple(
        FailureCount(
            kind=kind,
            count=count,
            message=next(failure.message for failure in found if failure.kind == kind),
        )
        for kind, count in Counter(failure.kind for failure in found).most_common()
    )
