"""What the engine remembers of one request, and when its emitted run must end.

The one mutable value of the engine: the scheduler changes pages and slot, the engine what a step
adds. Knows token ids and counts, no tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from emberline.engine.grammar import Matcher
from emberline.engine.logprob_run import Run
from emberline.engine.prediction import WINDOW, Prediction
from emberline.types import (
    GRAMMAR_ERROR,
    FinishReason,
    Request,
    SamplingParams,
    StepCounts,
    TokenLogprobs,
)

Ints = NDArray[np.int64]


class TextStream(Protocol):
    """The text side of a request: bytes of tokens, stop strings. Lives in detokenizer.py."""

    @property
    def watches(self) -> bool:
        """Whether a token may end the text: each is then pushed by itself when it comes.

        The others are added when somebody reads the text.
        """
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens where none can end the text: `push` of each."""
        ...

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Take one emitted token; return the stop string that it completed, if any."""
        ...

    def take(self, final: bool = False) -> str:
        """Text that may be released now."""
        ...


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from admission to its end."""

    request: Request
    text: TextStream | None
    seed: int  # of every draw of this request
    length_limit: int  # most tokens the sequence may hold, prompt included
    stop_ids: frozenset[int]  # EOS of the model, or nothing under ignore_eos
    token_ids: list[int]
    num_prompt: int = field(init=False)  # prompt tokens
    all_stop_ids: frozenset[int] = field(init=False)  # those and the request's own
    is_watched: bool = field(init=False)  # its text looks at every token when it comes
    serial: int = 0  # name among all requests of the engine, in order of arrival
    arrived: float = 0.0  # of the engine's clock
    first_run: float | None = None
    deadline: float = math.inf
    num_computed: int = 0  # tokens with target KV, those of steps in flight included
    num_unread: int = 0  # steps in flight that emit: at least a token each, not known here yet
    ahead: int = 0  # drafts that those may accept: so many more tokens may have KV
    placed: bool = False  # what the runner of its steps knows of it is up to date
    behind: bool = False  # its steps run behind the host, but for those that score its prompt
    num_cached: int | None = None  # prompt tokens found in the cache when it first ran
    pages: list[int] = field(default_factory=list)  # NO_PAGE where a window no longer looks
    slot: int = -1  # row of the token table while running
    shared: bool = False  # its prompt is in the cache
    aborted: bool = False
    matcher: Matcher | None = None  # of its grammar, after everything emitted
    prediction: Prediction | None = None
    prompt_scores: list[TokenLogprobs | None] | None = None
    prompt_reported: bool = False  # prompt_scores were handed out
    num_reported: int = field(init=False)  # tokens of the sequence that were, the prompt's included
    held_records: list[Run] = field(default_factory=list)  # of those that were not
    num_written: int = 0  # tokens in the token table's row
    held_steps: list[int] = field(default_factory=list)  # verify steps that `steps` lacks, as codes
    _steps: dict[StepCounts, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_reported = len(self.request.prompt_token_ids)
        self.all_stop_ids = self.stop_ids.union(self.params.stop_token_ids)
        self.is_watched = self.text is not None and self.text.watches

    @property
    def is_followed(self) -> bool:
        """Whether something looks at every token by itself."""
        return self.is_watched or self.matcher is not None or self.prediction is not None

    @property
    def params(self) -> SamplingParams:
        """The request's sampling options."""
        return self.request.params

    @property
    def steps(self) -> dict[StepCounts, int]:
        """Its verify steps, by what they did. It grows: whoever keeps it copies it."""
        held, steps = self.held_steps, self._steps
        if len(held) == 1:  # a counter takes longer to make
            counts = step_counts(held[0])
            steps[counts] = steps.get(counts, 0) + 1
        else:
            for code, times in Counter(held).items():
                counts = step_counts(code)
                steps[counts] = steps.get(counts, 0) + times
        held.clear()
        return steps

    def count_step(self, counts: StepCounts) -> None:
        """Count a verify step."""
        self._steps[counts] = self._steps.get(counts, 0) + 1

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_emitting_steps(self) -> int:
        """Steps that emitted tokens of it: the prompt's last chunk, and verify steps."""
        return sum(self.steps.values()) + (self.num_output > 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Place in every queue: by priority, then by arrival."""
        return self.request.priority, self.serial

    @property
    def is_sound(self) -> bool:
        """Whether logits after the prompt came out finite: what was computed before can be kept.

        A NaN in the keys or values of one token reaches the logits of every later one.
        """
        return self.num_output > 0 or (self.prompt_scores is not None and not self.scores_prompt)

    @property
    def num_final(self) -> int:
        """Tokens of the sequence whose KV is there and will not change.

        Without the anchors of steps in flight: whether theirs is sound, those steps will say.
        """
        return min(self.num_computed - self.num_unread, len(self.token_ids))

    @property
    def num_pending(self) -> int:
        """Tokens that have no KV yet; 1 means plain decode."""
        return len(self.token_ids) + self.num_unread - self.num_computed

    @property
    def has_begun(self) -> bool:
        """Whether its answer has begun, though its first token may not have been read yet."""
        return self.num_output > 0 or self.num_unread > 0

    @property
    def reach(self) -> int:
        """The most tokens that may have KV once the steps in flight have run."""
        return self.num_computed + self.ahead

    def end_after(self, num_tokens: int) -> int:
        """The most tokens that may have KV after a step of so many: none is past the limit."""
        return min(self.reach + num_tokens, self.length_limit)

    @property
    def num_remaining(self) -> int:
        """The most tokens that may still be emitted, besides those of steps in flight."""
        return self.length_limit - len(self.token_ids) - self.num_unread

    def most_drafts(self, max_draft_tokens: int) -> int:
        """Drafts that its next block may hold: those of its prediction, or a drafter's."""
        if not self.params.speculate:
            return 0
        ahead = len(self.prediction.ahead(WINDOW - 1)) if self.prediction is not None else 0
        return ahead or max_draft_tokens

    def waited(self, clock: Callable[[], float]) -> float:
        """Seconds from its arrival until it first ran, or until now."""
        return (clock() if self.first_run is None else self.first_run) - self.arrived

    def launch(self, num_known: int, draft_limit: int, *, samples: bool) -> None:
        """Take note of a step that is on its way: its known tokens will have KV."""
        self.num_computed += num_known
        if samples:
            self.num_unread += 1
            self.ahead += draft_limit

    def land(self, num_accepted: int, draft_limit: int, *, samples: bool) -> None:
        """Take note that a launched step has been read, before its tokens are appended."""
        self.num_computed += num_accepted
        if samples:
            self.num_unread -= 1
            self.ahead -= draft_limit

    def forget_flights(self) -> None:
        """Whatever is on its way will not be read: it has ended, or a step has failed.

        A step launched for a request that had ended on the device has computed nothing.
        """
        self.num_computed -= self.num_unread
        self.num_unread = self.ahead = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are still to be computed."""
        return self.prompt_scores is not None and len(self.prompt_scores) < self.num_prompt


@lru_cache(maxsize=4096)
def step_counts(code: int) -> StepCounts:
    """What `step_codes` made a number of, for drafts that no prediction made."""
    return code >> 48, code >> 32 & 0xFFFF, code >> 16 & 0xFFFF, code & 0xFFFF, False


def step_codes(drafted: Ints, verified: Ints, accepted: Ints, emitted: Ints) -> Ints:
    """Verify steps as numbers. [B] each; counts are under 2^15."""
    return ((drafted << 16 | verified) << 16 | accepted) << 16 | emitted


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and by what an emitted run ended."""

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


def append_whole(state: RequestState, run: list[int]) -> bool:
    """Append an emitted run that nothing can end; False, and nothing is done: something might."""
    token_ids = state.token_ids
    if state.is_followed or len(token_ids) + len(run) >= state.length_limit:
        return False
    if not state.all_stop_ids.isdisjoint(run):
        return False
    token_ids += run
    return True


def append_run(state: RequestState, run: list[int]) -> tuple[list[int], Ending | None]:
    """Append the emitted run up to and with the token that ends the request, if one does.

    One token at a time, so that a stop inside a block cuts ids, log-probabilities, text and counts
    at the same place whatever was accepted beyond it; all at once where no token can end it.
    Returns the tokens kept and the ending.
    """
    params = state.params
    if append_whole(state, run):
        return run, None
    for count, token_id in enumerate(run, 1):
        state.token_ids.append(token_id)
        if state.prediction is not None:
            state.prediction.push(token_id)
        may_stop = state.num_output >= params.min_tokens
        matched = None
        if state.text is not None and state.is_watched:
            matched = state.text.push(token_id, check_stop=may_stop)
        if token_id in state.stop_ids:
            return run[:count], Ending(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return run[:count], Ending(FinishReason.STOP, token_id)
        if matched is not None:
            return run[:count], Ending(FinishReason.STOP, matched)
        if len(state.token_ids) >= state.length_limit:
            return run[:count], Ending(FinishReason.LENGTH)
        if state.matcher is not None and not state.matcher.consume(token_id):
            return run[:count], Ending(FinishReason.ERROR, error=GRAMMAR_ERROR)
    return run, None
