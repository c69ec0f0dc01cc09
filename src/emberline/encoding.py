"""Prompts of a Python program to token ids, or refused in words: texts, ids, conversations, pairs.

Owns what may be given as a prompt there. Must not know engines, sampling or HTTP.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emberline.types import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Prompt = str | Sequence[int]

THOUGHT_END = "</think>"
"""What ends the reasoning of models that write it into their answers."""

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_SHOWN = {"tool_calls": ("tool calls", ""), "reasoning_content": ("reasoning", THOUGHT_END)}
"""What a template may leave out: in words, and a text in it that says that it knows of it."""


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a plain prompt, with whatever special tokens the tokenizer adds."""
    if isinstance(prompt, str):
        if not prompt.isascii() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise InvalidRequest(
                "the prompt holds half a surrogate pair: no text has one", "prompt"
            )
        return _plain_ids(tokenizer, prompt)
    return _ids(prompt, "prompt")


def _plain_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """Token ids of a text. That it is too long the engine says, in its own words."""
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return tuple(encoded["input_ids"])


def _ids(values: Sequence[int], param: str) -> tuple[int, ...]:
    """Token ids, NumPy's among them, as plain integers."""
    try:
        is_text = isinstance(values, bytes | bytearray | str)
        if not is_text and not any(isinstance(value, bool) for value in values):
            return tuple(operator.index(value) for value in values)
        raise TypeError
    except TypeError:
        raise InvalidRequest(f"{param} must be a text or a list of token ids", param) from None


def encode_prediction(
    tokenizer: PreTrainedTokenizerBase, prediction: Prompt | None
) -> tuple[int, ...]:
    """Token ids of a predicted answer, which follows a prompt: no special tokens."""
    if isinstance(prediction, str):
        return _plain_ids(tokenizer, prediction, add_special_tokens=False)
    return () if prediction is None else _ids(prediction, "prediction")


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation, ready for the assistant's turn.

    Raises:
        InvalidRequest: there is no message, or they are no messages.
    """
    if not messages:
        raise InvalidRequest("messages is empty: give at least one", "messages")
    if isinstance(messages, str) or not all(isinstance(one, Mapping) for one in messages):
        raise InvalidRequest("messages must be a list of {role, content}", "messages")
    rendered = [_rendered(index, one) for index, one in enumerate(messages)]
    check_conversation(rendered, template_source(tokenizer))
    try:
        ids = tokenizer.apply_chat_template(
            rendered,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    except Exception as problem:  # templates are programs: they raise what they like
        message = f"the chat template refused these messages: {problem}"
        raise InvalidRequest(message, "messages") from problem
    return tuple(ids)


def _rendered(index: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: one text, and "system" for OpenAI's "developer".

    What is None is not there: clients write out all that a message could have.
    """
    message = {key: value for key, value in message.items() if value is not None}
    needed = ["role"] if "tool_calls" in message else ["role", "content"]
    for key in needed:  # templates say so in words of their own
        if key not in message:
            raise InvalidRequest(f"messages[{index}] has no {key}: give it", "messages")
    for key in message:
        if key not in FIELDS:
            known = ", ".join(FIELDS)
            raise InvalidRequest(f"messages[{index}].{key}: only {known} are known", "messages")
    role, content = message["role"], _text_of(message.get("content"), index)
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"messages[{index}].role must be one of {known}", "messages")
    calls = message.get("tool_calls") or ()
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    if not is_list or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"messages[{index}].tool_calls must be a list of calls", "messages")
    reasoning = message.pop("reasoning", None)
    if reasoning is not None and message.setdefault("reasoning_content", reasoning) != reasoning:
        where = f"messages[{index}].reasoning_content"
        raise InvalidRequest(f"{where} differs from reasoning: give one", "messages")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _text_of(content: Any, index: int) -> str | None:
    """A content as one text; None: nothing is said."""
    if isinstance(content, str | None):
        return content
    is_list = isinstance(content, Sequence) and not isinstance(content, bytes)
    if not (is_list and all(isinstance(part, Mapping) and _is_text(part) for part in content)):
        wanted = 'a text, or a list of {"type": "text", "text": ...}'
        raise InvalidRequest(f"messages[{index}].content must be {wanted}", "messages")
    return "\n".join(part["text"] for part in content)


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str) and len(part) == 2


def template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's source, all of them if there are several; empty: there is none."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def reads(template: str, name: str) -> bool:
    """Whether a template reads a variable or a field of that name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def check_conversation(messages: Sequence[Message], template: str) -> None:
    """Refuse what a template would leave out without a word, and results of calls nobody made.

    Args:
        messages: as templates take them.
        template: its source.

    Raises:
        InvalidRequest: naming the field.
    """
    called: set[object] = set()
    for index, message in enumerate(messages):
        for name, (what, sign) in _SHOWN.items():
            if message.get(name) and not (reads(template, name) or (sign and sign in template)):
                raise InvalidRequest(
                    f"this model's chat template shows no {what} of earlier turns: leave them out",
                    f"messages[{index}].{name}",
                )
        called.update(call.get("id") for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and None not in called:  # a call without an id fits any
            where, given = f"messages[{index}].tool_call_id", message.get("tool_call_id")
            if given is None:
                raise InvalidRequest(f"{where} is missing: say which call it answers", where)
            if given not in called:
                raise InvalidRequest(f"{where}: no call before it has the id {given!r}", where)


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[Prompt, Prompt]]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Token ids of prompts with their continuations, and where each continuation starts.

    Raises:
        InvalidRequest: one of them has no token.
    """
    texts, starts = [], []
    for index, pair in enumerate(pairs):
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequest(f"pairs[{index}] must be (prompt, continuation)", "pairs")
        prompt, continuation = pair
        before = encode(tokenizer, prompt)
        if isinstance(continuation, str):
            after = _plain_ids(tokenizer, continuation, add_special_tokens=False)
        else:
            after = _ids(continuation, "continuation")
        for what, ids in (("prompt", before), ("continuation", after)):
            if not ids:
                raise InvalidRequest(f"a {what} has no token: give at least one", "pairs")
        texts.append(before + after)
        starts.append(len(before))
    return texts, starts
