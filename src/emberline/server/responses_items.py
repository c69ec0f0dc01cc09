"""The items of a conversation as the Responses API writes them, and the messages they become.

Owns what an input item may hold. Must not know sampling options, templates, the engine or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from emberline.server.bodies import Fields, asked_for
from emberline.server.chat_body import Message
from emberline.server.errors import ApiError
from emberline.server.tools_body import CalledFunction, ObjectText, ToolCall
from emberline.types import InvalidRequest

Status = Literal["in_progress", "completed", "incomplete"]

PARTS = ("input_text", "output_text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")

_REFUSED: Mapping[str, tuple[object, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "encrypted_content": (),
}


class InputText(Fields):
    """Text that a client wrote."""

    type: Literal["input_text"]
    text: str


class OutputText(Fields):
    """Text that a model wrote, as it stood in an earlier answer."""

    type: Literal["output_text"]
    text: str
    logprobs: list[Any] = Field(default_factory=list)  # of the earlier answer: nothing follows


def _part_kind(value: object) -> str:
    return _tag(value, PARTS)


def _item_kind(value: object) -> str:
    return _tag(value, ITEMS)


def _tag(value: object, known: Sequence[str]) -> str:
    """What a value is checked as: its type if that is known, else the first."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind if kind in known else known[0]}>"


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")] | Annotated[OutputText, Tag("<output_text>")],
    Discriminator(_part_kind),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<parts>")],
    Discriminator(_content_kind),
]


class MessageItem(Fields):
    """What somebody said. The type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Fields):
    """A call that a model asked for."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: ObjectText
    id: str | None = None
    status: Status | None = None
    logprobs: list[Any] = Field(default_factory=list)


class FunctionOutputItem(Fields):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None


class ThoughtText(Fields):
    """A stretch of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str
    logprobs: list[Any] = Field(default_factory=list)


class ReasoningItem(Fields):
    """What a model thought before it answered."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ThoughtText] = Field(default_factory=list)
    content: list[ThoughtText] = Field(default_factory=list)
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_kind),
]


def asked_items(items: Sequence[Any], path: str) -> list[Any]:
    """Items without nulls, after a look at the types that a client gave them.

    Raises:
        ApiError: 400 naming an item or part of a type that is not supported.
    """
    asked = []
    for i, item in enumerate(items):
        if isinstance(item, dict):
            place = f"{path}[{i}]."
            item = asked_for(item, _REFUSED, place)
            _check_type(item, ITEMS, place)
            for name in ("content", "summary", "output"):
                if isinstance(item.get(name), list):
                    item[name] = _asked_parts(item, name, f"{place}{name}")
        asked.append(item)
    return asked


def _asked_parts(item: dict[str, Any], name: str, path: str) -> list[Any]:
    parts = []
    for j, part in enumerate(item[name]):
        if isinstance(part, dict):
            part = asked_for(part, _REFUSED, f"{path}[{j}].")
            if item.get("type", "message") != "reasoning":
                _check_type(part, PARTS, f"{path}[{j}].")
        parts.append(part)
    return parts


def _check_type(value: dict[str, Any], known: Sequence[str], prefix: str) -> None:
    kind = value.get("type", known[0])
    if isinstance(kind, str) and kind not in known:
        raise ApiError(
            400,
            f"{prefix}type: only {', '.join(known)} are supported, not {kind!r}",
            param=prefix + "type",
            code="unsupported_content",
        )


def text_of(content: str | Sequence[InputText | OutputText]) -> str:
    """One text, as chat joins the parts of a message."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def check_results(earlier: Sequence[Item], items: Sequence[Item]) -> None:
    """Raise `InvalidRequest` for a result in the input `items` that no call before it has."""
    called = {item.call_id for item in earlier if isinstance(item, FunctionCallItem)}
    for i, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        elif isinstance(item, FunctionOutputItem) and item.call_id not in called:
            path = f"input[{i}].call_id"
            message = f"{path}: no function_call before it has the call_id {item.call_id!r}"
            raise InvalidRequest(message, path)


def to_messages(items: Sequence[Item]) -> list[Message]:
    """What a chat template is given for a conversation.

    What a model thought, said and called in a row is one message, as it once was one answer.
    """
    messages: list[Message] = []
    turn: list[Item] = []  # of a model, not a message yet
    for item in items:
        if isinstance(item, MessageItem) and item.role == "assistant":
            # A second text in a row is a second answer.
            if any(isinstance(said, MessageItem) for said in turn):
                messages, turn = [*messages, _answer(turn)], []
            turn.append(item)
        elif isinstance(item, MessageItem | FunctionOutputItem):
            if turn:
                messages, turn = [*messages, _answer(turn)], []
            messages.append(_message(item))
        else:
            turn.append(item)
    return [*messages, _answer(turn)] if turn else messages


def _message(item: MessageItem | FunctionOutputItem) -> Message:
    if isinstance(item, FunctionOutputItem):
        return Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
    return Message(role=item.role, content=text_of(item.content))


def _answer(turn: Sequence[Item]) -> Message:
    """One message of an assistant from what it thought, said and called."""
    said = [text_of(item.content) for item in turn if isinstance(item, MessageItem)]
    thought = [
        part.text
        for item in turn
        if isinstance(item, ReasoningItem)
        for part in item.content or item.summary
    ]
    calls = [
        ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
        for item in turn
        if isinstance(item, FunctionCallItem)
    ]
    return Message(
        role="assistant",
        content=said[0] if said else None if calls else "",
        tool_calls=calls,
        reasoning_content="\n".join(thought) or None,
    )


def as_input(output: Mapping[str, Any]) -> list[Item]:
    """An output item as a later input holds it: its text, without records.

    Nothing for a call that was cut in the middle: it cannot be answered.
    """
    match output["type"]:
        case "message":
            parts: list[Part] = [
                OutputText(type="output_text", text=part["text"]) for part in output["content"]
            ]
            return [MessageItem(role="assistant", content=parts, id=output["id"])]
        case "function_call":
            names = ("type", "call_id", "name", "arguments", "id")
            try:
                return [FunctionCallItem(**{name: output[name] for name in names})]
            except ValidationError:
                return []
        case _:
            thoughts = [
                ThoughtText(type=part["type"], text=part["text"]) for part in output["content"]
            ]
            return [ReasoningItem(type="reasoning", content=thoughts, id=output["id"])]
