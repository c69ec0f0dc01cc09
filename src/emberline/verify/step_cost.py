"""What a step costs on this machine: seconds against requests, tokens and drafts.

Owns the table and its lookup. Must not know how it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds, interpolated between the points and extended past the last ones."""

    target: tuple[tuple[int, int, float], ...]  # (requests, tokens, seconds)
    draft: tuple[tuple[int, int, float], ...]  # (requests that draft, drafts a block, seconds)

    def target_seconds(self, num_reqs: int, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of everything but drafting, for steps of so many tokens. [N] -> [N]."""
        raise NotImplementedError

    def draft_seconds(self, num_reqs: int, num_drafts: int) -> float:
        """Seconds to draft; 0 when nobody does."""
        raise NotImplementedError
