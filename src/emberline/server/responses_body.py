"""The body of `POST /v1/responses`: its fields, and how they become sampling options.

Owns what may be asked of a response. Must not know tokens, templates, the engine or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from emberline.server.bodies import Fields, asked_for
from emberline.server.chat_body import Effort, Message
from emberline.server.conversation import Conversation
from emberline.server.errors import ApiError
from emberline.server.protocol import GenerationBody, MetricsLevel
from emberline.server.responses_items import Item, MessageItem, asked_items
from emberline.server.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    StructuredFields,
    StructuredOutputs,
    asked_grammar,
)
from emberline.server.tools_body import ChosenFunction, Function, FunctionName, NamedChoice, Tool
from emberline.types import InvalidRequest, SamplingParams

MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"

# What the Responses API has and this server has not, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
}
# Fields of the other endpoints that clients carry over, with what to do instead.
_ELSEWHERE: Mapping[str, str] = {
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "logprobs": f'use include: ["{LOGPROBS}"]',
    "response_format": "use text.format",
    "guided_json": "use text.format",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "reasoning_effort": "use reasoning.effort",
    "prediction": "leave it out, or use /v1/chat/completions",
}
_UNSUPPORTED_TEXT = {"verbosity": ("medium",)}
_UNSUPPORTED_REASONING = {
    "context": ("auto",),
    "generate_summary": (),
    "mode": ("standard",),
    "summary": (),
}


class StreamOptions(Fields):
    """What a stream carries besides its events: the last of them always has the usage."""

    include_usage: Literal[True] = True
    include_obfuscation: Literal[False] = False


class TextFormat(Fields):
    """What an answer's text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] | None = Field(default=None, alias="schema")

    def response_format(self) -> ResponseFormat | None:
        """The same as chat writes it; None for any text.

        Raises:
            InvalidRequest: a schema is missing, or has no place here.
        """
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        if self.type != "json_schema":
            if schema:
                field = next(iter(schema))
                message = f"text.format.{field} needs type json_schema"
                raise InvalidRequest(message, f"text.format.{field}")
            return JsonObjectFormat(type="json_object") if self.type == "json_object" else None
        for field in ("name", "schema"):
            if field not in schema:
                message = f"text.format.{field} is missing: a json_schema has both name and schema"
                raise InvalidRequest(message, f"text.format.{field}")
        return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(**schema))


class TextConfig(Fields):
    """`text`."""

    format: TextFormat = Field(default_factory=TextFormat)


class ReasoningConfig(Fields):
    """`reasoning`."""

    effort: Effort | None = None


class FunctionTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = True  # this API's default

    def tool(self) -> Tool:
        """The same as chat writes it."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class NamedTool(Fields):
    """`tool_choice`: one function, which is to be called."""

    type: Literal["function"]
    name: FunctionName


def _choice_kind(value: object) -> str:
    return "<mode>" if isinstance(value, str) else "<function>"


def _input_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<items>" if isinstance(value, list) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<function>")],
    Discriminator(_choice_kind),
]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Tag("<items>")],
    Discriminator(
        _input_kind,
        custom_error_type="input_kind",
        custom_error_message="must be a text or a list of items",
    ),
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponsesBody(GenerationBody):
    """`POST /v1/responses`."""

    input: Input = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    top_logprobs: int = 0
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"  # without tools it asks for nothing
    truncation: Literal["disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    structured_outputs: StructuredOutputs | None = None
    per_request_metrics: MetricsLevel | None = None
    store: bool = True
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)
    stream_options: StreamOptions | None = None  # type: ignore[assignment]

    @classmethod
    def asked_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be validated, nested objects included. Raises `ApiError` as its base does."""
        data = asked_for(given, UNSUPPORTED)
        for name in filter(_ELSEWHERE.__contains__, data):
            message = f"{name} is not supported on this route: {_ELSEWHERE[name]}"
            raise ApiError(400, message, param=name, code="unknown_parameter")
        if isinstance(data.get("input"), list):
            data["input"] = asked_items(data["input"], "input")
        nested = (("text", _UNSUPPORTED_TEXT), ("reasoning", _UNSUPPORTED_REASONING))
        for name, unsupported in nested:
            if isinstance(data.get(name), dict):
                data[name] = asked_for(data[name], unsupported, f"{name}.")
        text = data.get("text")
        if isinstance(text, dict) and isinstance(text.get("format"), dict):
            text["format"] = asked_for(text["format"], {}, "text.format.")
        if isinstance(data.get("tools"), list):
            data["tools"] = [_asked_tool(tool, i) for i, tool in enumerate(data["tools"])]
        return data

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text carries a record a token."""
        return LOGPROBS in self.include

    def conversation(self, messages: Sequence[Message], tokens: Mapping[str, int]) -> Conversation:
        """What is to be answered.

        Args:
            messages: the conversation so far.
            tokens: the tokenizer's named tokens.

        Raises:
            InvalidRequest: a format without its schema, or two that contradict each other.
        """
        choice: str | NamedChoice | None = None
        if isinstance(self.tool_choice, NamedTool):
            chosen = ChosenFunction(name=self.tool_choice.name)
            choice = NamedChoice(type="function", function=chosen)
        elif self.tool_choice != "auto":
            choice = self.tool_choice
        return Conversation(
            messages=messages,
            tools=[tool.tool() for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            grammar=asked_grammar(self._structured(), tokens),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            effort_param="reasoning.effort",
            template_kwargs=self.chat_template_kwargs,
        )

    def sampling_params(self) -> SamplingParams:
        """Options of the answer. Raises `InvalidRequest` naming the field."""
        if self.n != 1:
            raise InvalidRequest(f"n must be 1, got {self.n}: a response has one answer", "n")
        top = self.top_logprobs
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            message = f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {top}"
            raise InvalidRequest(message, "top_logprobs")
        if top and not self.wants_logprobs:
            raise InvalidRequest(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
        return self._params(self.max_output_tokens, top if self.wants_logprobs else None)

    def _structured(self) -> StructuredFields:
        return StructuredFields(
            response_format=self.text.format.response_format(),
            structured_outputs=self.structured_outputs,
        )


def _asked_tool(tool: object, index: int) -> object:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        raise ApiError(
            400,
            f"tools[{index}].type: only function tools are supported, not {kind!r}",
            param=f"tools[{index}].type",
            code="unsupported_tool",
        )
    return asked_for(tool, {}, f"tools[{index}].")


# The names of this API for what the engine and the other endpoints call otherwise.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "messages": "input",
    "grammar": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
_UNMISTAKABLE = ("max_tokens", "response_format", "reasoning_effort")  # no words of the language


def renamed(problem: InvalidRequest) -> InvalidRequest:
    """A refusal in the words of this API."""
    message, param = str(problem), problem.param
    message = message.replace("needs logprobs", f'needs include: ["{LOGPROBS}"]')
    for name in _UNMISTAKABLE:
        message = message.replace(name, _NAMES[name])
    if param is not None:
        if param.startswith("messages["):  # which of the items it was made of is not known any more
            param = "messages"
        param = _NAMES.get(param, param).replace(".function.name", ".name")  # of a tool
    return InvalidRequest(message, param)
