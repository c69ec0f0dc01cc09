"""What speculation did in one step, block by block: for calibration and for replaying policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """One request's block of one step."""

    request_id: str
    confidence: tuple[float, ...]  # of every draft drawn, given that those before it survive
    num_verified: int
    num_accepted: int  # of those, before the run is cut at a stop


Observer = Callable[[Sequence[BlockTrace]], None]
