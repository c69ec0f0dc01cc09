"""The body of `POST /generate`: one prompt or a batch, and what is asked about each.

Owns the fields' names and defaults, how values are shared out among the prompts of a batch, and
errors in this route's words. Must not know tokens, the engine or answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, JsonValue, PlainValidator, Tag

from emberline.server.bodies import asked_for
from emberline.server.native_params import EXTENSIONS, NativeSampling, in_native_words
from emberline.server.protocol import Body, Finite
from emberline.types import Grammar, InvalidRequest, SamplingParams

MAX_NAME = 512  # characters of a `rid`
MAX_PRIORITY = 2**31 - 1

# What that API has and this server has not, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "custom_logit_processor": (),
    "lora_path": (),
    "lora_id": (),
    "session_params": (),
    "background": (False,),
    "log_metrics": (True,),
    "no_logs": (True, False),
    "extra_key": (),
    "data_parallel_rank": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}
SAMPLING_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "stop_regex": ("", []),
    "custom_params": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
}

Value = TypeVar("Value")


def _check_ids(value: object) -> object:
    """A union would report every element of a long prompt against every alternative."""
    if isinstance(value, list):
        nested = (type(item) is list and all(type(i) is int for i in item) for item in value)
        if all(type(item) is int for item in value) or all(nested):
            return value
    raise ValueError("must be token ids, or a list of lists of token ids")


_IdTypes = list[int] | list[list[int]]
Ids = Annotated[_IdTypes, PlainValidator(_check_ids, json_schema_input_type=_IdTypes)]


def _check_chosen(value: object) -> object:
    """Ids of all prompts, or a list of ids (or null) for each."""
    if isinstance(value, list):
        each = [item for item in value if item is not None]
        lists = [item for item in each if type(item) is list]
        if len(lists) == len(each) and all(type(i) is int for ids in lists for i in ids):
            return value
        if all(type(item) is int for item in value):
            return value
    raise ValueError("must be token ids, or a list of token ids (or null) for each prompt")


_ChosenTypes = list[int] | list[list[int] | None]
Chosen = Annotated[_ChosenTypes, PlainValidator(_check_chosen, json_schema_input_type=_ChosenTypes)]


def _sampling_kind(value: object) -> str:
    return "<each>" if isinstance(value, list) else "<one>"


# Told apart before they are checked, so that an error speaks of what was sent.
SamplingOptions = Annotated[
    Annotated[NativeSampling, Tag("<one>")] | Annotated[list[NativeSampling], Tag("<each>")],
    Discriminator(_sampling_kind),
]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
# For the API's description; the check itself is in words that name the field.
ONE_PROMPT: list[JsonValue] = [{"required": ["text"]}, {"required": ["input_ids"]}]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks for one of its prompts."""

    prompt: str | Sequence[int]
    sampling: NativeSampling
    logprobs: bool
    start: int  # first prompt position reported; -1 = none
    num_top: int
    chosen: tuple[int, ...] | None  # ids scored at every position

    def params(self, num_prompt: int, max_tokens: int, grammar: Grammar | None) -> SamplingParams:
        """The engine's options for a prompt of `num_prompt` tokens.

        The first reported position of a prompt has no value, so that scores begin one later.

        Raises:
            InvalidRequest: a value has no meaning; in the engine's words.
        """
        if self.logprobs and self.start > num_prompt:
            message = f"logprob_start_len {self.start} is past the prompt's {num_prompt} tokens"
            raise InvalidRequest(message, "logprob_start_len")
        more: dict[str, Any] = {}
        if self.logprobs:
            more |= {"logprobs": self.num_top, "logprob_token_ids": self.chosen or ()}
            more |= {"annotations": self.sampling.annotations}
        if self.logprobs and 0 <= self.start < num_prompt - 1:
            more |= {"prompt_logprobs": self.num_top, "prompt_logprobs_start": self.start + 1}
        elif self.sampling.max_new_tokens == 0:  # nothing to draw: the engine wants to score then
            more |= {"prompt_logprobs": 0, "prompt_logprobs_start": num_prompt - 1}
        return self.sampling.params(max_tokens - num_prompt, grammar, **more)


class GenerateBody(Body):
    """`POST /generate`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": ONE_PROMPT})

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: Ids | None = None
    sampling_params: SamplingOptions = Field(default_factory=NativeSampling)
    rid: Name | list[Name] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: Chosen | None = None
    return_text_in_logprobs: bool = False
    logprobs_mode: Literal["raw", "processed", "both"] | None = None
    annotations: bool | list[bool] | None = None
    accept: Literal["auto", "rejection", "coupled"] | None = None
    speculate: bool | None = None
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: Finite | None = None

    @classmethod
    def asked_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be validated: see `Body.asked_for`."""
        asked = asked_for(given, UNSUPPORTED)
        options = asked.get("sampling_params")
        if isinstance(options, dict):
            prefix = "sampling_params."
            asked["sampling_params"] = asked_for(options, SAMPLING_UNSUPPORTED, prefix)
        elif isinstance(options, list):
            asked["sampling_params"] = [
                asked_for(one, SAMPLING_UNSUPPORTED, f"sampling_params[{i}].")
                if isinstance(one, dict)
                else one
                for i, one in enumerate(options)
            ]
        return asked

    @property
    def is_batch(self) -> bool:
        """Whether the prompts came as a list, so that the answer is one."""
        if self.text is not None:
            return isinstance(self.text, list)
        return any(isinstance(item, list) for item in self.input_ids or ())

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompts."""
        return "text" if self.text is not None else "input_ids"

    def asked(self) -> list[Asked]:
        """What is asked for each prompt, in their order.

        Raises:
            InvalidRequest: fields contradict each other or the number of prompts.
        """
        prompts = self._prompts()
        count = len(prompts)
        options = self._options(count)
        if len({one.n for one in options}) > 1:
            message = "n must be the same for every prompt of a call"
            raise InvalidRequest(message, "sampling_params")
        shared = zip(
            prompts,
            options,
            self._share("return_logprob", self.return_logprob, count),
            self._share("logprob_start_len", self.logprob_start_len, count),
            self._share("top_logprobs_num", self.top_logprobs_num, count),
            self._chosen(count),
            strict=True,
        )
        return [self._one(*columns) for columns in shared]

    def rids(self, count: int, n: int, new_name: str) -> list[tuple[str, list[str]]]:
        """What the call's requests are called: for each name in the body, those of its requests.

        Args:
            count: prompts.
            n: choices of each.
            new_name: used where the body gives none.
        """
        given: list[str] = [new_name]
        per_name = count * n
        if isinstance(self.rid, list):
            given, per_name = self._share("rid", list(self.rid), count), n
        elif self.rid is not None:
            given = [self.rid]
        alone = per_name == 1
        names = [
            (one, [one] if alone else [f"{one}_{i}" for i in range(per_name)]) for one in given
        ]
        everything = [name for one, own in names for name in ({one, *own})]
        if len(set(everything)) < len(everything):
            raise InvalidRequest("rid gives one name twice", "rid")
        return names

    def in_its_words(self, problem: InvalidRequest) -> InvalidRequest:
        """A refusal that names this route's fields."""
        if problem.param == "prompt":
            return InvalidRequest(str(problem), self.prompt_field)
        return in_native_words(problem)

    def _prompts(self) -> list[str | list[int]]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("give one of text and input_ids", "text")
        given: Any = self.text if self.text is not None else self.input_ids
        if given == []:
            name = self.prompt_field
            raise InvalidRequest(f"{name} is empty: give at least one prompt", name)
        return list(given) if self.is_batch else [given]

    def _options(self, count: int) -> list[NativeSampling]:
        """The sampling options of each prompt, with those that stand in the body itself."""
        values = {name: getattr(self, name) for name in EXTENSIONS}
        given = {name: value for name, value in values.items() if value is not None}
        notes = given.get("annotations")
        if isinstance(notes, list):
            del given["annotations"]
        options = self.sampling_params
        if isinstance(options, list):
            shared: list[NativeSampling] = self._share("sampling_params", options, count)
            each = [one.with_extras(given) for one in shared]
        else:
            each = [options.with_extras(given)] * count
        if not isinstance(notes, list):
            return each
        own = self._share("annotations", notes, count)
        return [
            one.with_extras({"annotations": wanted}) for one, wanted in zip(each, own, strict=True)
        ]

    def _share(self, name: str, value: Value | list[Value], count: int) -> list[Value]:
        """A value for each prompt: its own where a list was given."""
        if not isinstance(value, list):
            return [value] * count
        if not self.is_batch:
            raise InvalidRequest(f"{name} is a list, but there is one prompt", name)
        if len(value) != count:
            message = f"{name} has {len(value)} entries for {count} prompts: give one for each"
            raise InvalidRequest(message, name)
        return value

    def _chosen(self, count: int) -> list[tuple[int, ...] | None]:
        given = self.token_ids_logprob
        if given is None:
            return [None] * count
        if any(not isinstance(item, int) for item in given):
            each: list[Any] = self._share("token_ids_logprob", list(given), count)
            return [None if ids is None else tuple(ids) for ids in each]
        return [tuple(given)] * count  # type: ignore[arg-type]

    def _one(
        self,
        prompt: str | list[int],
        sampling: NativeSampling,
        logprobs: bool,
        start: int,
        num_top: int,
        chosen: tuple[int, ...] | None,
    ) -> Asked:
        if start < -1:
            message = f"logprob_start_len must be at least -1, got {start}"
            raise InvalidRequest(message, "logprob_start_len")
        if num_top < 0:
            message = f"top_logprobs_num must be at least 0, got {num_top}"
            raise InvalidRequest(message, "top_logprobs_num")
        return Asked(prompt, sampling, logprobs, start, num_top, chosen)
