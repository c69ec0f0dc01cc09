"""How one request fared, as an answer says it: times and speculation, under vLLM's names.

Owns the shape and what each figure means. Must not know where times come from.
"""

from __future__ import annotations

from emberline.server.metrics import RequestTimes
from emberline.server.records import Json
from emberline.types import RequestOutput, SpeculationStats


def request_metrics(times: RequestTimes, last: RequestOutput, num_spec_tokens: int) -> Json:
    """The `metrics` object of an answer with one choice; null where there is no such figure.

    Args:
        times: what the server saw of the request.
        last: its last output.
        num_spec_tokens: most drafts in a block of the server's drafter; 0 without one.
    """
    later = last.num_output_tokens - 1  # tokens after the first
    spent = times.generation
    metrics: Json = {
        "time_to_first_token_ms": _milliseconds(times.first_token),
        "generation_time_ms": None if times.first_token is None else _milliseconds(spent),
        "queue_time_ms": _milliseconds(last.queue_seconds),
        "mean_itl_ms": _milliseconds(spent / later) if later > 0 else None,
        "tokens_per_second": later / spent if later > 0 and spent > 0 else None,
    }
    if num_spec_tokens or last.stats.num_verified:
        metrics["speculative_decoding"] = _speculative_decoding(last.stats, num_spec_tokens)
    return metrics


def _speculative_decoding(stats: SpeculationStats, num_spec_tokens: int) -> Json:
    """Counts that reconcile: the histogram's sum is the steps, its mean the accepted drafts."""
    # A block of a prediction may be longer than any of the drafter's.
    widest = max(num_spec_tokens, len(stats.verified_per_pos))
    histogram = list(stats.accepted_histogram)
    steps = stats.num_steps
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / steps if steps else None,
        "draft_acceptance_rate": stats.acceptance_rate if stats.num_verified else None,
        "acceptance_histogram": histogram + [0] * (widest + 1 - len(histogram)),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_verified,
        "num_spec_tokens": widest,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
