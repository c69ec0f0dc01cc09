"""Exact counts of an engine since its start. Knows no requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from emberline.types import StepCounts


@dataclass(slots=True)
class Tally:
    """What `EngineSnapshot` reports as totals; fields of the same names mean the same."""

    num_engine_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_verify_steps: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    by_accepted: Counter[int] = field(default_factory=Counter)  # verify steps by accepted drafts

    def add(self, counts: StepCounts) -> None:
        """Count a verify step of one request."""
        _, verified, accepted, emitted, _ = counts
        self.num_verify_steps += 1
        self.num_emitted_tokens += emitted
        self.num_draft_tokens += verified
        self.num_accepted_tokens += accepted
        self.by_accepted[accepted] += 1

    def accepted_per_pos(self, width: int) -> tuple[int, ...]:
        """Accepted drafts by their position in the block, of at least `width` positions."""
        width = max(width, *self.by_accepted, 0)
        reached = [0] * width
        for accepted, times in self.by_accepted.items():
            for position in range(accepted):
                reached[position] += times
        return tuple(reached)
