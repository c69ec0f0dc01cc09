"""What an engine's process and the process of its callers say to each other, and how it is written.

Owns the messages and their bytes (MessagePack). One message a step carries what the step added to
every request; a request has a number in it, and what does not change is not repeated. Must not know
who sends, who reads, or how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np

from emberline.engine.logprob_run import LogprobRun, Run, join_logprobs
from emberline.engine.running_engine import EngineStopped, ShuttingDown
from emberline.types import (
    EngineSnapshot,
    FinishReason,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
    SpeculationStats,
    StepCounts,
    TokenLogprobs,
)

# To the engine's process.


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: what to import from, and the pickled call that makes the engine."""

    path: list[str]
    make: bytes


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Requests of one call, numbered from `first` on; the answer is a `Settled`."""

    ticket: int
    first: int
    requests: list[Request]


class Compile(msgspec.Struct, tag="compile", array_like=True):
    """A grammar is to be compiled; the answer is a `Settled`."""

    ticket: int
    grammar: Grammar


class ClearCache(msgspec.Struct, tag="clear", array_like=True):
    """The prefix cache is to be emptied; the answer is a `Settled`."""

    ticket: int


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """A request is to end."""

    request_id: str


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The process is to end after the current step."""


ToEngine = Start | Submit | Compile | ClearCache | Abort | Stop


# From the engine's process.


class Found(msgspec.Struct, tag="found", array_like=True):
    """Where the model lies and what it is called, before the engine is built."""

    folder: str
    name: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is built; what its callers may want to know of it."""

    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    max_draft_tokens: int
    max_queue: int
    info: dict[str, Any]
    snapshot: EngineSnapshot


class Unusable(msgspec.Struct, tag="unusable", array_like=True):
    """The engine cannot be built; the user can put that right."""

    message: str
    param: str | None = None
    is_request: bool = False  # an InvalidRequest; else a fault of files or settings


class Refusal(msgspec.Struct, array_like=True):
    """Why something was not done."""

    kind: Literal["invalid", "full", "ending", "stopped"]
    message: str
    param: str | None = None
    limit: int = 0
    retry_after: int = 0


class Settled(msgspec.Struct, tag="settled", array_like=True):
    """What was asked for under a ticket has been done, or why not."""

    ticket: int
    refusal: Refusal | None
    snapshot: EngineSnapshot | None = None  # where it changed the engine


class Tables(msgspec.Struct, gc=False):
    """A `LogprobRun`: its bytes, which nobody has to go through."""

    width: int
    ints: bytes
    floats: bytes

    @classmethod
    def of(cls, run: LogprobRun) -> Tables:
        """As it travels."""
        return cls(run.width, run.ints.tobytes(), run.floats.tobytes())

    def read(self) -> LogprobRun:
        """What it was made from."""
        ints, floats = np.frombuffer(self.ints, np.int64), np.frombuffer(self.floats, np.float32)
        return LogprobRun(ints.reshape(-1, 2 + self.width), floats.reshape(-1, 1 + self.width))


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What a step added to the request of a number: an output without what is known already.

    `times` belong to the kinds of verify steps that the request has had, in the order in which they
    first came; `kinds` are those that came with this output.
    """

    number: int
    token_ids: tuple[int, ...]
    text: str
    num_output: int
    times: list[int]
    kinds: list[StepCounts] = []
    num_prompt: int = 0
    num_cached: int = 0
    queue_seconds: float = 0.0
    records: tuple[TokenLogprobs, ...] | Tables | None = None  # of the tokens, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def logprobs(self) -> Run | None:
        """The records."""
        return self.records.read() if isinstance(self.records, Tables) else self.records


class Step(msgspec.Struct, tag="step", array_like=True, gc=False):
    """What one step added to every request that gained something."""

    deltas: list[Delta]
    snapshot: EngineSnapshot


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine has failed and takes no more requests."""

    message: str


FromEngine = Found | Ready | Unusable | Settled | Step | Failed


def _plain(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _encoder.encode
to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def refusal_of(problem: Exception | None) -> Refusal | None:
    """A refusal as it travels; None is none."""
    match problem:
        case None:
            return None
        case InvalidRequest():
            return Refusal("invalid", str(problem), problem.param)
        case QueueFull():
            text, limit, wait = str(problem), problem.limit, problem.retry_after
            return Refusal("full", text, limit=limit, retry_after=wait)
        case ShuttingDown():
            return Refusal("ending", str(problem))
        case _:
            return Refusal("stopped", str(problem))


def problem_of(refusal: Refusal | None) -> Exception | None:
    """What `refusal_of` was made from."""
    match refusal:
        case None:
            return None
        case Refusal(kind="invalid"):
            return InvalidRequest(refusal.message, refusal.param)
        case Refusal(kind="full"):
            return QueueFull(refusal.limit, refusal.retry_after)
        case Refusal(kind="ending"):
            return ShuttingDown()
        case _:
            return EngineStopped(refusal.message)


def _as_written(run: Run | None) -> tuple[TokenLogprobs, ...] | Tables | None:
    """Records as a delta has them."""
    if isinstance(run, LogprobRun):
        return Tables.of(run)
    return None if run is None else tuple(run)


class DeltaWriter:
    """Turns the outputs of one request into deltas. Its statistics only ever grow."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_kinds = 0

    def write(self, output: RequestOutput) -> Delta:
        """The next output."""
        steps, known = output.stats.steps, self._num_kinds
        self._num_kinds = len(steps)
        return Delta(
            self._number,
            output.token_ids,
            output.text,
            output.num_output_tokens,
            list(steps.values()),
            [] if len(steps) == known else list(islice(steps, known, None)),
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.queue_seconds,
            _as_written(output.logprobs),
            output.prompt_logprobs,
            output.finish_reason,
            output.stop_reason,
            output.error,
        )


class DeltaReader:
    """Turns the deltas of one request, read in order, back into its outputs."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._kinds: list[StepCounts] = []

    def read(self, delta: Delta) -> RequestOutput:
        """The next output."""
        self._kinds += delta.kinds
        return RequestOutput(
            self._request_id,
            delta.token_ids,
            delta.logprobs,
            delta.text,
            delta.prompt_logprobs,
            delta.finish_reason,
            delta.stop_reason,
            delta.error,
            delta.num_prompt,
            delta.num_cached,
            delta.num_output,
            delta.queue_seconds,
            SpeculationStats(_Times(self._kinds, delta.times)),
        )


class _Times(Mapping[StepCounts, int]):
    """Kinds of verify steps with their times: a dict only once somebody looks, which few do."""

    def __init__(self, kinds: Sequence[StepCounts], times: Sequence[int]) -> None:
        self._kinds, self._times = kinds, times
        self._found: dict[StepCounts, int] | None = None

    def _dict(self) -> dict[StepCounts, int]:
        if self._found is None:  # kinds that came later have no time here
            self._found = dict(zip(self._kinds, self._times, strict=False))
        return self._found

    def __getitem__(self, kind: StepCounts) -> int:
        return self._dict()[kind]

    def __iter__(self) -> Iterator[StepCounts]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._times)


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """One delta that adds what several consecutive ones of a request add."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    prompts = (d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None)
    return msgspec.structs.replace(
        last,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join([delta.text for delta in deltas]),
        kinds=[kind for delta in deltas for kind in delta.kinds],
        records=_as_written(join_logprobs(deltas)),
        prompt_logprobs=next(prompts, None),
    )
