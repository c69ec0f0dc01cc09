"""Prompt files: what users say, a conversation a line, and its token ids.

Owns the forms of a line and how words become ids. Must not know what the answers are for.

A line is a JSON object with exactly one of

    {"turns": ["first question", "what is said after its answer", ...]}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]}
    {"prompt": "a question"}

Other fields are the file's own and are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberline.types import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = ("turns", "messages", "prompt")
EXPECTED = '{"turns": ["..."]}, {"messages": [{"role": ..., "content": ...}]} or {"prompt": "..."}'

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is said to the model: everything up to its first answer, and users' later turns."""

    opening: tuple[Message, ...]  # at least one; the last is a user's
    later: tuple[str, ...] = ()  # said after the first answer, the second, ...

    @classmethod
    def of(cls, *turns: str) -> Conversation:
        """A conversation of user turns alone."""
        first, *later = turns
        return cls((Message("user", first),), tuple(later))

    @property
    def text(self) -> str:
        """What comes before the first answer, for telling conversations apart."""
        return "\n".join(message.content for message in self.opening)


def read_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """The conversations of a JSON lines file, the first `limit` of them.

    Raises:
        InvalidRequest: the file cannot be read, holds none, or a line is none; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{path}: cannot be read ({problem})", "prompts") from problem
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_conversation(json.loads(line)))
        except ValueError as problem:
            reason = "no JSON" if isinstance(problem, json.JSONDecodeError) else problem
            message = f"{path}: line {number} must be {EXPECTED}: {reason}"
            raise InvalidRequest(message, "prompts") from problem
    if not found:
        raise InvalidRequest(f"{path}: holds no prompt", "prompts")
    return found[:limit]


def conversation_ids(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> TokenIds:
    """The opening, ready for the answer: in the chat template if the model has one.

    Raises:
        InvalidRequest: the template refuses the messages, or there is none and they are several.
    """
    from jinja2 import TemplateError

    opening = conversation.opening
    if not tokenizer.chat_template:
        if len(opening) > 1:
            message = "the model has no chat template: a prompt is one text, not several messages"
            raise InvalidRequest(message, "prompts")
        return tuple(tokenizer(opening[0].content)["input_ids"])
    messages = [{"role": one.role, "content": one.content} for one in opening]
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as problem:
        message = f"the model's chat template refuses the messages: {problem}"
        raise InvalidRequest(message, "prompts") from problem
    return tuple(ids)


def _conversation(raw: Any) -> Conversation:
    if not isinstance(raw, dict):
        raise ValueError(f"got {type(raw).__name__}")
    given = [form for form in FORMS if form in raw]
    if len(given) != 1:
        raise ValueError(f"got {' and '.join(given) or 'none of them'}")
    value = raw[given[0]]
    if given == ["messages"]:
        return _of_messages(value)
    turns = value if given == ["turns"] else [value]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{given[0]} is empty or no list")
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{given[0]} holds what is no text, or an empty one")
    return Conversation.of(*turns)


def _of_messages(value: Any) -> Conversation:
    if not isinstance(value, list) or not value:
        raise ValueError("messages is empty or no list")
    messages = []
    for one in value:
        role = one.get("role") if isinstance(one, Mapping) else None
        content = one.get("content") if isinstance(one, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a message needs a role and a content, both texts")
        messages.append(Message(role, content))
    if messages[-1].role != "user":
        raise ValueError(f"the last message must be the user's, not the {messages[-1].role}'s")
    return Conversation(tuple(messages))
