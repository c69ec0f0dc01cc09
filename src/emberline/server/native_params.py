"""The sampling options of `POST /generate` and how they become the engine's.

Owns their names, their defaults, and the way back: an error of the engine in this route's words.
Must not know tokens, prompts or answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from emberline.server.protocol import (
    MAX_BAD_WORDS,
    MAX_STOPS,
    BadWord,
    Body,
    Finite,
    TokenId,
    logit_biases,
)
from emberline.server.structured import (
    AskedGrammar,
    StructuralTag,
    lark_grammar,
    parse_tag,
    regex_grammar,
    schema_grammar,
    structural_grammar,
)
from emberline.types import Grammar, InvalidRequest, SamplingParams

DEFAULT_NEW_TOKENS = 128
MAX_EBNF = 2**14
"""Characters of an EBNF grammar: its translation runs on the event loop."""

EXTENSIONS = ("logprobs_mode", "annotations", "accept", "speculate")
"""Options that the API does not have: the body takes them, too, for all prompts of a call."""

# The engine's options that have another name here.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "lark": "grammar",
}
_WORD = re.compile(rf"(?<![-\w])({'|'.join(_NAMES)})\b")  # no part of an option, as --max-logprobs
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


class NativeSampling(Body):
    """`sampling_params` of one prompt."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: Finite = 1.0
    top_p: Finite = 1.0
    top_k: int = -1
    min_p: Finite = 0.0
    frequency_penalty: Finite = 0.0
    presence_penalty: Finite = 0.0
    repetition_penalty: Finite = 1.0
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    seed: int | None = None
    sampling_seed: int | None = None
    logit_bias: dict[str, Finite] = Field(default_factory=dict)
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: Annotated[str, Field(max_length=MAX_EBNF)] | None = None
    structural_tag: StructuralTag | str | None = None
    logprobs_mode: Literal["raw", "processed", "both"] = "raw"
    annotations: bool = False
    accept: Literal["auto", "rejection", "coupled"] = "auto"
    speculate: bool = True

    def with_extras(self, extras: Mapping[str, Any]) -> NativeSampling:
        """These options, and those that the body itself gave.

        Raises:
            InvalidRequest: one is given twice, differently, or has no meaning.
        """
        for name, value in extras.items():
            if name in self.model_fields_set and getattr(self, name) != value:
                raise InvalidRequest(f"{name} and sampling_params.{name} differ: give one", name)
        return self.model_copy(update=dict(extras)) if extras else self

    def params(self, room: int, grammar: Grammar | None, **more: Any) -> SamplingParams:
        """The engine's options.

        Args:
            room: tokens that the context has left for the answer.
            grammar: what `asked_grammar` asks for.
            more: what is asked about log-probabilities. Bad words are left to who has a tokenizer.

        Raises:
            InvalidRequest: a value has no meaning; in the engine's words.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings", "stop")
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise InvalidRequest("seed and sampling_seed differ: give one", "sampling_seed")
        max_tokens = self.max_new_tokens
        if max_tokens is not None and max_tokens < 0:
            message = f"max_new_tokens must be at least 0, got {max_tokens}"
            raise InvalidRequest(message, "max_new_tokens")
        if max_tokens is None:
            max_tokens = max(1, self.min_new_tokens, min(DEFAULT_NEW_TOKENS, room))
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.sampling_seed if self.seed is None else self.seed,
            n=self.n,
            logit_bias=logit_biases(self.logit_bias),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=stops,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.no_stop_trim,
            min_tokens=self.min_new_tokens,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs_mode=self.logprobs_mode,
            allowed_token_ids=self.allowed_token_ids,
            grammar=grammar,
            accept=self.accept,
            speculate=self.speculate,
            **more,
        )

    def asked_grammar(self, tokens: Mapping[str, int]) -> AskedGrammar | None:
        """What the answer must match, if anything.

        Args:
            tokens: the tokenizer's named tokens, which are no text to a grammar.

        Raises:
            InvalidRequest: two fields ask, or one of them makes no sense.
        """
        fields = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(fields) > 1:
            raise InvalidRequest(f"give one of {' and '.join(fields)}", fields[1])
        try:
            return AskedGrammar(self._grammar(fields[0], tokens), fields[0]) if fields else None
        except InvalidRequest as problem:
            raise InvalidRequest(str(problem), fields[0]) from None

    def _grammar(self, field: str, tokens: Mapping[str, int]) -> Grammar:
        value: Any = getattr(self, field)
        match field:
            case "json_schema":
                return schema_grammar(value)
            case "regex":
                return regex_grammar(value)
            case "ebnf":
                return lark_grammar(value)
            case _:
                return structural_grammar(parse_tag(value), tokens)


def in_native_words(problem: InvalidRequest) -> InvalidRequest:
    """A refusal by the engine's names as one by this route's."""
    message = _WORD.sub(lambda word: _NAMES[word[0]], str(problem))
    name = problem.param and _NAMES.get(problem.param, problem.param)
    if name in NativeSampling.model_fields and name not in EXTENSIONS:
        name = f"sampling_params.{name}"
    return InvalidRequest(message, name)
