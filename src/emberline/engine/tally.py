"""Exact counts of an engine since its start. Knows no requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from emberline.types import StepCounts


@dataclass(slots=True)
class Tally:
    """What `EngineSnapshot` reports as totals; fields of the same names mean the same.

    Kept as sums, for they are asked for at every step.
    """

    num_engine_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_verify_steps: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    _by_accepted: dict[int, int] = field(default_factory=Counter)  # verify steps

    def add(self, steps: Mapping[StepCounts, int]) -> None:
        """Count verify steps, each kind so many times."""
        for (_, verified, accepted, emitted, _), times in steps.items():
            self.num_verify_steps += times
            self.num_emitted_tokens += emitted * times
            self.num_draft_tokens += verified * times
            self.num_accepted_tokens += accepted * times
            self._by_accepted[accepted] += times

    def accepted_per_pos(self, width: int) -> tuple[int, ...]:
        """Accepted drafts by their position in the block, of at least `width` positions."""
        reached = [0] * max([width, *self._by_accepted])
        for accepted, times in self._by_accepted.items():
            for position in range(accepted):
                reached[position] += times
        return tuple(reached)
