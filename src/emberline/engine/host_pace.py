"""How long a step takes the host by itself: a device that is done sooner waits for that.

Owns the estimate. Must not know what the host does.
"""

from __future__ import annotations

RATE = 0.1  # of the newest step in the mean
MOST = 2.0  # times the mean that a step counts for: a pause says little about the next one
IDLE_SECONDS = 0.05  # what takes longer is no step but a lack of work, or a capture


class HostPace:
    """A moving average of the seconds between the beginnings of two steps, less what was waited."""

    def __init__(self) -> None:
        self.seconds = 0.0  # 0: not known yet
        self._began: float | None = None
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Note that the host has stood still for the device."""
        self._waited += seconds

    def begin(self, now: float) -> None:
        """Note that a step begins, `now` in seconds of any steady clock."""
        if self._began is not None:
            taken = now - self._began - self._waited
            if 0.0 < taken < IDLE_SECONDS:
                known = self.seconds
                self.seconds += RATE * (min(taken, MOST * known) - known) if known else taken
        self._began, self._waited = now, 0.0
