"""Dialogues through the engine: who wrote what, how long, and that the batch says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
import torch

from emberline.models.weights import ModelError
from emberline.train.dataset import Role
from emberline.train.dialogues import Dialogue, Limits, Start, converse
from emberline.train.synthesize import TurnScript

from support.engines import EOS, make_engine
from support.paged import PrefixTarget

SCRIPT = TurnScript("", (), to_answer=(2, 3), to_user=(4,), stop_ids=(EOS,))
LIMITS = Limits(seq_len=40, max_answer=9, user_limit=5, user_temperature=0.8, seed=3)


class Terse(PrefixTarget):
    """Ends its turns now and then."""

    def logits_after(self, prefix: Sequence[int]) -> torch.Tensor:
        logits = super().logits_after(list(prefix)).clone()
        logits[EOS] += 5
        return logits


def starts(count: int, **changes: object) -> list[Start]:
    values = {"role": Role.USER, "temperature": 1.0, "later": None} | changes
    return [Start(number, (5, 6 + number % 7), **values) for number in range(count)]


def play(wanted: Sequence[Start], limits: Limits = LIMITS, width: int = 8) -> list[Dialogue]:
    engine = make_engine(Terse(), max_num_reqs=width)
    told: list[tuple[int, int]] = []
    found = converse(engine, wanted, SCRIPT, limits, lambda *seen: told.append(seen))
    assert [done for done, _ in told] == list(range(1, len(wanted) + 1))
    written = sum(role != Role.FORCED for one in found for role in one.roles)
    assert told[-1][1] >= written
    assert engine.snapshot().kv_usage == 0
    return found


def runs(dialogue: Dialogue) -> list[tuple[Role, tuple[int, ...]]]:
    """The pieces, each with who wrote it."""
    pairs = zip(dialogue.roles, dialogue.tokens, strict=True)
    return [
        (Role(role), tuple(token for _, token in piece))
        for role, piece in groupby(pairs, key=lambda pair: pair[0])
    ]


def test_turns_follow_the_script() -> None:
    kinds = set()
    for start, dialogue in zip(starts(40), play(starts(40)), strict=True):
        given, *pieces = runs(dialogue)
        assert given == (Role.FORCED, start.token_ids)
        expected = Role.USER
        for place, (role, tokens) in enumerate(pieces):
            last = place == len(pieces) - 1
            ended = tokens[-1] == EOS
            if role is Role.FORCED:
                continue
            assert role is expected
            assert EOS not in tokens[:-1]
            assert len(tokens) <= (5 if role is Role.USER else 9)
            if last:
                full = len(dialogue.tokens) == LIMITS.seq_len
                assert full or (role is Role.ANSWER and not ended and len(tokens) == 9)
                kinds.add("full" if full else "cut")
                continue
            after = pieces[place + 1]
            closing = () if ended else (EOS,)
            whole = (*closing, 2, 3) if role is Role.USER else (4,)
            assert after[0] is Role.FORCED
            assert whole[: len(after[1])] == after[1]
            assert ended or role is Role.USER
            kinds.add((role, ended))
            expected = Role.ANSWER if role is Role.USER else Role.USER
        assert len(dialogue.tokens) <= LIMITS.seq_len
    assert kinds == {"full", "cut", (Role.USER, True), (Role.USER, False), (Role.ANSWER, True)}


def test_greedy_answers_are_the_targets_own() -> None:
    target = Terse()
    for dialogue in play(starts(12, role=Role.ANSWER, temperature=0.0)):
        tokens, at = list(dialogue.tokens), 0
        for role, piece in runs(dialogue):
            if role is Role.ANSWER:
                assert tuple(target.greedy(tokens[:at], len(piece))) == piece
            at += len(piece)


def test_given_turns_are_said_in_order() -> None:
    later = ((7, 7), (8,))
    full = Limits(seq_len=60, max_answer=30, user_limit=5, user_temperature=0.8, seed=3)
    turns = set()
    wanted = starts(30, role=Role.ANSWER, later=later)
    for dialogue in play(wanted, full):
        pieces = runs(dialogue)
        assert all(role is not Role.USER for role, _ in pieces)
        said = [piece for role, piece in pieces[1:] if role is Role.FORCED]
        whole = [(4, *turn, EOS, 2, 3) for turn in later]
        assert said == whole[: len(said)]
        turns.add(len(said))
        answers = [piece for role, piece in pieces if role is Role.ANSWER]
        assert all(piece[-1] == EOS for piece in answers[:-1])
        if len(answers) == 3:
            assert answers[-1][-1] == EOS or len(answers[-1]) == 30 or len(dialogue.tokens) == 60
    assert 2 in turns
    once = starts(4, role=Role.ANSWER, later=())
    assert all(len(runs(one)) == 2 for one in play(once, full))


def test_plain_text_fills_its_row_whatever_it_says() -> None:
    found = play(starts(10, role=Role.PLAIN))
    assert all(len(one.tokens) == 40 for one in found)
    assert any(EOS in one.tokens[2:-1] for one in found)
    assert {role for one in found for role, _ in runs(one)} == {Role.FORCED, Role.PLAIN}


def test_a_dialogue_does_not_depend_on_those_beside_it() -> None:
    together = play(starts(20))
    assert play(starts(20), width=1) == together
    assert play(starts(20)[13:15]) == together[13:15]
    other = Limits(seq_len=40, max_answer=9, user_limit=5, user_temperature=0.8, seed=4)
    assert play(starts(20), other) != together


def test_a_target_that_breaks_ends_the_run() -> None:
    target = Terse()
    engine = make_engine(target)
    target.overrides[5, 6] = torch.full((32,), float("nan"))
    with pytest.raises(ModelError, match="broke off: no token can be drawn"):
        converse(engine, starts(2), SCRIPT, LIMITS, lambda done, tokens: None)
