"""The bodies of `POST /tokenize` and `POST /detokenize`, in the dialects of two servers.

Owns their fields. Must not know how a text becomes tokens.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from emberline.server.chat_body import Message
from emberline.server.protocol import Body


class TokenizeBody(Body):
    """`POST /tokenize`, in vLLM's dialect (prompt or messages) and llama.cpp's (content)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special: bool = False
    parse_special: Literal[True] = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`, the same body in both dialects."""

    model: str | None = None
    tokens: list[int]
