"""Where an answer stands in its prediction."""

from __future__ import annotations

import random

from emberline.engine.prediction import Prediction


def follow(prediction: Prediction, tokens: list[int]) -> None:
    for token in tokens:
        prediction.push(token)


def test_what_is_ahead_follows_the_answer() -> None:
    prediction = Prediction(range(10))
    assert prediction.ahead(4) == (0, 1, 2, 3)
    follow(prediction, [0, 1, 2])
    assert prediction.ahead(4) == (3, 4, 5, 6)
    follow(prediction, [3, 4, 5, 6, 7, 8])
    assert prediction.ahead(4) == (9,)
    follow(prediction, [9])
    assert prediction.ahead(4) == ()


def test_a_replaced_word_is_overcome_whatever_its_length() -> None:
    expected = list(range(100, 130))
    for old, new in ((1, 1), (1, 3), (3, 1), (4, 4), (2, 6)):
        prediction = Prediction(expected)
        answer = [*expected[:10], *range(500, 500 + new), *expected[10 + old :]]
        follow(prediction, answer[:10])
        assert prediction.ahead(3) == tuple(expected[10:13])
        follow(prediction, answer[10 : 10 + new])
        assert prediction.ahead(3) == ()
        follow(prediction, answer[10 + new : 11 + new])  # the first common token again
        assert prediction.ahead(3) == tuple(expected[11 + old : 14 + old])


def test_left_out_and_inserted_stretches() -> None:
    expected = list(range(100, 160))
    prediction = Prediction(expected)
    follow(prediction, expected[:5] + expected[45:48])  # forty left out: three common tokens do
    assert prediction.ahead(2) == tuple(expected[48:50])
    prediction = Prediction(expected)
    follow(prediction, [*expected[:5], *range(900, 940), expected[5]])
    assert prediction.ahead(2) == tuple(expected[6:8])


def test_one_common_token_far_away_is_no_meeting() -> None:
    prediction = Prediction([*range(10), 77, *range(20, 60), 88, 89, 90, 91])
    follow(prediction, [0, 1, 2, 88])
    assert prediction.ahead(2) == ()
    follow(prediction, [89])
    assert prediction.ahead(2) == ()
    follow(prediction, [90])
    assert prediction.ahead(2) == (91,)


def test_of_repeated_places_the_longest_meeting_counts_then_the_nearest() -> None:
    prediction = Prediction([1, 2, 3, 9, 5, 6, 9, 7, 8, 9, 5, 6, 4])
    follow(prediction, [1, 2, 3, 77, 9])
    assert prediction.ahead(1) == (5,)  # the nearest 9
    prediction = Prediction([1, 2, 3, 9, 5, 6, 9, 7, 8, 9, 5, 6, 4])
    follow(prediction, [1, 2, 3, 8, 9])
    assert prediction.ahead(1) == (5,)
    follow(prediction, [5, 6, 4])
    assert prediction.ahead(1) == ()  # it was the later one, and that is at its end


def test_confidence_follows_what_happened() -> None:
    prediction = Prediction(range(50))
    before = prediction.confidence
    follow(prediction, list(range(20)))
    assert prediction.confidence > before
    good = prediction.confidence
    follow(prediction, [999])
    assert 0 < prediction.confidence < good


def test_an_answer_that_has_nothing_in_common_costs_nothing() -> None:
    prediction = Prediction(range(1000))
    rng = random.Random(0)
    follow(prediction, [rng.randrange(2000, 3000) for _ in range(200)])
    assert prediction.ahead(15) == ()
    assert Prediction([]).ahead(3) == ()


def test_a_search_looks_at_a_bounded_number_of_places() -> None:
    class Counted(Prediction):
        looked = 0

        def _common(self, place: int) -> int:
            Counted.looked += 1
            return super()._common(place)

    prediction = Counted([10, 11] * 5_000)
    for _ in range(10):
        follow(prediction, [10, 12])  # always lost again
    assert Counted.looked <= 10 * 2 * 2 * 64
