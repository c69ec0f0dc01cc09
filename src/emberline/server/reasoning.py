"""Reasoning: the stretch between <think> and </think> that some models write before they answer.

Owns where it begins and ends, and what a template says of it. Must not know tools, records or HTTP.

Reasoning stands at the start of an answer or nowhere: a <think> that the content speaks of is
content. Line breaks beside a marker belong to the marker.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from emberline.encoding import THOUGHT_END
from emberline.server.parts import Part, Piece, Skip, held_back
from emberline.types import Grammar, SamplingParams

OPEN, CLOSE = "<think>", THOUGHT_END


class Thinking(StrEnum):
    """What an answer begins with."""

    INSIDE = "inside"  # reasoning: the prompt has opened it
    MAYBE = "maybe"  # reasoning, if the model opens it
    NONE = "none"  # content


def thinking_at(prompt_end: str) -> Thinking:
    """What an answer begins with, by the end of its rendered prompt."""
    end = prompt_end.rstrip()
    if end.endswith(OPEN):
        return Thinking.INSIDE
    return Thinking.NONE if end.endswith(CLOSE) else Thinking.MAYBE


def grammar_behind(grammar: Grammar, thinking: Thinking) -> Grammar:
    """The grammar of an answer whose content must match `grammar`."""
    if thinking is Thinking.NONE:
        return grammar
    opening = OPEN if thinking is Thinking.MAYBE else None
    return replace(grammar, after=CLOSE, opened_by=opening)


def stops_behind(params: SamplingParams, thinking: Thinking) -> SamplingParams:
    """Options whose stop strings count in the content only."""
    if thinking is Thinking.NONE or not params.stop:
        return params
    opening = OPEN if thinking is Thinking.MAYBE else None
    return replace(params, stop_after=CLOSE, stop_opened_by=opening)


class ReasoningSplitter:
    """A `Splitter` of reasoning and content."""

    def __init__(self, thinking: Thinking) -> None:
        self._state = thinking
        self._over = thinking is Thinking.NONE
        self._held = ""
        self._skip = Skip()
        self._skip.on = thinking is Thinking.INSIDE

    @property
    def over(self) -> bool:
        """Whether no reasoning can follow."""
        return self._over

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """See `Splitter`."""
        self._held += text
        pieces: list[Piece] = []
        if not self._over and self._state is Thinking.MAYBE:
            pieces += self._begin(final)
        if not self._over and self._state is Thinking.INSIDE:
            pieces += self._go_on(final)
        if self._over:
            pieces += self._skipped()
            if self._held:
                pieces.append(Piece(Part.CONTENT, len(self._held), self._take(len(self._held))))
        return pieces

    def _begin(self, final: bool) -> list[Piece]:
        """Whether the answer opens reasoning; nothing while that cannot be told."""
        start = self._held.lstrip("\n")
        if start.startswith(OPEN):
            size = len(self._held) - len(start) + len(OPEN)
            self._take(size)
            self._state, self._skip.on = Thinking.INSIDE, True
            return [Piece(Part.REASONING, size)]
        self._over = final or not OPEN.startswith(start)
        return []

    def _go_on(self, final: bool) -> list[Piece]:
        """The reasoning up to its end, or as far as it is certain."""
        pieces = self._skipped()
        end = self._held.find(CLOSE)
        if end >= 0:
            size = end + len(CLOSE)
            said = self._take(size)[:end].rstrip("\n")
            self._over = self._skip.on = True
            return [*pieces, Piece(Part.REASONING, size, said)]
        size = len(self._held) - (0 if final else held_back(self._held, CLOSE))
        return [*pieces, Piece(Part.REASONING, size, self._take(size))] if size else pieces

    def _skipped(self) -> list[Piece]:
        size = self._skip.take(self._held)
        self._take(size)
        return [Piece(Part.REASONING, size)] if size else []

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken
