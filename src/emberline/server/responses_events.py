"""A response from its first event to its last: which item is open, what it all adds up to.

Owns the order of events, their numbers and the response object. Streamed or not, a response is
built here, so that both agree. Must not know the engine or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from emberline.server.records import Json, RecordFormat
from emberline.server.responses_output import ItemPiece, OutputItem, open_item
from emberline.types import TokenLogprobs


class ResponseBuilder:
    """The events of one response.

    Args:
        head: the response's fields, without what the answer makes of them.
        form: writes records; None if they were not asked for.
    """

    def __init__(self, head: Json, form: RecordFormat | None) -> None:
        self._head, self._form = head, form
        self._open: OutputItem | None = None
        self._held: tuple[TokenLogprobs, ...] = ()  # records of tokens that had no text yet
        self._num_events = 0
        self.output: list[Json] = []  # items that have ended

    def begin(self) -> Iterator[Json]:
        """The events before anything is said."""
        response = self.response("in_progress")
        yield self._numbered({"type": "response.created", "response": response})
        yield self._numbered({"type": "response.in_progress", "response": response})

    def add(self, pieces: Iterable[ItemPiece]) -> Iterator[Json]:
        """The events that tell of more of the answer."""
        for piece in pieces:
            yield from map(self._numbered, self._add(piece))

    def end(self, status: str) -> Iterator[Json]:
        """The events that end the items; there is one even of an answer that says nothing."""
        yield from map(self._numbered, self._end(status))

    def last(self, status: str, **fields: object) -> Json:
        """The event that ends the response."""
        response = self.response(status, **fields)
        return self._numbered({"type": f"response.{status}", "response": response})

    def response(self, status: str, **fields: object) -> Json:
        """The response as it stands."""
        return self._head | {"status": status, "output": list(self.output)} | fields

    def _add(self, piece: ItemPiece) -> list[Json]:
        events: list[Json] = []
        if self._open is None or not self._open.takes(piece):
            # Tokens without text (an end token behind a call) are no reason for an item.
            if not piece.text and piece.begins is None:
                self._held += piece.records
                return events
            events += self._close("completed") + self._begin_item(piece)
        assert self._open is not None
        events += self._open.add(self._with_held(piece))
        return events

    def _end(self, status: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None:
            events += self._begin_item(ItemPiece("message"))
        assert self._open is not None
        if self._held:
            events += self._open.add(self._with_held(ItemPiece(self._open.kind)))
        return events + self._close(status)

    def _with_held(self, piece: ItemPiece) -> ItemPiece:
        if not self._held:
            return piece
        held, self._held = self._held, ()
        return ItemPiece(piece.kind, piece.text, held + piece.records, piece.begins)

    def _begin_item(self, piece: ItemPiece) -> list[Json]:
        self._open = open_item(piece, len(self.output), self._form)
        return self._open.opened()

    def _close(self, status: str) -> list[Json]:
        if self._open is None:
            return []
        item, events = self._open.closed(status)
        self.output.append(item)
        self._open = None
        return events

    def _numbered(self, event: Json) -> Json:
        number = self._num_events
        self._num_events += 1
        return {"type": event["type"], "sequence_number": number} | event
