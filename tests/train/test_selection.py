"""Which dialogues become rows: bounds, duplicates, the split, padding."""

from __future__ import annotations

import random

import pytest
import torch

from emberline.train.blocks import make_blocks
from emberline.train.config import DraftConfig
from emberline.train.dataset import Role, TokenRows
from emberline.train.dialogues import Dialogue
from emberline.train.features import tap_scale
from emberline.train.question_split import prompt_digest
from emberline.train.selection import Sampled, Selection, first_answer, pad, select
from emberline.train.target import FrozenTarget

F, U, A, P = (int(role) for role in (Role.FORCED, Role.USER, Role.ANSWER, Role.PLAIN))


def dialogue(prompt: int, *answer: int) -> Dialogue:
    return Dialogue((90, prompt, *answer, 91), (F, F, *[A] * len(answer), F))


def sampled(prompt: int, *answer: int) -> Sampled:
    return Sampled(prompt, dialogue(prompt, *answer))


def test_what_is_there_already_is_left_out() -> None:
    rules = Selection(min_answer=3, same_tokens=4, held_out=0)
    asked = [
        sampled(1, 1, 2, 3, 4, 5),
        sampled(1, 9, 9, 9),  # the same prompt
        sampled(2, 1, 2, 3, 4, 6),  # the same first four tokens
        sampled(3, 1, 2),  # too short
        sampled(4, 1, 2, 3),  # short answers are compared whole
        sampled(5, 1, 2, 3),
        sampled(3, 7, 7, 7),  # its prompt was there, but not in a row
    ]
    train, held_out, counts = select(asked, rules, seed=0)
    assert train == [asked[i].dialogue for i in (0, 4, 6)]
    assert held_out == []
    assert (counts.sampled, counts.same_prompt, counts.same_answer) == (7, 1, 2)
    assert (counts.too_short, counts.train, counts.held_out) == (1, 3, 0)
    assert counts.train_tokens == 5 + 3 + 3


def test_counts_add_up_and_a_prompt_is_on_one_side() -> None:
    rng = random.Random(5)
    asked = [
        sampled(rng.randrange(60), *(rng.randrange(4) for _ in range(rng.randrange(1, 9))))
        for _ in range(200)
    ]
    rules = Selection(min_answer=2, same_tokens=5, held_out=7)
    train, held_out, counts = select(asked, rules, seed=1)
    left_out = counts.same_prompt + counts.same_answer + counts.too_short
    assert counts.train + counts.held_out + left_out == counts.sampled == 200
    assert len(held_out) == 7
    prompts = [{one.tokens[1] for one in part} for part in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert len({first_answer(one)[:5] for one in (*train, *held_out)}) == len(train) + 7
    assert select(asked, rules, seed=1) == (train, held_out, counts)
    assert select(asked, rules, seed=2)[1] != held_out


def test_a_twentieth_is_held_out_unless_told() -> None:
    asked = [sampled(i, i, i, i, i) for i in range(41)]
    assert select(asked, Selection(), seed=0)[2].held_out == 3
    with pytest.raises(ValueError, match="41 rows are left, and held_out is 41"):
        select(asked, Selection(held_out=41), seed=0)
    with pytest.raises(ValueError, match="no row is left to train on"):
        select([], Selection(), seed=0)


def test_the_first_answer_is_the_one_after_the_prompt() -> None:
    chat = Dialogue((1, 2, 3, 4, 5, 6, 7), (F, U, A, A, F, U, A))
    assert first_answer(chat) == (3, 4)
    assert first_answer(Dialogue((1, 2, 3), (F, P, P))) == (2, 3)
    assert first_answer(Dialogue((1, 2), (F, U))) == ()


def test_prompts_that_differ_in_case_and_space_are_one() -> None:
    assert prompt_digest(" What is\n A?") == prompt_digest("what is a?")
    assert prompt_digest("what is a?") != prompt_digest("what is b?")


def test_padding_is_never_predicted() -> None:
    rows = pad([dialogue(1, *range(10, 18)), dialogue(2, 10, 11, 12)], 24)
    assert rows.tokens.shape == rows.roles.shape == (2, 24)
    assert rows.lens.tolist() == [10, 5]
    assert rows.tokens[0, :11].tolist() == [90, 1, *range(10, 18), 91]
    # Anchors everywhere, as where a row has too few places that anybody predicts.
    anchors = torch.arange(20).repeat(2, 1)
    blocks = make_blocks(rows.tokens.long(), rows.roles, anchors, 4, mask_token_id=99)
    at = anchors[..., None] + torch.arange(4) + 1
    assert (
        at[blocks.valid] < rows.lens.repeat_interleave(20 * 4).view(2, 20, 4)[blocks.valid]
    ).all()
    predicted = {int(token) for token in blocks.labels[blocks.valid]}
    assert predicted == set(range(10, 18))


def test_taps_are_measured_on_text_alone(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows
) -> None:
    """Padded rows give the scale of the same rows without padding."""
    dialogues = [
        Dialogue(tuple(tokens), (A,) * len(tokens)) for tokens in rows.tokens[:8, :24].tolist()
    ]
    padded = tap_scale(pad(dialogues, 40), target, draft, batch=3)
    torch.testing.assert_close(padded, tap_scale(pad(dialogues, 24), target, draft, batch=3))
