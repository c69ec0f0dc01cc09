"""Scored texts as arrays: what evaluation and reinforcement learning read.

Owns the arrays, how they line up with the tokens, and the options of the request that fills them.
Must not know engines or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberline.types import ALL_LOGPROBS, InvalidRequest, SamplingParams, TokenLogprobs

NO_ID = -1
"""Entry of `top_ids` where a position has no value."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Raw log-probabilities of one text, in nats. Entry i of every array is about token i.

    A token's value is that of the distribution after the tokens before it, so position 0 has none,
    and neither have those before `start`: NaN, rank 0, `NO_ID`. Where `error` says that the engine
    gave the text up, nothing has a value.
    """

    token_ids: NDArray[np.int64]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    ranks: NDArray[np.int64]  # [T], 1 = most likely
    top_ids: NDArray[np.int64]  # [T, L], most likely first
    top_logprobs: NDArray[np.float32]  # [T, L]
    start: int = 1  # first position with a value
    error: str | None = None

    @property
    def sum(self) -> float:
        """Log-probability of the tokens from `start` on, given those before; 0.0 if none is."""
        return float(self._scored.sum())

    @property
    def mean(self) -> float:
        """The same a token; NaN if there is none. `exp(-mean)` is the perplexity."""
        return float(self._scored.mean()) if len(self._scored) else float("nan")

    @property
    def is_greedy(self) -> bool:
        """Whether every token from `start` on is a most likely one."""
        return bool((self.ranks[self.start :] == 1).all())

    @property
    def _scored(self) -> NDArray[np.float64]:
        return self.logprobs[self.start :].astype(np.float64)


def num_alternatives(top: int, vocab_size: int) -> int:
    """L, the alternatives of every position: `top`, or the whole vocabulary for -1.

    Raises:
        InvalidRequest: `top` is no number of alternatives.
    """
    if isinstance(top, bool) or not isinstance(top, int) or not ALL_LOGPROBS <= top <= vocab_size:
        raise InvalidRequest(
            f"top must be a number of alternatives up to the vocabulary of {vocab_size}, or "
            f"{ALL_LOGPROBS} for all of it, got {top!r}",
            "top",
        )
    return vocab_size if top == ALL_LOGPROBS else top


def scoring_params(num_tokens: int, top: int, start: int) -> SamplingParams:
    """Options that score a text of so many tokens from position `start` on and generate nothing.

    Raises:
        InvalidRequest: the text has no such position.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise InvalidRequest(f"start must be a position, got {start!r}", "start")
    if num_tokens and start >= num_tokens:
        raise InvalidRequest(f"start {start} is past the text's {num_tokens} tokens", "start")
    return SamplingParams(max_tokens=0, prompt_logprobs=top, prompt_logprobs_start=start)


def make_scores(
    token_ids: Sequence[int],
    records: Sequence[TokenLogprobs | None] | None,
    *,
    top: int,
    start: int,
    error: str | None = None,
) -> Scores:
    """Arrays of a text's records, which are None where there is no value.

    Args:
        token_ids: [T] of the text.
        records: [T], or None if the engine gave none.
        top: L, alternatives that every record has.
        start: first position that was to be scored.
        error: why the engine gave the text up; records of what came before it do not count.
    """
    length = len(token_ids)
    scores = Scores(
        token_ids=np.array(token_ids, dtype=np.int64),
        logprobs=np.full(length, np.nan, dtype=np.float32),
        ranks=np.zeros(length, dtype=np.int64),
        top_ids=np.full((length, top), NO_ID, dtype=np.int64),
        top_logprobs=np.full((length, top), np.nan, dtype=np.float32),
        start=max(start, 1),
        error=error,
    )
    known = records if records is not None and error is None else ()
    for position, record in enumerate(known):
        if record is None:
            continue
        scores.logprobs[position] = record.logprob
        scores.ranks[position] = record.rank
        if top:
            scores.top_ids[position] = record.top_ids
            scores.top_logprobs[position] = record.top_logprobs
    return scores
