"""The request bodies of the API: fields, limits, and how they become sampling options.

Owns parsing and validation. A field is honoured or refused by name, never dropped; null means
absent. Must not know tokens, the engine or HTTP beyond a body's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator, ValidationError

from emberline.server.bodies import Fields, asked_for, first_error, read_json, refuse_other_parts
from emberline.server.structured import StructuredFields
from emberline.types import ALL_LOGPROBS, InvalidRequest, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 16
MAX_BAD_WORDS = 256

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
BadWord = Annotated[str, Field(min_length=1, max_length=1000)]
CallId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
MetricsLevel = Literal["none", "summary"]


def _check_prompt(value: object) -> object:
    """A union would report every element of a long prompt against every alternative."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        nested = (type(item) is list and all(type(i) is int for i in item) for item in value)
        if {*map(type, value)} in (set(), {str}, {int}) or all(nested):
            return value
    raise ValueError("must be a text, a list of texts, token ids, or a list of lists of token ids")


_PromptTypes = str | list[str] | list[int] | list[list[int]]
Prompt = Annotated[_PromptTypes, PlainValidator(_check_prompt, json_schema_input_type=_PromptTypes)]

# What OpenAI's API has and this server has not, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "use_beam_search": (False,),
    "cache_salt": (),
    "truncate_prompt_tokens": (),
}
MESSAGE_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {**UNSUPPORTED, "annotations": ([],)}


class Body(Fields):
    """A JSON body."""

    @classmethod
    def asked_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be validated of a body: without nulls and without what asks for nothing.

        Raises:
            ApiError: something that is not supported is asked for.
        """
        return _asked_for(given, "")


class StreamOptions(Body):
    """What a stream carries besides its tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(Body):
    """The fields that all endpoints share which generate."""

    model: str | None = None
    temperature: Finite = 1.0
    top_p: Finite = 1.0
    top_k: int = 0
    min_p: Finite = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    frequency_penalty: Finite = 0.0
    presence_penalty: Finite = 0.0
    repetition_penalty: Finite = 1.0
    logit_bias: dict[str, Finite] = Field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: list[TokenId] = Field(default_factory=list)
    logprobs_mode: Literal["raw", "processed", "both"] = "raw"
    annotations: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    accept: Literal["auto", "rejection", "coupled"] = "auto"
    speculate: bool = True
    priority: int = 0
    timeout: Finite | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Accepted, without effect on the answer.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None

    def _params(self, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings", "stop")
        if self.prompt_logprobs is not None and self.prompt_logprobs < ALL_LOGPROBS:
            message = (
                f"prompt_logprobs must be at least 0, or {ALL_LOGPROBS} for the whole vocabulary, "
                f"got {self.prompt_logprobs}"
            )
            raise InvalidRequest(message, "prompt_logprobs")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest(
                "prompt_logprobs_start needs prompt_logprobs", "prompt_logprobs_start"
            )
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "n": self.n,
            "logit_bias": logit_biases(self.logit_bias),
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "stop": stops,
            "stop_token_ids": self.stop_token_ids,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "min_tokens": self.min_tokens,
            "max_tokens": max_tokens,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "logprobs": logprobs,
            "logprob_token_ids": self.logprob_token_ids,
            "prompt_logprobs": self.prompt_logprobs,
            "prompt_logprobs_start": self.prompt_logprobs_start,
            "logprobs_mode": self.logprobs_mode,
            "annotations": self.annotations,
            "allowed_token_ids": self.allowed_token_ids,
            "accept": self.accept,
            "speculate": self.speculate,
        }
        return SamplingParams(**(options | more))


class ChoicesBody(GenerationBody, StructuredFields):
    """The fields of the endpoints whose answers have choices."""

    request_id: CallId | None = None
    per_request_metrics: MetricsLevel | None = None


class CompletionBody(ChoicesBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = None
    logprobs: bool | int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    def sampling_params(self) -> SamplingParams:
        """Options of every choice. Raises `InvalidRequest` naming the field."""
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of must be 1 or equal to n", "best_of")
        logprobs = self.num_logprobs
        more: dict[str, Any] = {}
        if self.echo and (logprobs is not None or self.max_tokens == 0):
            wanted = logprobs or 0
            for name, idle in (
                ("prompt_logprobs", (None, wanted)),
                ("prompt_logprobs_start", (0,)),
            ):
                if getattr(self, name) not in idle:
                    message = f"echo reports the whole prompt as `logprobs` says: leave {name} out"
                    raise InvalidRequest(message, name)
            more["prompt_logprobs"] = wanted
        return self._params(self.max_tokens, logprobs, **more)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt of the call, whichever of the four ways it was written."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if one else list(prompt)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for, -1 for all; `true` is 1, as with the clients that send it."""
        if self.logprobs is None or self.logprobs is False:
            return None
        if self.logprobs < ALL_LOGPROBS:
            raise InvalidRequest(
                f"logprobs must be a number of alternatives, or {ALL_LOGPROBS} for the whole "
                f"vocabulary, got {self.logprobs}",
                "logprobs",
            )
        return int(self.logprobs)


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """A validated body.

    Raises:
        ApiError: 400 naming the field, for anything that is not strict JSON of this kind.
    """
    given = read_json(body)
    data = kind.asked_for(given)
    messages = data.get("messages")
    if isinstance(messages, list):
        refuse_other_parts(messages)
        data["messages"] = [
            asked_for(message, MESSAGE_UNSUPPORTED, f"messages[{i}].")
            if isinstance(message, dict)
            else message
            for i, message in enumerate(messages)
        ]
    if isinstance(data.get("stream_options"), dict):
        data["stream_options"] = _asked_for(data["stream_options"], "stream_options.")
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        raise first_error(problem, given) from None


def _asked_for(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return asked_for(data, UNSUPPORTED, prefix)


def logit_biases(bias: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id, as JSON writes them by its text. Raises `InvalidRequest`."""
    biases: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(f"logit_bias keys are token ids, got {key!r}", "logit_bias")
        if int(key) in biases:
            raise InvalidRequest(f"logit_bias gives token id {int(key)} twice", "logit_bias")
        biases[int(key)] = value
    return biases
