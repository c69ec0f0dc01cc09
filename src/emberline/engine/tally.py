"""Exact counts of an engine since its start. Knows no requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from emberline.types import SpeculationStats, StepCounts


@dataclass(slots=True)
class Tally:
    """What `EngineSnapshot` reports as totals; fields of the same names mean the same.

    Verify steps are kept by what they did: a step's are counted at once, and few kinds come.
    """

    num_engine_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: Counter[StepCounts] = field(default_factory=Counter)  # verify steps of every request

    @property
    def verified(self) -> SpeculationStats:
        """What verify steps did, of all requests together."""
        return SpeculationStats(self.steps)

    def accepted_per_pos(self, width: int) -> tuple[int, ...]:
        """Accepted drafts by their position in the block, of at least `width` positions."""
        width = max([width, *(accepted for _, _, accepted, _, _ in self.steps)])
        reached = [0] * width
        for (_, _, accepted, _, _), times in self.steps.items():
            for position in range(accepted):
                reached[position] += times
        return tuple(reached)
