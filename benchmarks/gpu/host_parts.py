"""What the host spends a step on, call by call, without a profiler's weight.

The calls of an engine whose steps run behind the host are wrapped while some steps run. A call's
time is its own: that of wrapped calls inside it is theirs. Must not know tables or files.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from emberline.engine import engine
from emberline.engine.device_flight import DeviceFlight, Landings
from emberline.engine.device_runner import DeviceRunner
from emberline.engine.engine import Engine
from emberline.engine.scheduler import Scheduler
from emberline.engine.standing import StandingBatch

CALLS: tuple[tuple[Any, str, str], ...] = (
    (Engine, "step", "step"),
    (Scheduler, "schedule", "schedule"),
    (DeviceRunner, "launch", "launch"),
    (DeviceRunner, "_plan_drafts", "planner"),
    (DeviceRunner, "upload_state", "upload"),
    (DeviceRunner, "control", "control"),
    (DeviceRunner, "replay", "replay"),
    (Landings, "bring", "download"),
    (Landings, "mark", "event"),
    (DeviceFlight, "read", "read"),
    (torch.cuda.Event, "synchronize", "wait"),
    (StandingBatch, "absorb", "absorb"),
    (StandingBatch, "write", "write"),
    (Engine, "_commit", "commit"),
    (engine, "delta", "outputs"),
)
"""Class or module, its function, and what its time is called."""


@dataclass(slots=True)
class HostParts:
    """Seconds by part, of every outermost call: a step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    _now: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inside: list[float] = field(default_factory=list)  # of wrapped calls, by depth

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its own time added under `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - began
                self._now[name] += taken - self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken
                else:
                    self.steps.append(dict(self._now))
                    self._now.clear()

        return run

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while this lasts."""
        with ExitStack() as stack:
            for owner, function, name in CALLS:
                timed = self.timed(name, getattr(owner, function))
                stack.enter_context(mock.patch.object(owner, function, timed))
            yield

    def row(self) -> dict[str, list[float]]:
        """Median and mean microseconds a step, by part, the longest first."""
        names = {name for step in self.steps for name in step}
        columns = {name: [1e6 * step.get(name, 0.0) for step in self.steps] for name in names}
        parts = {
            name: [round(statistics.median(taken), 1), round(statistics.fmean(taken), 1)]
            for name, taken in columns.items()
        }
        return dict(sorted(parts.items(), key=lambda part: [-us for us in part[1]]))
