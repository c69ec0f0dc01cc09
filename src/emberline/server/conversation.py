"""A conversation to be answered: its prompt, what binds the answer, and how the answer is read.

Owns how tools, reasoning and structured output go together, for every endpoint that takes messages.
Must not know the shapes of bodies and answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.engine.detokenizer import TokenText
from emberline.server.answer_parts import AnswerReader, AnswerSplitter
from emberline.server.chat_body import Message
from emberline.server.dialect import Dialect
from emberline.server.prompts import EncodedPrompt
from emberline.server.reasoning import Thinking, grammar_behind, stops_behind, thinking_at
from emberline.server.service import Service
from emberline.server.structured import AskedGrammar
from emberline.server.tool_grammar import call_or_match, may_call, must_call
from emberline.server.tools_body import Function, NamedChoice, Tool, check_tools
from emberline.types import InvalidRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an endpoint was asked to answer."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str | NamedChoice | None = None  # None = auto
    parallel_tool_calls: bool | None = None  # None = as the model likes
    grammar: AskedGrammar | None = None  # of the content
    reasoning_effort: str | None = None
    effort_param: str = "reasoning_effort"  # what the body calls it
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the model is shown: none where it may not call any."""
        return () if self.tool_choice == "none" else self.tools


@dataclass(frozen=True, slots=True)
class Plan:
    """How a conversation is answered."""

    prompt: EncodedPrompt
    params: SamplingParams
    dialect: Dialect
    thinking: Thinking
    functions: tuple[str, ...] = ()  # names of what may be called

    def reader(self, text: TokenText) -> AnswerReader | None:
        """Tells the parts of one answer apart; None where an answer is only content."""
        if self.thinking is Thinking.NONE and not self.functions:
            return None
        return AnswerReader(text, self.params, self._splitter)

    def _splitter(self) -> AnswerSplitter:
        calls = self.dialect.call_splitter(self.functions) if self.functions else None
        return AnswerSplitter(self.thinking, calls)


async def plan(service: Service, asked: Conversation, params: SamplingParams) -> Plan:
    """How to answer a conversation.

    Args:
        service: with the model's tokenizer and dialect.
        asked: the conversation.
        params: options of the answer, without a grammar.

    Raises:
        InvalidRequest: fields that contradict each other, that the model's template does not take,
            or a schema that does not compile.
    """
    dialect = service.dialect
    check_tools(asked.tools, asked.tool_choice)
    tools = asked.callable_tools
    prompt = await service.encoder.chat(
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        template_kwargs=_template_kwargs(asked, dialect),
        tools=[tool.rendered() for tool in tools],
    )
    if (
        tools and dialect.tools == "none"
    ):  # and the template shows them: else they are refused above
        message = (
            "how this model writes tool calls is not known: leave tools out, or start the server "
            "with --tool-parser"
        )
        raise InvalidRequest(message, "tools")
    thinking = thinking_at(prompt.ending) if dialect.thinks else Thinking.NONE
    bound = await _grammar(service, asked, dialect)
    if bound is not None:
        behind = replace(bound, grammar=grammar_behind(bound.grammar, thinking))
        params = replace(params, grammar=await service.grammar(behind))
    return Plan(
        prompt=prompt,
        params=stops_behind(params, thinking),
        dialect=dialect,
        thinking=thinking,
        functions=tuple(tool.function.name for tool in tools),
    )


async def _grammar(service: Service, asked: Conversation, dialect: Dialect) -> AskedGrammar | None:
    """What the answer must match behind its reasoning, if anything."""
    functions: list[Function] = [tool.function for tool in asked.callable_tools]
    if not functions:
        return asked.grammar
    parallel = asked.parallel_tool_calls is not False
    style, tokens = dialect.tools, service.encoder.named_tokens
    choice = asked.tool_choice
    if isinstance(choice, NamedChoice):
        named = [function for function in functions if function.name == choice.function.name]
        return AskedGrammar(must_call(named, style, tokens, parallel=False), "tools")
    if choice == "required":
        return AskedGrammar(must_call(functions, style, tokens, parallel=parallel), "tools")
    if asked.grammar is not None:
        content = await service.grammar(asked.grammar)  # alone, so that its refusal names it
        assert content is not None
        both = call_or_match(functions, style, tokens, content, parallel=parallel)
        return AskedGrammar(both, "tools")
    if not parallel or any(function.strict for function in functions):
        return AskedGrammar(may_call(functions, style, tokens, parallel=parallel), "tools")
    return None


def _template_kwargs(asked: Conversation, dialect: Dialect) -> Mapping[str, Any]:
    """The template's arguments, with the reasoning effort in the way that the template takes it."""
    effort, param = asked.reasoning_effort, asked.effort_param
    if effort is None:
        return asked.template_kwargs
    name: str
    value: str | bool
    if dialect.reads("reasoning_effort"):
        name, value = "reasoning_effort", effort
    elif effort != "none":
        message = f"this model's template has no {param}: leave it out"
        if dialect.reads("enable_thinking"):
            message = f"this model's template takes no {param} but none: leave it out to think"
        raise InvalidRequest(message, param)
    elif dialect.reads("enable_thinking"):
        name, value = "enable_thinking", False
    elif dialect.thinks:
        message = f"this model's template cannot turn its thinking off: leave {param} out"
        raise InvalidRequest(message, param)
    else:
        return asked.template_kwargs
    if asked.template_kwargs.get(name, value) != value:
        message = f"{param} and chat_template_kwargs contradict each other: give one"
        raise InvalidRequest(message, param)
    return {**asked.template_kwargs, name: value}
