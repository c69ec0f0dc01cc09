"""Causes are told from what a wrong record equals; noise has none."""

from __future__ import annotations

import math
import random

import pytest

from emberline.audit.diagnosis import diagnose, wrong_records
from emberline.audit.outcome import Fault
from emberline.audit.records import (
    Alternative,
    Answer,
    TokenRecord,
    difference,
    margin,
    temperature_of,
    uniform_over,
)

NOISE = 1e-4


def record(seed: int, key: int = 0, scale: float = 1.0, num_top: int = 5) -> TokenRecord:
    draw = random.Random(seed)
    logits = [draw.gauss(0, 2) / scale for _ in range(20)]
    total = math.log(sum(map(math.exp, logits)))
    row = [x - total for x in logits]
    best = sorted(range(20), key=lambda i: -row[i])[:num_top]
    return TokenRecord(key, row[key], tuple(Alternative(i, row[i]) for i in best))


def nudged(one: TokenRecord, by: float) -> TokenRecord:
    top = tuple(Alternative(a.key, a.logprob + by) for a in one.top)
    return TokenRecord(one.key, one.logprob + by, top)


def causes(records, rows, events=(), beside=(), most=NOISE):
    answer = Answer(text="", records=tuple(records), events=events)
    wrong = wrong_records(answer, rows, most)
    return diagnose(wrong, answer, rows, noise=NOISE, beside=beside)


ROWS = [record(seed) for seed in range(6)]
OTHERS = [record(seed) for seed in range(50, 56)]


def test_right_records_have_no_cause():
    assert causes(ROWS, ROWS) == {}
    assert causes([nudged(one, 5e-5) for one in ROWS], ROWS) == {}


def test_noise_that_is_not_forgiven_has_no_cause():
    found = causes([nudged(one, 5e-5) for one in ROWS], ROWS, events=(6,), most=0.0)
    assert found == dict.fromkeys(range(6))


@pytest.mark.parametrize(("by", "last"), [(1, 5), (-1, 0)])
def test_a_shift(by, last):
    shifted = [ROWS[min(max(i + by, 0), 5)] for i in range(6)]
    found = causes(shifted, ROWS)
    assert found == {i: Fault.ROW_SHIFTED for i in range(6) if i != last}


def test_a_neighbour():
    found = causes([ROWS[0], OTHERS[3], *ROWS[2:]], ROWS, beside=[OTHERS])
    assert found == {1: Fault.NEIGHBOUR}


def test_a_zero_row():
    flat = TokenRecord(0, -6.0, tuple(Alternative(i, -6.0) for i in range(5)))
    assert causes([*ROWS[:5], flat], ROWS) == {5: Fault.ZERO_ROW}
    assert uniform_over(flat) == 403
    tied = TokenRecord(0, -2.2, tuple(Alternative(i, -2.2) for i in range(5)))
    assert uniform_over(tied) is None  # as bfloat16 ties the likeliest tokens
    assert uniform_over(ROWS[0]) is None


@pytest.mark.parametrize(
    ("wrong", "events", "fault"),
    [
        ((1, 2), (1, 3, 2), Fault.DRAFT),  # tokens inside an event
        ((3, 5), (1, 3, 2), Fault.RESIDUAL),  # only tokens that end one
        ((2, 3), (1, 3, 2), Fault.DRAFT),
        ((3, 5), (1, 1, 1, 1, 1, 1), Fault.DRAFT),  # nothing was ever accepted
        ((3, 5), (), None),  # not streamed: nobody knows where steps end
    ],
)
def test_draft_and_residual(wrong, events, fault):
    strange = [record(90 + i) if i in wrong else one for i, one in enumerate(ROWS)]
    assert causes(strange, ROWS, events) == dict.fromkeys(wrong, fault)


def test_what_explains_some_explains_the_rest():
    mixed = [ROWS[1], ROWS[2], record(99), *ROWS[3:]]
    assert set(causes(mixed, ROWS, events=(6,)).values()) == {Fault.ROW_SHIFTED}


def test_temperatures():
    assert temperature_of(record(1, scale=0.5), record(1)) == pytest.approx(0.5)
    assert temperature_of(record(1, scale=1.4), record(1)) == pytest.approx(1.4)
    assert temperature_of(record(1), record(1)) == pytest.approx(1.0)
    assert temperature_of(record(2), record(1)) is None
    assert temperature_of(record(1, num_top=1), record(1, num_top=1)) is None


def test_differences():
    one = ROWS[0]
    assert difference(one, one) == 0.0
    assert difference(one, nudged(one, 0.25)) == pytest.approx(0.25)
    # A token that one lists and the other does not counts by how far it stands out.
    short = TokenRecord(one.key, one.logprob, one.top[:3])
    assert difference(one, short) == 0.0
    strange = TokenRecord(one.key, one.logprob, (Alternative(77, -0.01), *one.top[:2]))
    assert difference(one, strange) > 0.1
    # An unlikely chosen token is listed, too, but is no alternative that others must lie under.
    tail = Alternative(500, -9.0)
    close = (Alternative(1, -1.0), Alternative(2, -2.0), Alternative(3, -2.5), tail)
    other = (Alternative(1, -1.0), Alternative(2, -2.0), Alternative(4, -2.6), tail)
    assert difference(TokenRecord(500, -9.0, close), TokenRecord(500, -9.0, other)) < 0.2
    low = TokenRecord(0, -9999.0, one.top)
    assert difference(low, TokenRecord(0, -math.inf, one.top)) == 0.0
    assert difference(low, TokenRecord(0, -3.0, one.top)) == math.inf
    assert margin(one, 77) is None
