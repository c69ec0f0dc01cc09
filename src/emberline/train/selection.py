"""Which sampled dialogues become training rows, which are kept aside, and which are left out.

Owns bounds, duplicates and the split. Must not know engines, templates or how text is sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from emberline.train.dataset import Role, TokenRows
from emberline.train.dialogues import Dialogue

MOST_HELD_OUT = 1024
PADDING = 0  # a token id like any other: its role says that nobody predicts it


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked of a dialogue."""

    min_answer: int = 4  # least tokens of its first answer
    same_tokens: int = 24  # first answers that begin with so many same tokens are duplicates
    held_out: int | None = None  # rows to keep aside; None: a twentieth, at most `MOST_HELD_OUT`

    def __post_init__(self) -> None:
        for name in ("min_answer", "same_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.held_out is not None and self.held_out < 0:
            raise ValueError(f"held_out must not be negative, got {self.held_out}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """A dialogue, and what tells its prompt from others."""

    prompt: int  # digest of the prompt's text, see `question_split.prompt_digest`
    dialogue: Dialogue


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the dialogues; the figures add up."""

    sampled: int = 0
    same_prompt: int = 0
    same_answer: int = 0
    too_short: int = 0
    train: int = 0
    held_out: int = 0
    train_tokens: int = 0  # of the training rows, those that are predicted

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.sampled:,} dialogues: {self.train:,} to train on "
            f"({self.train_tokens:,} tokens), {self.held_out:,} held out; left out: "
            f"{self.same_prompt:,} with a prompt that was there, {self.same_answer:,} with the "
            f"same answer, {self.too_short:,} with a shorter answer than wanted"
        )


def select(
    sampled: Sequence[Sampled], selection: Selection, seed: int
) -> tuple[list[Dialogue], list[Dialogue], Counts]:
    """Dialogues to train on, and to keep aside, each in the order they came in.

    Of duplicates the first stays. A prompt is on one side only: it is there once.

    Raises:
        ValueError: nothing is left to train on.
    """
    counts = dict.fromkeys(("same_prompt", "same_answer", "too_short"), 0)
    prompts: set[int] = set()
    answers: set[tuple[int, ...]] = set()
    kept: list[Sampled] = []
    for one in sampled:
        answer = first_answer(one.dialogue)
        beginning = answer[: selection.same_tokens]
        if one.prompt in prompts:
            counts["same_prompt"] += 1
        elif len(answer) < selection.min_answer:
            counts["too_short"] += 1
        elif beginning in answers:
            counts["same_answer"] += 1
        else:
            prompts.add(one.prompt)
            answers.add(beginning)
            kept.append(one)
    aside = _held_out(kept, selection, seed)
    train = [one.dialogue for one in kept if one.prompt not in aside]
    held_out = [one.dialogue for one in kept if one.prompt in aside]
    return (
        train,
        held_out,
        Counts(
            sampled=len(sampled),
            **counts,
            train=len(train),
            held_out=len(held_out),
            train_tokens=sum(role != Role.FORCED for one in train for role in one.roles),
        ),
    )


def first_answer(dialogue: Dialogue) -> tuple[int, ...]:
    """The tokens of a dialogue's first answer, or of its plain text."""
    wanted = (Role.ANSWER, Role.PLAIN)
    pairs = list(zip(dialogue.tokens, dialogue.roles, strict=True))
    begin = next((i for i, (_, role) in enumerate(pairs) if role in wanted), len(pairs))
    return tuple(token for token, _ in takewhile(lambda pair: pair[1] in wanted, pairs[begin:]))


def pad(dialogues: Sequence[Dialogue], seq_len: int) -> TokenRows:
    """Rows of one length: padding on the right, which no earlier token sees, is nobody's."""
    tokens = torch.full((len(dialogues), seq_len), PADDING, dtype=torch.int32)
    roles = torch.full((len(dialogues), seq_len), int(Role.FORCED), dtype=torch.uint8)
    for row, one in enumerate(dialogues):
        tokens[row, : len(one.tokens)] = torch.tensor(one.tokens, dtype=torch.int32)
        roles[row, : len(one.roles)] = torch.tensor(one.roles, dtype=torch.uint8)
    return TokenRows(tokens, roles)


def _held_out(kept: Sequence[Sampled], selection: Selection, seed: int) -> set[int]:
    """Prompts to keep aside, by lot: those with the smallest keyed digests."""
    wanted = selection.held_out
    if wanted is None:
        wanted = min(-(-len(kept) // 20), MOST_HELD_OUT)
    if not kept:
        raise ValueError(
            "no row is left to train on: ask less of an answer (--min-answer, --same-tokens), or "
            "sample more, into another folder"
        )
    if wanted >= len(kept):
        raise ValueError(
            f"{len(kept)} rows are left, and held_out is {wanted}: none to train on; lower it "
            "(--held-out), or sample more, into another folder"
        )

    def lot(prompt: int) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt}".encode()).digest()

    return set(sorted((one.prompt for one in kept), key=lot)[:wanted])
