"""Shapes of steps on the device: they hold what runs in them, and few of them are captured late."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from emberline.engine.device_buckets import (
    CAPTURE_STEPS,
    BucketChoice,
    Sizes,
    first_buckets,
    fit,
    likely_buckets,
    stands_in,
)
from emberline.engine.device_step import Bucket

SIZES = Sizes.up_to(reqs=256, pages=512, chunk=512, tokens=8192, drafts=7)
WANTED = Bucket(num_reqs=8, num_tokens=36, num_pages=64, num_drafts=4)


@pytest.mark.parametrize("depth", range(8))
def test_a_size_holds_every_budget_and_wastes_a_quarter_of_the_drafts(depth: int) -> None:
    for num_reqs in (*range(1, 40), 255, 256):
        room = fit(num_reqs, SIZES.reqs)
        for budget in range(num_reqs * depth + 1):
            size = fit(num_reqs + budget, SIZES.verify(num_reqs, depth))
            assert size <= room * (1 + fit(depth, SIZES.drafts) if depth else 1)
            assert size - max(num_reqs + budget, room) <= -(-room * 7 // 4)
        assert len(SIZES.verify(num_reqs, depth)) <= 4


def test_sizes_end_at_the_most() -> None:
    assert SIZES.reqs[-1] == 256
    assert SIZES.pages[-1] == 512
    assert SIZES.drafts == (4, 7)
    assert Sizes.up_to(reqs=3, pages=4, chunk=9, tokens=9, drafts=0).verify(3, 0) == (3,)
    with pytest.raises(ValueError, match="does not fit"):
        fit(257, SIZES.reqs)


def test_a_step_runs_in_what_is_captured_unless_that_wastes_as_much_as_a_capture() -> None:
    near, far = replace(WANTED, num_tokens=64, num_drafts=7), Bucket(256, 2048, 64, 7)
    choice = BucketChoice(SIZES)
    assert {choice.choose(WANTED, {near, far}) for _ in range(10_000)} == {near}
    choice = BucketChoice(SIZES)
    chosen = [choice.choose(WANTED, {far}) for _ in range(int(CAPTURE_STEPS))]
    assert 8 < chosen.index(WANTED) < CAPTURE_STEPS / 2  # it takes several times as long
    assert set(chosen) == {far, WANTED}
    assert choice.choose(WANTED, {far, WANTED}) == WANTED


def test_what_a_policy_wants_captures_one_shape_at_most() -> None:
    """Whatever it draws and verifies, of that many requests."""
    choice, captured = BucketChoice(SIZES), set[Bucket]()
    for depth in (4, 0, 7):
        for tokens in SIZES.verify(8, depth):
            captured.add(choice.choose(Bucket(8, tokens, 64, depth), captured))
    assert captured == {Bucket(8, 64, 64, 7)}


def test_what_was_missed_is_captured_first_then_its_kind() -> None:
    choice, largest = BucketChoice(SIZES), Bucket(256, 2048, 64, 7, coins=True, num_top=20)
    seldom, often = replace(WANTED, num_top=5), replace(WANTED, num_tokens=22)
    for wanted in (seldom, often, often):
        choice.choose(wanted, {largest})
    missed = list(choice.missed({largest}))
    assert missed[:2] == [often, seldom]
    assert replace(SIZES.decode(256, 64, 7), num_top=5) in missed
    assert often not in choice.missed({largest, often})


def test_a_better_stand_in_is_taken_once_it_is_there() -> None:
    far, near = replace(WANTED, num_tokens=64), replace(WANTED, num_tokens=40)
    choice = BucketChoice(SIZES)
    assert choice.choose(WANTED, {far}) == far
    assert choice.choose(WANTED, {far, near}) == near


@pytest.mark.parametrize(
    "change",
    [
        {"num_reqs": 4},
        {"num_tokens": 35},
        {"num_pages": 16},
        {"num_drafts": 2},
        {"num_drafts": 0},
        {"chunk": 64},
    ],
)
def test_nothing_stands_in_that_has_no_room(change: dict[str, int]) -> None:
    assert not stands_in(replace(WANTED, **change), WANTED)
    chosen = BucketChoice(SIZES).choose(WANTED, {replace(WANTED, **change)})
    assert chosen == Bucket(8, 64, 64, 7)


def test_a_prompt_is_padded_to_many_times_its_length_a_few_times_only() -> None:
    wanted = Bucket(num_reqs=1, num_tokens=64, num_pages=64, chunk=64)
    near, far = replace(wanted, num_tokens=128, chunk=512), Bucket(256, 8192, 64, chunk=512)
    choice = BucketChoice(SIZES)
    assert {choice.choose(wanted, {near, far}) for _ in range(1000)} == {near}
    choice = BucketChoice(SIZES)
    chosen = [choice.choose(wanted, {far}) for _ in range(10)]
    assert 2 < chosen.index(wanted) < 8


def test_options_are_stood_in_for_by_wider_ones_only() -> None:
    options = list(product((False, True), (None, 0, 5)))
    for coins, top in options:
        wanted = replace(WANTED, coins=coins, num_top=top)
        able = {o for o in options if stands_in(replace(WANTED, coins=o[0], num_top=o[1]), wanted)}
        rank = {None: -1}
        wide = rank.get(top, top)
        assert able == {o for o in options if o[0] >= coins and rank.get(o[1], o[1]) >= wide}


@pytest.mark.parametrize("drafts", [0, 7])
def test_some_shape_of_the_first_holds_any_step_without_scores(drafts: int) -> None:
    sizes = Sizes.up_to(reqs=256, pages=512, chunk=512, tokens=8192, drafts=drafts)
    first = list(first_buckets(sizes))
    assert len(first) <= 8
    assert len(set(first)) == len(first)
    depths = (0, *sizes.drafts)
    for num_reqs, depth, coins in product(sizes.reqs, depths, (False, True)):
        for tokens in sizes.verify(num_reqs, depth):
            wanted = Bucket(num_reqs, tokens, sizes.pages[0], depth, coins=coins)
            assert any(stands_in(bucket, wanted) for bucket in first)
    for num_reqs, tokens, chunk in product(sizes.prompts, sizes.tokens, sizes.chunks):
        wanted = Bucket(num_reqs, tokens, sizes.pages[0], chunk=chunk, coins=True)
        assert any(stands_in(bucket, wanted) for bucket in first)


def test_there_are_not_too_many_shapes_to_capture_while_nothing_runs() -> None:
    ahead = list(dict.fromkeys(likely_buckets(SIZES)))
    assert ahead[: len(list(first_buckets(SIZES)))] == list(first_buckets(SIZES))
    assert len(ahead) < 250
    for num_reqs, depth in product(SIZES.reqs, (0, 7)):
        for tokens in SIZES.verify(num_reqs, depth):
            assert Bucket(num_reqs, tokens, 64, depth) in ahead
