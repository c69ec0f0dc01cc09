"""One finished request against a teacher-forced rescoring of it: how far apart, and what to log.

Owns the request that rescores, the comparison and the reproduction. Must not know when it is done.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberline.types import LOGPROB_FLOOR, Request, SamplingParams, TokenLogprobs

LOWEST_PRIORITY = 2**31 - 1
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class Finished:
    """What a request was answered with."""

    request: Request  # as the client asked it
    token_ids: tuple[int, ...]  # emitted, at least one
    logprobs: tuple[float, ...]  # raw, one a token

    def scoring_request(self, request_id: str) -> Request:
        """Scores prompt and answer as one prompt. From its start, so that nothing is cached."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        ids = self.request.prompt_token_ids + self.token_ids
        return Request(request_id, ids, params, priority=LOWEST_PRIORITY)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Emitted values beside rescored ones, token by token of the answer."""

    rescored: tuple[float, ...]
    abs_diffs: tuple[float, ...]  # finite

    @property
    def max_abs_diff(self) -> float:
        """The largest difference, in nats."""
        return max(self.abs_diffs)


def compare(finished: Finished, records: Sequence[TokenLogprobs | None]) -> Comparison:
    """Compare with the records of the scoring request. Values that are missing differ the most."""
    answer = records[len(finished.request.prompt_token_ids) :]
    rescored = tuple(math.nan if record is None else record.logprob for record in answer)
    pairs = zip(finished.logprobs, rescored, strict=True)
    return Comparison(rescored, tuple(_distance(emitted, again) for emitted, again in pairs))


def reproduction(finished: Finished, comparison: Comparison, tolerance: float) -> str:
    """One line of JSON that lets the difference be seen again."""
    diffs = comparison.abs_diffs
    position = next(i for i, diff in enumerate(diffs) if diff > tolerance)
    return json.dumps(
        {
            "request_id": finished.request.request_id,
            "position": position,  # the first that is too far off, in the answer
            "emitted": _finite(finished.logprobs[position]),
            "rescored": _finite(comparison.rescored[position]),
            "max_abs_diff": comparison.max_abs_diff,
            "num_over_tolerance": sum(diff > tolerance for diff in diffs),
            "tolerance": tolerance,
            "params": _given(finished.request.params),
            "choice": finished.request.choice,
            "prompt_token_ids": finished.request.prompt_token_ids,
            "output_token_ids": finished.token_ids,
        }
    )


def _given(params: SamplingParams) -> dict[str, object]:
    """The options that are not at their default."""
    given: dict[str, object] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value == getattr(_DEFAULTS, field.name):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        given[field.name] = dict(value) if isinstance(value, Mapping) else value
    return given


def _distance(emitted: float, rescored: float) -> float:
    distance = abs(max(emitted, LOGPROB_FLOOR) - max(rescored, LOGPROB_FLOOR))
    return distance if math.isfinite(distance) else -LOGPROB_FLOOR


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else max(value, LOGPROB_FLOOR)
