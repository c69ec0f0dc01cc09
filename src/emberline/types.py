"""What a request asks for and what it gets back. Owns validation; knows no tensors, no text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple

from emberline.refusals import InvalidRequest as InvalidRequest  # callers know it as this module's
from emberline.refusals import QueueFull as QueueFull
from emberline.refusals import in_range, is_int, is_list

MAX_TOP_LOGPROBS = 1024
ALL_LOGPROBS = -1
"""`logprobs` and `prompt_logprobs`: the whole vocabulary."""
MAX_CHOICES = 128
MIN_TEMPERATURE = 1e-5
"""Temperatures under this are greedy in all but name, and logits divided by them could overflow."""
MAX_TIMEOUT = 7 * 24 * 3600.0
LOGPROB_FLOOR = -9999.0
"""What JSON carries for a log-probability of minus infinity, so that every number is finite."""

GRAMMAR_ERROR = "the grammar cannot go on from here: it is too complex, or its matcher failed"
NO_TOKEN_ERROR = (
    "the request's options leave no token: allowed_token_ids, bad_words, stop_token_ids with "
    "min_tokens and the grammar forbid them all"
)
ASKED_FOR = frozenset({GRAMMAR_ERROR, NO_TOKEN_ERROR})
"""Errors that end a request and that its own options are the cause of."""
TIMED_OUT = "timeout"
"""`stop_reason` of a request that was aborted because its time was over."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _quoted(text: str) -> str:
    """A text as a Lark string: as in JSON, but for a character that Lark wants escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, from its first token to the one that ends it."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str  # the schema as JSON text, the regular expression, the Lark grammar
    after: str | None = None  # free text up to and with this marker precedes what must match
    opened_by: str | None = None  # only if the answer begins with this marker; None = always

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "lark"):
            raise InvalidRequest("grammar kind must be json_schema, regex or lark", "grammar")
        if not isinstance(self.source, str):
            raise InvalidRequest("grammar source is a text; a schema is its JSON text", "grammar")
        if self.opened_by is not None and self.after is None:
            raise InvalidRequest("opened_by needs after: what ends the free text", "grammar")

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of several texts."""
        if not choices or any(not isinstance(text, str) or not text for text in choices):
            raise InvalidRequest("choice takes a list of non-empty texts", "choice")
        quoted = (_quoted(text) for text in choices)
        return cls("lark", "start: " + " | ".join(quoted))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples, stops and reports. Every option holds at every position of a block.

    Raises `InvalidRequest` naming the field on any value that has no meaning.
    """

    temperature: float = 1.0  # 0 (and under 1e-5) = greedy, ties to the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()  # one or several
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    stop_after: str | None = None  # stop strings count behind this marker; None = everywhere
    stop_opened_by: str | None = None  # only if the answer begins with this marker; None = always
    min_tokens: int = 0  # until then EOS and stop ids are masked and stop strings ignored
    max_tokens: int | None = None  # None = up to the context limit; 0 only with prompt logprobs
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None = off, 0 = the emitted token only, k = and the k best
    logprob_token_ids: Sequence[int] = ()  # also score these ids at every position
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0  # first prompt position reported (position 0 has no value)
    logprobs_mode: Literal["raw", "processed", "both"] = "raw"
    annotations: bool = False  # with logprobs: how each token came about
    allowed_token_ids: Sequence[int] | None = None  # no other id is ever drawn
    bad_words: Sequence[Sequence[int]] = ()  # token sequences that never occur in the output
    grammar: Grammar | None = None
    accept: Literal["auto", "rejection", "coupled"] = "auto"  # auto: coupled when seeded
    speculate: bool = True

    def __post_init__(self) -> None:
        in_range("temperature", self.temperature, 0.0, 100.0)
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        is_int("top_k", self.top_k, -1)
        in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            is_int("seed", self.seed, -(2**63), 2**64 - 1)
        is_int("n", self.n, 1, MAX_CHOICES)
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
        for token_id, bias in self.logit_bias.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                message = f"logit_bias must map token ids to numbers, got the key {token_id!r}"
                raise InvalidRequest(message, "logit_bias")
            is_int("logit_bias", token_id, 0)
            in_range("logit_bias", bias, -100.0, 100.0)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logprob_token_ids", "bad_words"):
            is_list(name, getattr(self, name))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest("stop must be a list of non-empty strings", "stop")
        if self.stop_opened_by is not None and self.stop_after is None:
            raise InvalidRequest("stop_opened_by needs stop_after", "stop_opened_by")
        for token_id in self.stop_token_ids:
            is_int("stop_token_ids", token_id, 0)
        is_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            low = 0 if self.prompt_logprobs is not None else 1
            is_int("max_tokens", self.max_tokens, low)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value != ALL_LOGPROBS:
                is_int(name, value, 0)
        for token_id in self.logprob_token_ids:
            is_int("logprob_token_ids", token_id, 0)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", "logprob_token_ids")
        is_int("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        if self.logprobs_mode not in ("raw", "processed", "both"):
            message = "logprobs_mode must be 'raw', 'processed' or 'both'"
            raise InvalidRequest(message, "logprobs_mode")
        if self.annotations and self.logprobs is None:
            raise InvalidRequest("annotations needs logprobs", "annotations")
        self._check_bans()
        if self.accept not in ("auto", "rejection", "coupled"):
            raise InvalidRequest("accept must be 'auto', 'rejection' or 'coupled'", "accept")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        for name in ("stop", "stop_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def _check_bans(self) -> None:
        """What limits the ids that may be drawn, and what contradicts it."""
        if self.allowed_token_ids is not None:
            is_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: give one", "allowed_token_ids")
            for token_id in self.allowed_token_ids:
                is_int("allowed_token_ids", token_id, 0)
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        for word in self.bad_words:
            if isinstance(word, str):
                message = "bad_words holds sequences of token ids: tokenize the words first"
                raise InvalidRequest(message, "bad_words")
            is_list("bad_words", word)
            if not word:
                raise InvalidRequest("bad_words holds an empty word", "bad_words")
            for token_id in word:
                is_int("bad_words", token_id, 0)
        object.__setattr__(self, "bad_words", tuple(tuple(word) for word in self.bad_words))
        if self.grammar is not None:
            if not isinstance(self.grammar, Grammar):
                raise InvalidRequest("grammar must be a Grammar", "grammar")
            # A grammar says where the answer ends: an option that forbids the end leaves no token.
            for name, given in (
                ("min_tokens", self.min_tokens > 0),
                ("ignore_eos", self.ignore_eos),
                ("allowed_token_ids", self.allowed_token_ids is not None),
            ):
                if given:
                    raise InvalidRequest(f"{name} cannot be combined with a grammar", name)

    @property
    def greedy(self) -> bool:
        """Whether the emitted token is always the most likely one."""
        return self.temperature == 0.0

    @property
    def coupled(self) -> bool:
        """Whether draft and target share their noise, so that a seeded text ignores speculation."""
        return self.accept == "coupled" or (self.accept == "auto" and self.seed is not None)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. A choice of an `n > 1` call is a request of its own."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0  # distinguishes the draws of choices that share a seed
    priority: int = 0  # lower runs earlier, ties by arrival
    timeout: float | None = None  # seconds from its arrival at the engine to its end; None = none
    prediction: tuple[int, ...] = ()  # what the answer will probably be, to draft from
    stream: bool = True  # False: what its steps add comes in one output, when it ends

    def __post_init__(self) -> None:
        is_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.timeout is not None:
            in_range("timeout", self.timeout, 0.0, MAX_TIMEOUT, low_open=True)
        if self.prediction and not self.params.speculate:
            raise InvalidRequest("a prediction is speculated on: speculate is false", "prediction")


class Origin(StrEnum):
    """How an emitted token came about."""

    ACCEPTED = "accepted"  # drafted, verified, and it stood
    RECOVERED = "recovered"  # drawn where a draft was rejected
    BONUS = "bonus"  # drawn after the last draft, all having stood
    DECODED = "decoded"  # no draft was verified: plain decode, or the prompt's last chunk


@dataclass(frozen=True, slots=True)
class TokenAnnotation:
    """The history of one emitted token."""

    step: int  # of those that emitted tokens of this request, from 0
    origin: Origin
    draft_id: int | None = None  # the draft that was judged here, if one was
    confidence: float | None = None  # that the drafter had in it, given those before it survive


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one emitted or prompt token, in nats, all from one distribution."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely; ties share the better rank
    top_ids: tuple[int, ...] = ()  # most likely first, ties to the lowest id
    top_logprobs: tuple[float, ...] = ()
    chosen_logprobs: tuple[float, ...] = ()  # of `logprob_token_ids`, in their order
    processed: TokenLogprobs | None = None  # mode "both": the same of the distribution drawn from
    annotation: TokenAnnotation | None = None


StepCounts = tuple[int, int, int, int, bool]
"""Of one verify step: drafts proposed, verified and accepted, tokens emitted, and whether the
drafts came from the request's prediction."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """How a request was speculated: exact counts of its verify steps, never windowed.

    A verify step is one that emitted tokens after the prompt's last chunk. What is kept is how many
    steps went which way; every other count follows from that.
    """

    steps: Mapping[StepCounts, int] = field(default_factory=dict)

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """Counts of both."""
        steps = dict(self.steps)
        for counts, times in other.steps.items():
            steps[counts] = steps.get(counts, 0) + times
        return SpeculationStats(steps)

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return sum(self.steps.values())

    @property
    def num_drafted(self) -> int:
        """Draft tokens proposed."""
        return sum(drafted * times for (drafted, *_), times in self.steps.items())

    @property
    def num_verified(self) -> int:
        """Of those, run through the target."""
        return sum(verified * times for (_, verified, *_), times in self.steps.items())

    @property
    def num_accepted(self) -> int:
        """Of those, accepted."""
        return sum(accepted * times for (_, _, accepted, *_), times in self.steps.items())

    @property
    def num_emitted(self) -> int:
        """Tokens emitted."""
        return sum(emitted * times for (_, _, _, emitted, _), times in self.steps.items())

    @property
    def num_predicted(self) -> int:
        """Verified drafts that came from the request's prediction."""
        return sum(verified * n for (_, verified, _, _, own), n in self.steps.items() if own)

    @property
    def num_predicted_accepted(self) -> int:
        """Of those, accepted."""
        return sum(accepted * n for (_, _, accepted, _, own), n in self.steps.items() if own)

    @property
    def verified_per_pos(self) -> tuple[int, ...]:
        """Steps that verified a draft at each position of the block."""
        return _reaching([(verified, n) for (_, verified, *_), n in self.steps.items()])

    @property
    def accepted_per_pos(self) -> tuple[int, ...]:
        """Steps that accepted one there."""
        reached = _reaching([(accepted, n) for (_, _, accepted, *_), n in self.steps.items()])
        return reached + (0,) * (len(self.verified_per_pos) - len(reached))

    @property
    def accepted_histogram(self) -> tuple[int, ...]:
        """Steps by the number of drafts they accepted."""
        most = max((counts[2] for counts in self.steps), default=-1)
        by_number = [0] * (most + 1)
        for (_, _, accepted, *_), times in self.steps.items():
            by_number[accepted] += times
        return tuple(by_number)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step, recovered or bonus token included; 0.0 before the first step."""
        return self.num_emitted / self.num_steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified drafts that were accepted; 0.0 when none was verified."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0


def _reaching(lengths: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """How often each position was reached, by blocks of (length, times)."""
    times = [0] * (1 + max((length for length, _ in lengths), default=0))
    for length, n in lengths:
        times[length] += n
    return tuple(accumulate(times[:0:-1]))[::-1]


@dataclass(slots=True)  # not frozen: hundreds are made a step, and freezing takes 6 times as long
class RequestOutput:
    """What one step added to a request. Deltas: concatenating them gives the whole answer.

    `logprobs` has exactly one entry a token of `token_ids` whenever the request asked, streamed or
    not. `text` may lag behind the tokens (incomplete characters, a possible stop string).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    text: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first tokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the id or string that stopped it; None for EOS
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far, these included
    queue_seconds: float = field(default=0.0, compare=False)  # until it first ran
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Counters of the engine since its start, and what it holds now."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of the pages that running requests hold, 0 .. 1
    num_cached_pages_share: float = 0.0  # share that only the prefix cache holds, 0 .. 1
    prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int = 0  # of those, found
    num_engine_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_verify_steps: int = 0  # summed over requests
    num_emitted_tokens: int = 0  # by those steps
    num_draft_tokens: int = 0  # verified drafts
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
