"""Arrivals of the open loop are a Poisson process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emberline.bench.arrivals import arrivals
from emberline.bench.settings import BenchError, LoadSettings, OpenLoop


def load(level: OpenLoop, **given: object) -> LoadSettings:
    return LoadSettings(levels=(level,), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_are_exponential(rate: float) -> None:
    n, level = 20_000, OpenLoop(rate)
    times = arrivals(level, load(level, num_requests=n + 1, seed=3))
    assert len(times) == n + 1
    assert times[0] == 0.0
    gaps = np.diff(times) * rate
    # Of n unit exponentials: mean 1 and deviation 1, each within 5 standard errors (the deviation
    # of an exponential's sample deviation is sqrt(2 / n)).
    assert abs(gaps.mean() - 1) < 5 / math.sqrt(n)
    assert abs(gaps.std() - 1) < 5 * math.sqrt(2 / n)
    # Kolmogorov-Smirnov distance to the law itself; 1.95 / sqrt(n) is exceeded once in 1,000.
    cdf = 1 - np.exp(-np.sort(gaps))
    assert np.abs(cdf - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)
    # No memory: a gap says nothing of the next.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 5 / math.sqrt(n)


def test_a_seed_repeats_and_another_differs() -> None:
    level = OpenLoop(5.0)
    first = arrivals(level, load(level, num_requests=50, seed=1))
    assert first == arrivals(level, load(level, num_requests=50, seed=1))
    assert first != arrivals(level, load(level, num_requests=50, seed=2))


def test_a_duration_cuts_the_same_process() -> None:
    level = OpenLoop(100.0)
    whole = arrivals(level, load(level, num_requests=5000, seed=7))
    cut = arrivals(level, load(level, duration=20.0, seed=7))
    assert cut == [time for time in whole if time < 20.0]
    assert 1500 < len(cut) < 2500


def test_an_infinite_rate_is_all_at_once() -> None:
    level = OpenLoop(math.inf)
    assert arrivals(level, load(level, num_requests=3)) == [0.0, 0.0, 0.0]
    with pytest.raises(BenchError, match="--request-rate inf needs --num-requests"):
        load(level, duration=1.0)
