"""Answers compared over ways to run them, on a CPU, where the bits are promised to agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emberline.engine.engine import Engine

from gpu import synthetic
from gpu.invariance import Answer, Arm, answers, difference, groups, slowdown
from gpu.random_models import SHAPES
from gpu.workload import random_prompts

TOKENS = 10
PROMPTS = random_prompts(5, 12, SHAPES["tiny"].vocab)
WANTED, OTHERS = PROMPTS[:3], PROMPTS[3:]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return synthetic.load(SHAPES["tiny"], "cpu", "float32", 4, 64, "threshold")


def run(engine: Engine, arm: Arm, *, look: bool) -> list[Answer]:
    parts = engine.parts
    engine.parts = replace(parts, layout=arm.layout)
    try:
        return answers(engine, WANTED, OTHERS, arm, TOKENS, look=look)
    finally:
        engine.parts = parts


def test_batches_hold_every_prompt_once() -> None:
    made = groups([(1,), (2,), (3,)], [(8,), (9,)], 2)
    assert made == [[(1,), (2,)], [(3,), (8,)]]
    assert groups([(1,)], [(8,), (9,)], 4) == [[(1,), (8,), (9,), (8,)]]
    assert groups([(1,), (2,)], [], 1) == [[(1,)], [(2,)]]


def test_every_arm_is_the_same_bit_for_bit(engine: Engine) -> None:
    reference = run(engine, Arm("compact", False, 1), look=True)
    assert all(one.logits is not None for one in reference)
    assert {one.logits.shape for one in reference} == {(TOKENS, SHAPES["tiny"].vocab)}
    for arm in (Arm("compact", True, 2), Arm("static", True, 4), Arm("static", False, 2)):
        got = run(engine, arm, look=True)
        assert difference(got, reference) == {
            "answers_changed": 0,
            "tokens_apart": 0,
            "max_logprob_diff": 0.0,
            "max_logit_diff": 0.0,
        }, arm.name


def test_rows_are_those_that_the_ids_came_from(engine: Engine) -> None:
    for one in run(engine, Arm("compact", True, 4), look=True):
        assert one.logits is not None
        assert one.logits.argmax(-1).tolist() == list(one.ids)


def test_nobody_watches_afterwards(engine: Engine) -> None:
    found = run(engine, Arm("compact", True, 2), look=True)
    assert engine.observer is None
    again = run(engine, Arm("compact", True, 2), look=False)
    assert all(one.logits is None for one in again)
    assert [one.records for one in again] == [one.records for one in found]


def test_a_difference_is_seen(engine: Engine) -> None:
    reference = run(engine, Arm("compact", False, 1), look=True)
    first = reference[0]
    assert first.logits is not None
    moved = first.logits.clone()
    moved[3, 5] += 0.25
    record = first.records[2]._replace(logprob=first.records[2].logprob - 0.5)
    records = (*first.records[:2], record, *first.records[3:])
    changed = [replace(first, logits=moved, records=records), *reference[1:]]
    assert difference(changed, reference) == {
        "answers_changed": 0,
        "tokens_apart": 1,
        "max_logprob_diff": pytest.approx(0.5),
        "max_logit_diff": pytest.approx(0.25),
    }
    other = [replace(first, ids=(0, *first.ids[1:])), *reference[1:]]
    assert difference(other, reference)["answers_changed"] == 1


def test_what_the_mode_costs_is_a_ratio(engine: Engine) -> None:
    rows = slowdown(engine, engine, PROMPTS, [2], 6, 1)
    assert [row["draft"] for row in rows] == ["none", "scheduled"]
    for row in rows:
        assert row["slowdown"] == pytest.approx(row["tok_s"] / row["invariant_tok_s"], rel=1e-2)


def test_logits_are_copies(engine: Engine) -> None:
    one, other = (run(engine, Arm("compact", False, 2), look=True) for _ in range(2))
    assert one[0].logits is not None
    assert other[0].logits is not None
    assert torch.equal(one[0].logits, other[0].logits)
    assert one[0].logits.data_ptr() != other[0].logits.data_ptr()
