"""Prometheus metrics of the live audit. Owns their names and buckets."""

from __future__ import annotations

from collections import Counter as Totals
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Result = Literal["passed", "failed", "error", "dropped"]
"""Of a sampled request: within the tolerance, beyond it, could not be rescored, never was."""

_NATS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class AuditMetrics:
    """What the audit has found since the start.

    Args:
        registry: where they are shown.
        labels: of the served model, by name.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._totals: Totals[str] = Totals()
        self._max_abs_diff = 0.0
        names = list(labels)
        results = Counter(
            "emberline:logprob_audit_requests",
            "Requests that were sampled by the live audit, by result",
            [*names, "result"],
            registry=registry,
        )
        self._results = {
            result: results.labels(**labels, result=result) for result in get_args(Result)
        }
        self._tokens = Counter(
            "emberline:logprob_audit_prompt_tokens",
            "Tokens that the live audit has sent through the engine",
            names,
            registry=registry,
        ).labels(**labels)
        self._largest = Gauge(
            "emberline:logprob_audit_max_abs_diff",
            "Largest difference between an emitted and a rescored log-probability, in nats",
            names,
            registry=registry,
        ).labels(**labels)
        self._diffs = Histogram(
            "emberline:logprob_audit_abs_diff",
            "Differences between emitted and rescored log-probabilities, a token each, in nats",
            names,
            buckets=_NATS,
            registry=registry,
        ).labels(**labels)
        self._waiting = Gauge(
            "emberline:logprob_audit_backlog",
            "Sampled requests that wait to be rescored",
            names,
            registry=registry,
        ).labels(**labels)

    def count(self, result: Result) -> None:
        """Count a sampled request."""
        self._totals[result] += 1
        self._results[result].inc()

    def rescored(self, num_tokens: int) -> None:
        """Count what a rescoring sent through the engine."""
        self._tokens.inc(num_tokens)

    def compared(self, abs_diffs: Iterable[float]) -> None:
        """Note the differences of a request's tokens, all finite."""
        for diff in abs_diffs:
            self._diffs.observe(diff)
            self._max_abs_diff = max(self._max_abs_diff, diff)
        self._largest.set(self._max_abs_diff)

    def backlog(self, length: int) -> None:
        """Note how many requests wait."""
        self._waiting.set(length)

    def totals(self) -> dict[str, object]:
        """Results so far, and the largest difference."""
        counts = {result: self._totals[result] for result in get_args(Result)}
        return {**counts, "max_abs_diff": self._max_abs_diff}
