"""Prometheus metrics under the names that dashboards and gateways already read.

Owns names, labels and buckets. Counters come from the engine's exact totals, times from calls.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from emberline.types import EngineSnapshot, FinishReason, RequestOutput

LABELS = ["model_name", "engine"]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_GAUGES: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for room", lambda s: s.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV pages that running requests hold, 0 to 1",
        lambda s: s.kv_usage,
    ),
    (
        "emberline:kv_cache_cached_perc",
        "Share of the KV pages that only the prefix cache holds, 0 to 1",
        lambda s: s.num_cached_pages_share,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineSnapshot], float]], ...] = (
    ("vllm:num_preemptions", "Requests put back to make room", lambda s: s.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens, cached ones included", lambda s: s.prompt_tokens),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.prefix_query_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        lambda s: s.prefix_hit_tokens,
    ),
    ("vllm:generation_tokens", "Tokens emitted", lambda s: s.generation_tokens),
    ("vllm:spec_decode_num_drafts", "Verify steps", lambda s: s.num_verify_steps),
    ("sglang:spec_verify_calls", "Verify steps", lambda s: s.num_verify_steps),
    ("vllm:spec_decode_num_draft_tokens", "Drafts verified", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted", lambda s: s.num_accepted_tokens),
    (
        "emberline:verify_emitted_tokens",
        "Tokens emitted by verify steps",
        lambda s: s.num_emitted_tokens,
    ),
    ("emberline:engine_steps", "Steps of the engine", lambda s: s.num_engine_steps),
)


class _EngineCollector(Collector):
    """Reads the engine's totals whenever it is scraped."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], labels: list[str]) -> None:
        self._snapshot, self._labels = snapshot, labels

    def collect(self) -> Iterable[Metric]:
        """The current values."""
        now = self._snapshot()
        for name, what, value in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=LABELS)
            gauge.add_metric(self._labels, value(now))
            yield gauge
        for name, what, value in _COUNTERS:
            counter = CounterMetricFamily(name, what, labels=LABELS)
            counter.add_metric(self._labels, value(now))
            yield counter
        yield self._per_position(now)

    def _per_position(self, now: EngineSnapshot) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position in the block",
            labels=[*LABELS, "position"],
        )
        for position, count in enumerate(now.accepted_per_pos):
            family.add_metric([*self._labels, str(position)], count)
        return family


class _TokenTimes(Collector):
    """A histogram that takes many equal values at once: tokens come by the dozen."""

    def __init__(self, name: str, what: str, labels: Sequence[str]) -> None:
        self._name, self._what, self._labels = name, what, labels
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """Add a value so many times."""
        self._counts[bisect_left(_SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterable[Metric]:
        """The values so far."""
        family = HistogramMetricFamily(self._name, self._what, labels=LABELS)
        limits = map(floatToGoString, (*_SECONDS, float("inf")))
        buckets = [*zip(limits, accumulate(self._counts), strict=True)]
        family.add_metric(self._labels, buckets, self._sum)
        yield family


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.labels = labels = {"model_name": model_name, "engine": "0"}
        self.registry.register(_EngineCollector(snapshot, list(labels.values())))

        def histogram(name: str, what: str) -> Histogram:
            family = Histogram(name, what, LABELS, buckets=_SECONDS, registry=self.registry)
            return family.labels(**labels)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token"
        )
        self.inter_token = _TokenTimes(
            "vllm:inter_token_latency_seconds",
            "Time a token after the first, a step's time shared among its tokens",
            list(labels.values()),
        )
        self.registry.register(self.inter_token)
        self.end_to_end = histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end"
        )
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self.finished = {
            reason: success.labels(**labels, finished_reason=str(reason)) for reason in FinishReason
        }

        self._slow_readers = Counter(
            "emberline:slow_readers_cut",
            "Connections that were cut because their client did not read",
            LABELS,
            registry=self.registry,
        ).labels(**labels)

    def slow_reader_cut(self) -> None:
        """Count a connection that was cut because its client did not read."""
        self._slow_readers.inc()

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)

    def call(self, num_requests: int) -> CallMetrics:
        """Start the clock of one call."""
        return CallMetrics(self, num_requests)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When the server had a request's tokens, in seconds."""

    first_token: float | None = None  # from the call's arrival; None: none came
    generation: float = 0.0  # from the first token to the last


class CallMetrics:
    """Times of one call's requests."""

    def __init__(self, server: ServerMetrics, num_requests: int) -> None:
        self._server = server
        self._began = time.monotonic()
        self._first: list[float | None] = [None] * num_requests
        self._latest: list[float | None] = [None] * num_requests
        self._open: set[int] = set()

    def admitted(self) -> None:
        """The engine has taken every request of the call."""
        self._open = set(range(len(self._latest)))

    def observe(self, index: int, output: RequestOutput) -> None:
        """Record what an output of request `index` shows."""
        now, latest = time.monotonic(), self._latest[index]
        if output.token_ids:
            if latest is None:
                self._first[index] = now
                self._server.first_token.observe(now - self._began)
            else:
                count = len(output.token_ids)
                self._server.inter_token.observe((now - latest) / count, count)
            self._latest[index] = now
        if output.finish_reason is not None:
            self._end(index, output.finish_reason)

    def times(self, index: int) -> RequestTimes:
        """What has been seen of request `index` so far."""
        first, latest = self._first[index], self._latest[index]
        if first is None or latest is None:
            return RequestTimes()
        return RequestTimes(first - self._began, latest - first)

    def close(self) -> None:
        """The call is over; what was admitted and has not finished was aborted."""
        for index in sorted(self._open):
            self._end(index, FinishReason.ABORT)

    def _end(self, index: int, reason: FinishReason) -> None:
        self._open.discard(index)
        self._server.end_to_end.observe(time.monotonic() - self._began)
        self._server.finished[reason].inc()
