"""Grammars of answers that may or must call tools.

Owns how a call is written for a grammar, in the styles that `tool_parsing` reads. Must not know
bodies, templates or where the grammar begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from emberline.server.dialect import ToolStyle
from emberline.server.lark import ANY_TEXT, json_value, literal, running_text
from emberline.server.tool_parsing import CLOSE, OPEN
from emberline.server.tools_body import Function
from emberline.types import Grammar, InvalidRequest

# What begins like a call: a free answer may not, or it would be read as one.
_LOOKS_LIKE_CALL = r'/\s*(<\|python_tag\|>)?\s*\{\s*"(name|type)"(.|\n)*/'


def must_call(
    functions: Sequence[Function], style: ToolStyle, tokens: Mapping[str, int], *, parallel: bool
) -> Grammar:
    """An answer that is calls: one, or several where `parallel`."""
    return Grammar("lark", f"start: calls\n{_calls(functions, style, tokens, parallel=parallel)}")


def may_call(
    functions: Sequence[Function], style: ToolStyle, tokens: Mapping[str, int], *, parallel: bool
) -> Grammar:
    """A text in which every call is a valid one, and one at most if not `parallel`.

    Args:
        functions: what may be called.
        style: how the model writes calls.
        tokens: the tokenizer's named tokens.
        parallel: whether there may be several calls.
    """
    if style == "hermes":
        bodies = [(OPEN, _marked(function, tokens)) for function in functions]
        return Grammar("lark", running_text(bodies, tokens, once=not parallel))
    calls = _calls(functions, style, tokens, parallel=parallel)
    return Grammar("lark", f"start: calls | FREE\nFREE: {ANY_TEXT} & ~{_LOOKS_LIKE_CALL}\n{calls}")


def call_or_match(
    functions: Sequence[Function],
    style: ToolStyle,
    tokens: Mapping[str, int],
    content: Grammar,
    *,
    parallel: bool,
) -> Grammar:
    """An answer that is calls, or a text that matches `content`.

    Raises:
        InvalidRequest: the content's grammar cannot stand beside another.
    """
    if content.kind == "lark":
        message = "a grammar or a choice cannot be combined with tools: use tool_choice none"
        raise InvalidRequest(message, "tools")
    if content.kind == "regex":
        body = "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", content.source) + "/"
    else:
        try:
            schema = json.loads(content.source)
        except ValueError as problem:
            raise InvalidRequest(f"the json_schema is not JSON: {problem}", "grammar") from None
        body = json_value(schema if isinstance(schema, dict) else {})
    calls = _calls(functions, style, tokens, parallel=parallel)
    return Grammar("lark", f"start: calls | content\ncontent: {body}\n{calls}")


def _calls(
    functions: Sequence[Function], style: ToolStyle, tokens: Mapping[str, int], *, parallel: bool
) -> str:
    """The rules of `calls`."""
    if style == "hermes":
        separator, before = '"\\n"', literal(OPEN, tokens)
        options = [f"{before} {_marked(function, tokens)}" for function in functions]
    else:
        separator, options = '"; "', [_bare(function) for function in functions]
    more = f" ({separator} call)*" if parallel else ""
    return f"calls: call{more}\ncall: " + " | ".join(f"({option})" for option in options)


def _marked(function: Function, tokens: Mapping[str, int]) -> str:
    """A call from behind its opening marker to its closing one."""
    head = literal(f'\n{{"name": "{function.name}", "arguments": ', {})
    tail = literal(f"}}\n{CLOSE}", tokens)
    return f"{head} {json_value(function.schema_of_arguments)} {tail}"


def _bare(function: Function) -> str:
    head = literal(f'{{"name": "{function.name}", "parameters": ', {})
    return f'{head} {json_value(function.schema_of_arguments)} "}}"'
