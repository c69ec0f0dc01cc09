"""The parts of an answer: what a model thinks, says and calls, in the order in which it wrote them.

Owns the words for the parts. Must not know how they are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Part(StrEnum):
    """What a stretch of an answer belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Piece:
    """The next stretch of an answer. The sizes of all pieces add up to the whole answer."""

    part: Part
    size: int  # characters of the answer that it stands for, markers included
    text: str = ""  # what it adds to the reasoning, the content, or the call's arguments
    call: int | None = None  # which call it belongs to, from 0
    name: str | None = None  # of the function, where a call begins


class Splitter(Protocol):
    """Tells the parts of one answer apart, whatever pieces its text comes in."""

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """What can be told after `text`; `final`: nothing follows, and nothing is held back."""
        ...


def held_back(text: str, marker: str) -> int:
    """Characters at the end of a text that the next ones may turn into a marker.

    Line breaks before a marker belong to it.
    """
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            break
    else:
        length = 0
    before = text[: len(text) - length]
    return len(text) - len(before.rstrip("\n"))


class Skip:
    """Line breaks behind a marker, which belong to it."""

    def __init__(self) -> None:
        self.on = False

    def take(self, text: str) -> int:
        """How many characters at the start of `text` are such; none any more behind others."""
        if not self.on or not text:
            return 0
        rest = text.lstrip("\n")
        self.on = not rest
        return len(text) - len(rest)
