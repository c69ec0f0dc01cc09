"""Step costs computed from what a model and a processor are, where none could be measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from emberline.verify.step_cost import Point, StepCosts


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step takes as long as the slower of reading weights and multiplying, and then some.

    The defaults: 8 billion parameters with 8 KV heads of 128 in 32 layers, a draft of five such
    layers and the head, all in bf16, on one H200 by its data sheet. Overheads are assumptions.
    """

    params: float = 8.0e9
    draft_params: float = 1.6e9
    bytes_per_param: float = 2.0
    kv_bytes: float = 131_072.0  # a token of context, read by every step
    context: float = 1_000.0  # tokens of each request
    bandwidth: float = 4.8e12  # bytes a second
    flops: float = 9.9e14  # a second, dense
    overhead: float = 1.0e-3  # seconds a step, whatever it holds
    draft_overhead: float = 2.0e-4  # seconds a block
    draft_token: float = 2.0e-5  # seconds a draft: the sequential head runs once for each
    bucket: int = 1  # tokens of a step are padded to a multiple of this, as captured graphs are

    def target_seconds(self, num_reqs: int, num_tokens: int) -> float:
        """Seconds of everything but drafting."""
        padded = -(-num_tokens // self.bucket) * self.bucket
        attention = num_reqs * self.context * self.kv_bytes / self.bandwidth
        return self.overhead + attention + self._pass_seconds(self.params, padded)

    def draft_seconds(self, num_reqs: int, num_drafts: int) -> float:
        """Seconds to draft a block for each of so many requests."""
        sequential = self.draft_overhead + num_drafts * self.draft_token
        return sequential + self._pass_seconds(self.draft_params, num_reqs * num_drafts)

    def costs(self, loads: Iterable[int], num_draft_tokens: int) -> StepCosts:
        """The table for these numbers of requests (and one, for a lone draft)."""
        target: list[Point] = []
        draft: list[Point] = []
        for num_reqs in sorted({1, *loads}):
            most = num_reqs * (1 + num_draft_tokens)
            edges = np.arange(0, most + self.bucket, self.bucket)  # last of a bucket, first of next
            counts = {num_reqs, most, round(self.knee), round(self.knee) + 1}
            if self.bucket > 1:
                counts |= {int(edge) + side for edge in edges for side in (0, 1)}
            target += [
                (num_reqs, count, self.target_seconds(num_reqs, count))
                for count in sorted(counts)
                if num_reqs <= count <= most
            ]
            draft += [
                (num_reqs, count, self.draft_seconds(num_reqs, count))
                for count in range(1, num_draft_tokens + 1)
            ]
        return StepCosts(tuple(target), tuple(draft))

    @property
    def summary(self) -> str:
        """What it is of, in a line."""
        padding = f", steps padded to {self.bucket} tokens" if self.bucket > 1 else ""
        return (
            f"{self.params:.3g} parameters, {self.bandwidth:.3g} B/s, {self.flops:.3g} FLOP/s, "
            f"context {self.context:,.0f}{padding}"
        )

    @property
    def knee(self) -> float:
        """Tokens from which on multiplying takes longer than reading weights."""
        return self.flops * self.bytes_per_param / (2 * self.bandwidth)

    def _pass_seconds(self, params: float, num_tokens: float) -> float:
        reading = params * self.bytes_per_param / self.bandwidth
        return max(reading, 2 * params * num_tokens / self.flops)
