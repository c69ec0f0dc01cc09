"""Where dialogues start from: the template and a few first words, or a file's prompts.

Owns the order, the rounds and what is drawn for each start. Must not know engines.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from emberline.prompts import Conversation, conversation_ids
from emberline.train.config import SynthesisConfig
from emberline.train.dataset import Role
from emberline.train.dialogues import Start
from emberline.train.question_split import prompt_digest
from emberline.train.synthesize import TurnScript, make_starts, read_script

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Given = tuple[tuple[int, ...], int, Conversation]
"""Token ids of a prompt, its digest, and what it is."""


class Source(Protocol):
    """Starts in rounds, the same ones for the same settings."""

    script: TurnScript | None  # the template's tokens between turns; None: one answer each
    num_rounds: int
    num_starts: int

    def describe(self) -> dict[str, Any]:
        """What tells this source from others, JSON-able."""

    def starts(self, index: int) -> list[tuple[Start, int | None]]:
        """A round's starts, with the digest of each prompt; None: it is yet to be written."""


class SelfWritten:
    """The target writes the users' turns as well, from the template and a few first words.

    Raises:
        ValueError: the template is none, or does not repeat itself from turn to turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: tuple[int, ...],
        config: SynthesisConfig,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the model has no chat template to write prompts in: give --prompts")
        self.tokenizer, self.config = tokenizer, config
        self.script: TurnScript | None = read_script(tokenizer, stop_ids)
        self.num_rounds = config.rounds
        self.num_starts = config.rounds * config.batch_size

    def describe(self) -> dict[str, Any]:
        """The settings that prompts follow from."""
        return {"prompts": "self-written", "rounds": self.config.rounds}

    def starts(self, index: int) -> list[tuple[Start, int | None]]:
        """Drawn from the seed and the round."""
        assert self.script is not None
        rng = random.Random(f"{self.config.seed}/{index}")
        drawn = make_starts(self.tokenizer, self.script, self.config, rng)
        columns = zip(
            drawn.tokens.tolist(),
            drawn.lens.tolist(),
            drawn.roles.tolist(),
            drawn.temperatures.tolist(),
            strict=True,
        )
        first = index * self.config.batch_size
        return [
            (Start(first + row, tuple(ids[:length]), Role(role), round(temperature, 6)), None)
            for row, (ids, length, role, temperature) in enumerate(columns)
        ]


class GivenPrompts:
    """Users say what a file says; the answers are the target's.

    Raises:
        InvalidRequest: the template refuses a prompt.
        ValueError: there are several turns, and the template does not repeat itself.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: tuple[int, ...],
        config: SynthesisConfig,
        conversations: Sequence[Conversation],
        min_answer: int,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        several = any(one.later for one in conversations)
        self.script = read_script(tokenizer, stop_ids) if several else None
        unique: dict[int, Conversation] = {}
        for one in conversations:
            unique.setdefault(prompt_digest(one.text), one)
        found = [(conversation_ids(tokenizer, one), key, one) for key, one in unique.items()]
        self._given: list[Given] = [
            given for given in found if len(given[0]) + min_answer <= config.seq_len
        ]
        self.num_same = len(conversations) - len(found)
        self.num_too_long = len(found) - len(self._given)
        if not self._given:
            raise ValueError(
                f"no prompt leaves room for an answer in {config.seq_len} tokens: raise seq_len"
            )
        self.num_starts = len(self._given)
        self.num_rounds = -(-self.num_starts // config.batch_size)

    def describe(self) -> dict[str, Any]:
        """The prompts, by a digest of all."""
        texts = json.dumps([asdict(one) for _, _, one in self._given])
        digest = hashlib.sha256(texts.encode()).hexdigest()[:12]
        return {"prompts": digest, "num_prompts": self.num_starts}

    def starts(self, index: int) -> list[tuple[Start, int | None]]:
        """A round's prompts in the file's order, each with a temperature drawn for it."""
        first = index * self.config.batch_size
        part = self._given[first : first + self.config.batch_size]
        rng = random.Random(f"{self.config.seed}/{index}")
        temperatures = rng.choices(
            self.config.temperatures, self.config.temperature_weights, k=len(part)
        )
        return [
            (Start(first + row, ids, Role.ANSWER, temperature, self._later(one)), digest)
            for row, ((ids, digest, one), temperature) in enumerate(
                zip(part, temperatures, strict=True)
            )
        ]

    def _later(self, one: Conversation) -> tuple[tuple[int, ...], ...]:
        def ids(turn: str) -> tuple[int, ...]:
            return tuple(self.tokenizer(turn, add_special_tokens=False)["input_ids"])

        return tuple(map(ids, one.later))
