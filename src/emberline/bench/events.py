"""What one event of a streamed answer says, in the dialects of several engines.

Owns the names of JSON fields in chunks; knows nothing of times. Read once for every chunk that
arrives, so it looks at little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

# Root fields that tell of a whole answer: usage, and how it was speculated (acceptance.py).
WHOLE = ("usage", "emberline", "metrics", "meta_info", "timings")
_TEXTS = ("content", "reasoning", "reasoning_content")


def error_message(body: Any) -> str | None:
    """The message of an error object, OpenAI's or vLLM's older shape; None if it is none."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or "error")
    if error:
        return str(error)
    if body.get("object") == "error" or ("detail" in body and "choices" not in body):
        return str(body.get("message") or body.get("detail") or "error")
    return None


def count_of(parent: object, *names: str) -> int | None:
    """The first of the fields `names` of an object that is a count."""
    if isinstance(parent, Mapping):
        for name in names:
            value = parent.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
                return int(value)
    return None


def output_of(choice: Json) -> str | None:
    """The text that a chunk's choice adds; None where it carries no output.

    A role or an empty delta is no output. Reasoning and tool calls are output, and so are token
    ids or logprob records whose text is held back (a character that is not finished, the end).
    """
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
    else:
        text = "".join(delta.get(name) or "" for name in _TEXTS)
        if not text and delta.get("tool_calls"):
            return ""
    if text:
        return text
    records = choice.get("logprobs") or {}
    shown = records.get("content") or records.get("tokens") or choice.get("token_ids")
    return "" if shown else None
