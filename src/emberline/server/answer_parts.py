"""One answer read as it comes: its text told apart, and the part that each token belongs to.

Owns that the parts of the tokens are those of the text, byte by byte. Must not know the shape of an
answer, nor how a model writes calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from emberline.engine.detokenizer import TokenText
from emberline.server.parts import Part, Piece, Splitter
from emberline.server.reasoning import ReasoningSplitter, Thinking
from emberline.types import RequestOutput, SamplingParams, TokenLogprobs


class AnswerSplitter:
    """A `Splitter` of reasoning, then content and calls.

    Args:
        thinking: what the answer begins with.
        calls: tells calls from content; None: there are none.
    """

    def __init__(self, thinking: Thinking, calls: Splitter | None) -> None:
        self._reasoning = ReasoningSplitter(thinking)
        self._calls = calls

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """See `Splitter`."""
        pieces: list[Piece] = []
        for piece in self._reasoning.feed(text, final=final):
            if piece.part is Part.CONTENT and self._calls is not None:
                pieces += self._calls.feed(piece.text)
            else:
                pieces.append(piece)
        if final and self._calls is not None:
            pieces += self._calls.feed("", final=True)
        return pieces


class Stretches:
    """Numbers the stretches of an answer, which end where the part changes or a call begins."""

    def __init__(self) -> None:
        self._number = -1
        self._part: Part | None = None
        self._call: int | None = None

    def number(self, piece: Piece) -> int:
        """The stretch of the next piece, from 0."""
        other_call = piece.call is not None and piece.call != self._call
        if piece.part is not self._part or (other_call and self._call is not None):
            self._number += 1
            self._part, self._call = piece.part, None
        self._call = piece.call if piece.call is not None else self._call
        return self._number


@dataclass(frozen=True, slots=True)
class PartToken:
    """A token whose part is known."""

    token_id: int
    record: TokenLogprobs | None
    part: Part
    stretch: int  # as `Stretches` counts; 0 for an answer without text


class TokenParts:
    """The part of every token of an answer, in order, as soon as it is certain.

    A token belongs to the part in which its first byte stands. One that adds no text belongs where
    it stands: to what follows, at the end to what came before.
    """

    def __init__(self, text: TokenText, params: SamplingParams, splitter: Splitter) -> None:
        self._text, self._params, self._splitter = text, params, splitter
        self._waiting: deque[tuple[int, TokenLogprobs | None, int]] = deque()  # and where it starts
        self._length = 0  # bytes so far
        self._spans: deque[tuple[int, Part, int]] = deque()  # where each known piece ends
        self._stretches = Stretches()
        self._told = 0  # bytes whose part is known
        self._last = (Part.CONTENT, 0)

    def push(
        self, tokens: Iterable[tuple[int, TokenLogprobs | None]], *, final: bool
    ) -> list[PartToken]:
        """Add tokens; returns those whose part has become certain, all of them if `final`."""
        # Markers are ASCII, so that bytes can be told apart as the characters of the same number.
        added = []
        for token_id, record in tokens:
            self._waiting.append((token_id, record, self._length))
            piece = self._text.visible_bytes(token_id, self._params)
            self._length += len(piece)
            added.append(piece)
        for told in self._splitter.feed(b"".join(added).decode("latin-1"), final=final):
            self._told += told.size
            stretch = self._stretches.number(told)
            if told.size:
                self._spans.append((self._told, told.part, stretch))
        known = []
        while self._waiting and (final or self._waiting[0][2] < self._told):
            token_id, record, start = self._waiting.popleft()
            known.append(PartToken(token_id, record, *self._part_at(start)))
        return known

    def _part_at(self, start: int) -> tuple[Part, int]:
        """The part and the stretch of the byte at `start`, which never falls."""
        while self._spans and self._spans[0][0] <= start:
            self._last = self._spans.popleft()[1:]
        return self._spans[0][1:] if self._spans else self._last


@dataclass(frozen=True, slots=True)
class Reading:
    """What an output adds to an answer."""

    pieces: list[Piece]
    tokens: list[PartToken]  # those whose part has become certain


class AnswerReader:
    """The parts of one answer, output by output.

    Args:
        text: what every token adds.
        params: the request's.
        make_splitter: a fresh splitter of such an answer; the text and the tokens have one each,
            for a stop string cuts the one and not the other.
    """

    def __init__(
        self, text: TokenText, params: SamplingParams, make_splitter: Callable[[], Splitter]
    ) -> None:
        self._splitter = make_splitter()
        self._tokens = TokenParts(text, params, make_splitter())
        self.num_reasoning = 0
        """Tokens of reasoning so far."""

    def read(self, output: RequestOutput) -> Reading:
        """What the next output, or the whole answer, adds."""
        records = output.logprobs or (None,) * len(output.token_ids)
        pairs = zip(output.token_ids, records, strict=True)
        tokens = self._tokens.push(pairs, final=output.finished)
        self.num_reasoning += sum(token.part is Part.REASONING for token in tokens)
        return Reading(self._splitter.feed(output.text, final=output.finished), tokens)
