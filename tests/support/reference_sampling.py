"""Every sampling option in plain Python over one row, as if tokens had come one by one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from emberline.types import SamplingParams


class NearBoundary(Exception):
    """The row is so close to a cut that rounding may decide."""


def processed_by_hand(
    logits: list[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Collection[int] = (),
) -> list[float]:
    """Logits of p for the token after `prompt` and `output`."""
    x = list(logits)
    if params.allowed_token_ids is not None:
        for token_id in set(range(len(x))) - set(params.allowed_token_ids):
            x[token_id] = -math.inf
    for *start, last in params.bad_words:
        if len(start) <= len(output) and [*output][len(output) - len(start) :] == start:
            x[last] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in {*eos, *params.stop_token_ids}:
            x[token_id] = -math.inf
    for token_id, bias in params.logit_bias.items():
        x[token_id] += bias
    for token_id in {*prompt, *output}:
        over = x[token_id] > 0
        x[token_id] *= 1 / params.repetition_penalty if over else params.repetition_penalty
    for token_id in output:
        x[token_id] -= params.frequency_penalty
    for token_id in set(output):
        x[token_id] -= params.presence_penalty
    if params.temperature == 0:
        return x
    x = [value / params.temperature for value in x]
    return truncated_by_hand(x, params.min_p, params.top_k, params.top_p)


def truncated_by_hand(x: list[float], min_p: float, top_k: int, top_p: float) -> list[float]:
    def keep(ids: Sequence[int]) -> None:
        for i in set(range(len(x))) - set(ids):
            x[i] = -math.inf

    def probs() -> list[float]:
        best = max(x)
        weights = [math.exp(value - best) for value in x]
        total = math.fsum(weights)
        return [weight / total for weight in weights]

    x = list(x)
    if min_p > 0:
        p = probs()
        least = min_p * max(p)
        if any(abs(value - least) < 1e-9 for value in p if min_p < 1):
            raise NearBoundary
        keep([i for i, value in enumerate(p) if value >= least])
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if top_k > 0:
        keep(order[:top_k])
    if top_p < 1:
        p, mass, kept = probs(), 0.0, []
        for i in order:
            if kept and abs(mass - top_p) < 1e-9:
                raise NearBoundary
            if mass >= top_p:
                break
            kept.append(i)
            mass += p[i]
        keep(kept)
    return x
