"""How a model writes tool calls and reasoning, by its chat template or as the server was told.

Owns the names of the styles and what in a template speaks for one. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from emberline.encoding import reads, template_source
from emberline.server import reasoning, tool_parsing
from emberline.server.parts import Splitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolStyle = Literal["hermes", "llama_json", "none"]
ToolParser = Literal["auto", "hermes", "llama_json", "none"]
ReasoningParser = Literal["auto", "think", "none"]

# Other ways to write a call, which look alike.
_FOREIGN = ("<function=", "<arg_key>", "[TOOL_CALLS]")


@dataclass(frozen=True, slots=True)
class Dialect:
    """What of a model's answers has a meaning besides its text."""

    tools: ToolStyle = "none"
    thinks: bool = False
    template: str = ""  # the chat template's source, all of them if it has several

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable of that name."""
        return reads(self.template, name)

    def call_splitter(self, names: Collection[str]) -> Splitter:
        """Tells calls of the named functions from content."""
        if self.tools == "hermes":
            return tool_parsing.MarkedCalls()
        return tool_parsing.BareCalls(names)


def dialect_of(
    tokenizer: PreTrainedTokenizerBase,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> Dialect:
    """The dialect of a model.

    Args:
        tokenizer: with the chat template, if the model has one.
        tool_parser: the style of its calls; auto: what the template shows.
        reasoning_parser: whether <think> begins reasoning; auto: if the template knows it.
    """
    if tool_parser not in get_args(ToolParser) or reasoning_parser not in get_args(ReasoningParser):
        raise ValueError(f"no such parser: {tool_parser}, {reasoning_parser}")
    template = template_source(tokenizer)
    thinks = reasoning.CLOSE in template if reasoning_parser == "auto" else None
    return Dialect(
        tools=_style(template) if tool_parser == "auto" else tool_parser,
        thinks=reasoning_parser == "think" if thinks is None else thinks,
        template=template,
    )


def _style(template: str) -> ToolStyle:
    if any(other in template for other in _FOREIGN):
        return "none"
    if tool_parsing.OPEN in template:
        return "hermes" if "arguments" in template else "none"
    shown = '"name":' in template and '"parameters":' in template and "tools" in template
    return "llama_json" if shown else "none"
