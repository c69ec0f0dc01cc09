"""What an answer's outputs add to which output item: text, records, the beginnings of calls.

Owns that every record goes to the item in whose text its token stands. Must not know the shapes of
items, nor how parts are told apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from emberline.server.answer_parts import AnswerReader, PartToken, Stretches
from emberline.server.parts import Part
from emberline.server.responses_output import ItemPiece, Kind
from emberline.types import RequestOutput, TokenLogprobs

_KINDS: Mapping[Part, Kind] = {
    Part.REASONING: "reasoning",
    Part.CONTENT: "message",
    Part.TOOL_CALL: "function_call",
}


class ItemReader:
    """The pieces of one answer, output by output.

    Args:
        reader: tells parts apart; None where an answer is only content.
    """

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._stretches = Stretches()
        self._waiting: deque[PartToken] = deque()  # their text has not come yet

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        return 0 if self._reader is None else self._reader.num_reasoning

    def read(self, output: RequestOutput) -> list[ItemPiece]:
        """What the next output, or the whole answer, adds."""
        if self._reader is None:
            return [ItemPiece("message", output.text, tuple(output.logprobs or ()))]
        reading = self._reader.read(output)
        self._waiting += reading.tokens
        pieces = []
        for piece in reading.pieces:
            stretch = self._stretches.number(piece)
            records = self._take(stretch)
            pieces.append(ItemPiece(_KINDS[piece.part], piece.text, records, piece.name))
        if output.finished and self._waiting:
            # Behind a stop string, or without text: they end what came last.
            kind = pieces[-1].kind if pieces else "message"
            pieces.append(ItemPiece(kind, records=self._take(None)))
        return pieces

    def _take(self, last: int | None) -> tuple[TokenLogprobs, ...]:
        """The records that wait, up to those of stretch `last`; None: all."""
        records = []
        while self._waiting and (last is None or self._waiting[0].stretch <= last):
            record = self._waiting.popleft().record
            if record is not None:
                records.append(record)
        return tuple(records)
