"""Prompts of a Python program to token ids, or refused in words: texts, ids, conversations, pairs.

Owns what may be given as a prompt there. Must not know engines, sampling or HTTP.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from emberline.types import InvalidRequest

Message = dict[str, str]
Prompt = str | Sequence[int]


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
    for index, one in enumerate(messages):
        needed = ["role"] if "tool_calls" in one else ["role", "content"]
        for key in needed:  # templates say so in words of their own
            if key not in one:
                raise InvalidRequest(f"messages[{index}] has no {key}: give it", "messages")
        if not isinstance(one.get("content"), str | Sequence | None):
            raise InvalidRequest(f"messages[{index}].content must be a text", "messages")
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    except Exception as problem:  # templates are programs: they raise what they like
        message = f"the chat template refused these messages: {problem}"
        raise InvalidRequest(message, "messages") from problem
    return tuple(ids)


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
