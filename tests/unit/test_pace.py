"""The advice of a full queue follows the pace at which requests finish."""

from __future__ import annotations

from emberline.engine.pace import Pace


def test_advice_follows_the_pace():
    pace = Pace()
    assert pace.seconds_to_next() == 1
    for i in range(40):
        pace.finished(10.0 * i)
    assert 9 <= pace.seconds_to_next() <= 10
    for i in range(40):
        pace.finished(400 + 0.1 * i)
    assert pace.seconds_to_next() == 1


def test_idle_hours_are_not_a_pace():
    pace = Pace()
    pace.finished(0.0)
    pace.finished(100_000.0)
    assert pace.seconds_to_next() <= 60
