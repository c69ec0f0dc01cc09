"""Shapes of steps on the device: they hold what runs in them, and few of them are captured late."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from emberline.engine.device_buckets import (
    PATIENCE,
    BucketChoice,
    Sizes,
    fit,
    likely_buckets,
    stands_in,
)
from emberline.engine.device_step import Bucket

SIZES = Sizes.up_to(reqs=256, pages=512, chunk=512, tokens=8192, drafts=7)
WANTED = Bucket(num_reqs=8, num_tokens=36, num_pages=16, num_drafts=4)


@pytest.mark.parametrize("depth", range(8))
def test_a_size_holds_every_budget_and_wastes_an_eighth_of_the_drafts(depth: int) -> None:
    for num_reqs in (*range(1, 40), 255, 256):
        room = fit(num_reqs, SIZES.reqs)
        for budget in range(num_reqs * depth + 1):
            size = fit(num_reqs + budget, SIZES.verify(num_reqs, depth))
            assert size <= room * (1 + fit(depth, SIZES.drafts) if depth else 1)
            assert size - max(num_reqs + budget, room) <= -(-room * 7 // 8)
        assert len(SIZES.verify(num_reqs, depth)) <= 8


def test_sizes_end_at_the_most() -> None:
    assert SIZES.reqs[-1] == 256
    assert SIZES.pages[-1] == 512
    assert SIZES.drafts == (4, 7)
    assert Sizes.up_to(reqs=3, pages=4, chunk=9, tokens=9, drafts=0).verify(3, 0) == (3,)
    with pytest.raises(ValueError, match="does not fit"):
        fit(257, SIZES.reqs)


def test_a_step_runs_in_what_is_captured_until_its_own_shape_is_worth_it() -> None:
    larger = replace(WANTED, num_tokens=64, num_drafts=7)
    largest = replace(larger, coins=True)
    choice = BucketChoice()
    chosen = [choice.choose(WANTED, {largest, larger}) for _ in range(PATIENCE + 1)]
    assert chosen == [larger] * PATIENCE + [WANTED]
    assert choice.choose(WANTED, {largest, larger, WANTED}) == WANTED


def test_a_better_stand_in_is_taken_once_it_is_there() -> None:
    far, near = replace(WANTED, num_tokens=64), replace(WANTED, num_tokens=40)
    choice = BucketChoice()
    assert choice.choose(WANTED, {far}) == far
    assert choice.choose(WANTED, {far, near}) == near


@pytest.mark.parametrize(
    "change",
    [
        {"num_reqs": 4},
        {"num_reqs": 17},
        {"num_tokens": 35},
        {"num_pages": 8},
        {"num_drafts": 2},
        {"num_drafts": 0},
        {"chunk": 64},
    ],
)
def test_nothing_stands_in_that_has_no_room_or_wastes_much(change: dict[str, int]) -> None:
    assert not stands_in(replace(WANTED, **change), WANTED)
    assert BucketChoice().choose(WANTED, {replace(WANTED, **change)}) == WANTED


def test_a_prompt_is_not_padded_to_many_times_its_length() -> None:
    wanted = Bucket(num_reqs=1, num_tokens=64, num_pages=16, chunk=64)
    assert stands_in(replace(wanted, num_tokens=128, chunk=256), wanted)
    assert not stands_in(replace(wanted, num_tokens=256, chunk=256), wanted)


def test_options_are_stood_in_for_by_wider_ones_only() -> None:
    options = list(product((False, True), (None, 0, 5)))
    for coins, top in options:
        wanted = replace(WANTED, coins=coins, num_top=top)
        able = {o for o in options if stands_in(replace(WANTED, coins=o[0], num_top=o[1]), wanted)}
        rank = {None: -1}
        wide = rank.get(top, top)
        assert able == {o for o in options if o[0] >= coins and rank.get(o[1], o[1]) >= wide}


def test_what_is_captured_ahead_stands_in_for_any_greedy_decode_step() -> None:
    ahead = list(likely_buckets(SIZES))
    assert len(set(ahead)) == len(ahead)
    whole = [bucket for bucket in ahead if bucket.num_drafts][: len(SIZES.reqs)]
    for num_reqs in SIZES.reqs:
        for tokens in SIZES.verify(num_reqs, 7):
            wanted = Bucket(num_reqs, tokens, SIZES.pages[0], 7)
            assert any(stands_in(bucket, wanted) for bucket in whole)
