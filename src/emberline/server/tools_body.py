"""Tools in a chat's body: what may be called, what must be, and what was called before.

Owns these fields and what contradicts what. Must not know templates, grammars or how a model writes
a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from emberline.server.bodies import Fields
from emberline.types import InvalidRequest

MAX_TOOLS = 128
NAME = r"^[A-Za-z0-9_-]{1,64}$"

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function that says nothing of them."""

FunctionName = Annotated[str, Field(pattern=NAME)]


class Function(Fields):
    """A function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """What its arguments must match."""
        return NO_ARGUMENTS if self.parameters is None else self.parameters


class Tool(Fields):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        """What chat templates expect: the tool as it was sent, without what is only for us."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": function}


class ChosenFunction(Fields):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Fields):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: ChosenFunction


def _choice_kind(value: object) -> str:
    return "<word>" if isinstance(value, str) else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(_choice_kind),
]


def _object_text(value: str) -> str:
    try:
        known = isinstance(json.loads(value or "{}"), dict)
    except ValueError:
        known = False
    if not known:
        raise ValueError("must be the JSON text of an object")
    return value


ObjectText = Annotated[str, AfterValidator(_object_text)]


class CalledFunction(Fields):
    """A function that was called, with its arguments as JSON text."""

    name: str = Field(min_length=1)
    arguments: ObjectText = ""


class ToolCall(Fields):
    """A call that an assistant's message made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """What chat templates expect: the arguments as an object, which they write themselves."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        given = {} if self.id is None else {"id": self.id}
        return {**given, "type": self.type, "function": function}


def check_tools(tools: Sequence[Tool], choice: str | NamedChoice | None) -> None:
    """Raise `InvalidRequest` for tools that share a name, and for a choice that has none."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            message = f"tools has two functions of the name {name!r}"
            raise InvalidRequest(message, f"tools[{i}].function.name")
    if not tools and choice not in (None, "none"):
        raise InvalidRequest("tool_choice needs tools: give some, or leave it out", "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        message = f"tool_choice names {choice.function.name!r}, which is not among the tools"
        raise InvalidRequest(message, "tool_choice")
