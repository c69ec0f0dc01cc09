"""How fast requests finish: what a client that finds the queue full is told to wait."""

from __future__ import annotations

import math
import time

MAX_ADVICE = 60
_SMOOTHING = 0.2


class Pace:
    """A moving average of the seconds between two finished requests."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = 0.0

    def finished(self, now: float | None = None) -> None:
        """Note that a request has just ended. `now` in seconds, of any steady clock."""
        now = time.monotonic() if now is None else now
        if self._last is not None:
            # Idle hours say nothing about the pace under load.
            gap = min(now - self._last, MAX_ADVICE)
            self._seconds += _SMOOTHING * (gap - self._seconds)
        self._last = now

    def seconds_to_next(self) -> int:
        """Whole seconds until a place is likely to be free, 1 .. 60."""
        return max(1, min(MAX_ADVICE, math.ceil(self._seconds)))
