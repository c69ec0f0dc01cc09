"""How long a step takes the host: waits, pauses and captures left out."""

from __future__ import annotations

import pytest

from emberline.engine.host_pace import IDLE_SECONDS, HostPace


def steps(pace: HostPace, now: float, taken: float, waited: float, count: int) -> float:
    for _ in range(count):
        pace.begin(now)
        pace.waited(waited)
        now += taken + waited
    pace.begin(now)
    return now


def test_waiting_is_not_the_hosts() -> None:
    pace = HostPace()
    assert pace.seconds == 0.0
    steps(pace, 5.0, 3e-4, 2e-3, 30)
    assert pace.seconds == pytest.approx(3e-4)


def test_it_follows_and_forgets_pauses() -> None:
    pace = HostPace()
    now = steps(pace, 0.0, 3e-4, 0.0, 10)
    pace.begin(now + 10.0)  # nobody was there
    assert pace.seconds == pytest.approx(3e-4)
    pace.begin(now + 10.0 + 0.9 * IDLE_SECONDS)  # one long step: a tenth more at most
    assert pace.seconds <= 3.4e-4
    steps(pace, now + 20.0, 9e-4, 0.0, 60)
    assert pace.seconds == pytest.approx(9e-4, rel=0.02)
