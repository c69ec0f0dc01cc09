"""The body of a chat: its messages, its fields, and how they become sampling options.

Owns what a conversation may hold. Must not know tokens, templates, the engine or HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from emberline.server.protocol import Body, ChoicesBody
from emberline.types import InvalidRequest, SamplingParams

MAX_CHAT_TOP_LOGPROBS = 20


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


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None

    def rendered(self) -> dict[str, str]:
        """What chat templates expect: one string, and "system" for OpenAI's "developer"."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        extra = {"name": self.name, "tool_call_id": self.tool_call_id}
        given = {key: value for key, value in extra.items() if value is not None}
        return {"role": role, "content": content, **given}


class ChatBody(ChoicesBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

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
        return self._params(limits.pop() if limits else None, (top or 0) if self.logprobs else None)
