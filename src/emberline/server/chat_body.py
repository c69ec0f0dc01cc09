"""The body of a chat: its messages, its fields, and how they become sampling options.

Owns what a conversation may hold. Must not know tokens, templates, the engine or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from emberline.server.bodies import Fields, asked_for
from emberline.server.protocol import UNSUPPORTED, Body, ChoicesBody
from emberline.server.tools_body import Tool, ToolCall, ToolChoice
from emberline.types import InvalidRequest, SamplingParams

MAX_CHAT_TOP_LOGPROBS = 20

# Of what other endpoints have not.
_SUPPORTED = ("tools", "tool_choice", "prediction", "reasoning_effort")

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


# Told apart before they are checked, so that an error speaks of what was sent.
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_content_kind),
]


def text_of(content: str | list[TextPart], joint: str = "\n") -> str:
    """A content as one text."""
    return content if isinstance(content, str) else joint.join(part.text for part in content)


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] = Field(default_factory=list)  # before the content: it asks for them
    content: Content | None = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None

    @field_validator("tool_calls", "reasoning", "reasoning_content")
    @classmethod
    def _is_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only assistant messages have it")
        other = info.data.get("reasoning")
        if info.field_name == "reasoning_content" and None not in (value, other) and value != other:
            raise ValueError("differs from reasoning: give one")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _is_there(cls, value: object, info: ValidationInfo) -> object:
        """Only a message that calls tools needs to say nothing."""
        calls = info.data.get("tool_calls", ())
        if value is None and calls == []:  # calls that are wrong are not there at all
            raise PydanticCustomError("missing", "Field required")
        return value

    def rendered(self) -> dict[str, Any]:
        """What chat templates expect: one string, and "system" for OpenAI's "developer"."""
        content = None if self.content is None else text_of(self.content)
        extra = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.rendered() for call in self.tool_calls] or None,
        }
        given = {key: value for key, value in extra.items() if value is not None}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **given}


class Prediction(Fields):
    """What the answer will probably be."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The whole of it."""
        return text_of(self.content, "")


class ChatBody(ChoicesBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None

    @classmethod
    def asked_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Body.asked_for`."""
        missing = {name: idle for name, idle in UNSUPPORTED.items() if name not in _SUPPORTED}
        return asked_for(given, missing)

    def sampling_params(self) -> SamplingParams:
        """Options of every choice. Raises `InvalidRequest` naming the field."""
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_CHAT_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be in [0, {MAX_CHAT_TOP_LOGPROBS}], got {top}", "top_logprobs"
            )
        if top and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: give one", "max_tokens"
            )
        width = (top or 0) if self.logprobs else None
        try:
            return self._params(limits.pop() if limits else None, width)
        except InvalidRequest as problem:
            raise self.in_its_words(problem) from None

    def in_its_words(self, problem: InvalidRequest) -> InvalidRequest:
        """A refusal that names the limit as this body does."""
        if problem.param != "max_tokens" or self.max_tokens is not None:
            return problem
        message = str(problem).replace("max_tokens", "max_completion_tokens")
        return InvalidRequest(message, "max_completion_tokens")
