"""When requests arrive in an open loop."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from emberline.bench.settings import LoadSettings, OpenLoop

_BLOCK = 1024  # gaps drawn at a time


def arrivals(level: OpenLoop, load: LoadSettings) -> list[float]:
    """Seconds from the level's start, ascending: a Poisson process whose first event is at 0.

    The gaps are independent and exponential with mean 1 / rate, repeatable by `load.seed`. There
    are `load.num_requests` of them, or as many as begin within `load.duration` seconds.
    """
    if math.isinf(level.request_rate):
        assert load.num_requests is not None  # LoadSettings refuses an endless burst
        return [0.0] * load.num_requests
    times: list[float] = []
    for time in _poisson(level.request_rate, load.seed):
        if load.num_requests is not None and len(times) == load.num_requests:
            break
        if load.duration is not None and time >= load.duration:
            break
        times.append(time)
    return times


def _poisson(rate: float, seed: int) -> Iterator[float]:
    rng, time = np.random.default_rng([seed, 1]), 0.0
    while True:
        for gap in rng.exponential(1 / rate, _BLOCK).tolist():
            yield time
            time += gap
