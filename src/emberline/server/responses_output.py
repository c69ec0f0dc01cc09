"""The output items of a response while they grow, and the events that tell of it.

Owns the shapes of items and of the events about one item. Must not know the engine, the response
round the items, or how an answer was cut into pieces.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from emberline.server.records import Json, RecordFormat
from emberline.types import TokenLogprobs

Kind = Literal["message", "reasoning", "function_call"]


@dataclass(frozen=True, slots=True)
class ItemPiece:
    """A stretch of an answer that belongs to one output item.

    `text` may lag behind `records`, as a stretch's text waits for whole characters.
    """

    kind: Kind
    text: str = ""  # of a function call: of its arguments
    records: tuple[TokenLogprobs, ...] = ()
    begins: str | None = None  # the function's name, where a call begins


def fresh_id(prefix: str) -> str:
    """An id as the Responses API writes it."""
    return f"{prefix}_{secrets.token_hex(16)}"


def without_bytes(entries: Iterable[Json]) -> list[Json]:
    """Records as the events about a text carry them."""
    return [
        {key: _bare(key, value) for key, value in entry.items() if key != "bytes"}
        for entry in entries
    ]


def _bare(key: str, value: Any) -> Any:
    if key == "top_logprobs":
        return without_bytes(value)
    return without_bytes([value])[0] if key == "processed" else value


class OutputItem:
    """One output item: opened, added to, closed.

    Args:
        index: its place in the output.
        form: writes its records; None if they were not asked for.
    """

    kind: Kind
    prefix: str

    def __init__(self, index: int, form: RecordFormat | None) -> None:
        self.id = fresh_id(self.prefix)
        self.text = ""
        self._index, self._form = index, form
        self._records: list[TokenLogprobs] = []

    def takes(self, piece: ItemPiece) -> bool:
        """Whether a piece goes on with this item."""
        return piece.kind == self.kind and piece.begins is None

    def add(self, piece: ItemPiece) -> list[Json]:
        """The events that tell of more."""
        self.text += piece.text
        records = piece.records if self._form is not None else ()
        self._records += records
        if not piece.text and not records:
            return []
        return [self._delta(piece.text, without_bytes(self._entries(records)))]

    def opened(self) -> list[Json]:
        """The events that tell of its beginning."""
        raise NotImplementedError

    def closed(self, status: str) -> tuple[Json, list[Json]]:
        """The whole item, and the events that tell of its end."""
        raise NotImplementedError

    def _delta(self, text: str, entries: list[Json]) -> Json:
        raise NotImplementedError

    def _entries(self, records: Iterable[TokenLogprobs]) -> list[Json]:
        return [] if self._form is None else self._form.chat_entries(records)

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": f"response.{kind}", "output_index": self._index} | fields

    def _own_event(self, kind: str, **fields: object) -> Json:
        return self._event(kind, item_id=self.id, **fields)

    def _extra_records(self, entries: list[Json]) -> Json:
        """An extension: records where the API has no place for them."""
        return {} if self._form is None else {"logprobs": entries}


class MessageOutput(OutputItem):
    """What the model says: a message with one part of text."""

    kind: Kind = "message"
    prefix = "msg"

    def opened(self) -> list[Json]:
        """The item without parts, then its part without text."""
        return [
            self._event("output_item.added", item=self._item("in_progress", [])),
            self._own_event("content_part.added", content_index=0, part=self._part([])),
        ]

    def closed(self, status: str) -> tuple[Json, list[Json]]:
        """Text, part and item, each whole."""
        entries = self._entries(self._records)
        part = self._part(entries)
        item = self._item(status, [part])
        text = {"text": self.text, "logprobs": without_bytes(entries)}
        return item, [
            self._own_event("output_text.done", content_index=0, **text),
            self._own_event("content_part.done", content_index=0, part=part),
            self._event("output_item.done", item=item),
        ]

    def _delta(self, text: str, entries: list[Json]) -> Json:
        return self._own_event("output_text.delta", content_index=0, delta=text, logprobs=entries)

    def _part(self, entries: list[Json]) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": entries}

    def _item(self, status: str, content: list[Json]) -> Json:
        start = {"id": self.id, "type": "message", "status": status}
        return start | {"role": "assistant", "content": content}


class ReasoningOutput(OutputItem):
    """What the model thinks first. Records are an extension."""

    kind: Kind = "reasoning"
    prefix = "rs"

    def opened(self) -> list[Json]:
        """The item without parts, then its part without text."""
        return [
            self._event("output_item.added", item=self._item("in_progress", [])),
            self._own_event("content_part.added", content_index=0, part=self._part([])),
        ]

    def closed(self, status: str) -> tuple[Json, list[Json]]:
        """Text, part and item, each whole."""
        part = self._part(self._entries(self._records))
        item = self._item(status, [part])
        return item, [
            self._own_event("reasoning_text.done", content_index=0, text=self.text),
            self._own_event("content_part.done", content_index=0, part=part),
            self._event("output_item.done", item=item),
        ]

    def _delta(self, text: str, entries: list[Json]) -> Json:
        records = self._extra_records(entries)
        return self._own_event("reasoning_text.delta", content_index=0, delta=text, **records)

    def _part(self, entries: list[Json]) -> Json:
        return {"type": "reasoning_text", "text": self.text} | self._extra_records(entries)

    def _item(self, status: str, content: list[Json]) -> Json:
        start = {"id": self.id, "type": "reasoning", "status": status}
        return start | {"summary": [], "content": content}


class CallOutput(OutputItem):
    """A call of a function. Records are an extension."""

    kind: Kind = "function_call"
    prefix = "fc"

    def __init__(self, index: int, form: RecordFormat | None, name: str) -> None:
        super().__init__(index, form)
        self.name = name
        self.call_id = fresh_id("call")

    def opened(self) -> list[Json]:
        """The item without arguments."""
        return [self._event("output_item.added", item=self._item("in_progress"))]

    def closed(self, status: str) -> tuple[Json, list[Json]]:
        """Arguments and item, each whole."""
        item = self._item(status) | self._extra_records(self._entries(self._records))
        said = {"name": self.name, "arguments": self.text}
        return item, [
            self._own_event("function_call_arguments.done", **said),
            self._event("output_item.done", item=item),
        ]

    def _delta(self, text: str, entries: list[Json]) -> Json:
        records = self._extra_records(entries)
        return self._own_event("function_call_arguments.delta", delta=text, **records)

    def _item(self, status: str) -> Json:
        start = {"id": self.id, "type": "function_call", "status": status}
        return start | {"call_id": self.call_id, "name": self.name, "arguments": self.text}


def open_item(piece: ItemPiece, index: int, form: RecordFormat | None) -> OutputItem:
    """The item that begins with a piece, which is not added to it yet."""
    match piece.kind:
        case "message":
            return MessageOutput(index, form)
        case "reasoning":
            return ReasoningOutput(index, form)
        case "function_call":
            return CallOutput(index, form, piece.begins or "")
