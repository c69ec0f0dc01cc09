"""Pieces of Lark grammars as text: literals, JSON values, running text with structures in it.

Owns the notation, and that a named token of the tokenizer (`<tool_call>`) is no text to a grammar:
where a literal holds one, it is named by its id. Must not know tools, formats or bodies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON's tokens; bounded, for a model that once indents for ever never stops."""
ANY_TEXT = r"/(.|\n)*/"


def named_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokens of a tokenizer that a grammar takes for names, not for text."""
    special = set(tokenizer.all_special_tokens)
    return {
        text: token_id
        for text, token_id in tokenizer.get_added_vocab().items()
        if text in special or (text.startswith("<") and text.endswith(">"))
    }


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """A fixed text; nothing for an empty one."""
    parts = [text]
    if tokens:
        longest_first = sorted(tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return " ".join(_literal(part, tokens) for part in parts if part)


def _literal(part: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[part]}]>" if part in tokens else json.dumps(part, ensure_ascii=False)


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that a schema describes."""
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(options | dict(schema), ensure_ascii=False)}"


def running_text(
    structures: Sequence[tuple[str, str]], tokens: Mapping[str, int], *, once: bool = False
) -> str:
    """A grammar of free text in which structures stand.

    Args:
        structures: of each, the text that triggers it and the rule's body for what must follow.
        tokens: the tokenizer's named tokens.
        once: there may be one of them at most.
    """
    rules = [f"start: {'FREE | tag REST' if once else '(tag)* FREE'}", f"FREE: {ANY_TEXT}"]
    if once:
        plain = dict.fromkeys(trigger for trigger, _ in structures if trigger not in tokens)
        others = "".join(f" & ~/(.|\\n)*{_pattern(trigger)}(.|\\n)*/" for trigger in plain)
        rules.append(f"REST: {ANY_TEXT}{others}")
    by_trigger: dict[str, list[str]] = {}
    for trigger, body in structures:
        by_trigger.setdefault(trigger, []).append(body)
    rules.append("tag: " + " | ".join(f"tag{i}" for i in range(len(by_trigger))))
    for i, (trigger, bodies) in enumerate(by_trigger.items()):
        options = " | ".join(f"({body})" for body in bodies)
        if trigger in tokens:
            rules.append(f"tag{i}: FREE {literal(trigger, tokens)} ({options})")
        else:
            # The shortest text that ends in the trigger: from there on nothing else may follow.
            rules.append(f"head{i}[lazy]: /(.|\\n)*/ {literal(trigger, tokens)}")
            rules.append(f"tag{i}: head{i} ({options})")
    return "\n".join(rules)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
