"""What a step on the device leaves for the host: one tensor, so that one copy brings it over.

Owns where its parts lie, for who writes them on the device and for who reads them on the host. Must
not know what they mean to a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[Any])


@dataclass(frozen=True, slots=True)
class ScoreParts(Generic[Array]):
    """Log-probabilities of N tokens, with L alternatives each: `batch.TokenScores`."""

    ranks: Array  # [N] int64
    top_ids: Array  # [N, L] int64
    logprobs: Array  # [N] float32
    top_logprobs: Array  # [N, L] float32


@dataclass(frozen=True, slots=True)
class ResultParts(Generic[Array]):
    """The parts for B requests and N tokens: on the device all that may come, else what came."""

    emitted_start_loc: Array  # [B + 1] int64
    num_accepted: Array  # [B] int64
    num_drafted: Array  # [B] int64
    num_admitted: Array  # [B] int64
    token_ids: Array  # [N] int64; -1: nothing could be drawn
    scores: ScoreParts[Array] | None  # None: nobody asked
    confidence: Array | None  # [B, K] float32; None: the drafts have none


@dataclass(frozen=True)
class ResultPlaces:
    """Where the parts lie in a tensor of int64, the float32 ones two to a number behind them."""

    num_reqs: int  # B
    num_drafts: int  # K
    num_top: int | None  # L; None: nobody asked for scores
    has_confidence: bool

    @cached_property
    def num_tokens(self) -> int:
        """N, the most that can come."""
        return self.num_reqs * (1 + self.num_drafts)

    @cached_property
    def num_ints(self) -> int:
        """Leading integers."""
        of_token = 1 if self.num_top is None else 2 + self.num_top
        return 1 + 4 * self.num_reqs + of_token * self.num_tokens

    @cached_property
    def size(self) -> int:
        """Numbers altogether."""
        of_token = 0 if self.num_top is None else 1 + self.num_top
        of_drafts = self.has_confidence * self.num_reqs * self.num_drafts
        return self.num_ints + (of_token * self.num_tokens + of_drafts + 1) // 2

    def allocate(self, device: torch.device) -> tuple[Tensor, ResultParts[Tensor]]:
        """Room on the device, and its parts to be written."""
        numbers = torch.empty(self.size, dtype=torch.int64, device=device)
        return numbers, self._split(numbers, numbers.view(torch.float32), self.num_tokens)

    def read(self, numbers: NDArray[np.int64]) -> ResultParts[NDArray[Any]]:
        """The parts on the host, in the memory that they were copied to."""
        return self._split(numbers, numbers.view(np.float32), int(numbers[self.num_reqs]))

    def _split(self, ints: Array, floats: Array, num_came: int) -> ResultParts[Array]:
        count, drafts = self.num_reqs, self.num_drafts
        begin = 1 + 4 * count  # of the ids
        after = 2 * self.num_ints  # where the next floats are
        scores = confidence = None
        if self.num_top is not None:
            scores = self._split_scores(ints, floats, num_came)
            after += (1 + self.num_top) * self.num_tokens
        if self.has_confidence:
            confidence = floats[after : after + count * drafts].reshape(count, drafts)
        return ResultParts(
            ints[: count + 1],
            ints[count + 1 : 2 * count + 1],
            ints[2 * count + 1 : 3 * count + 1],
            ints[3 * count + 1 : begin],
            ints[begin : begin + num_came],
            scores,
            confidence,
        )

    def _split_scores(self, ints: Array, floats: Array, num_came: int) -> ScoreParts[Array]:
        top, places = self.num_top or 0, self.num_tokens
        begin, first = 1 + 4 * self.num_reqs + places, 2 * self.num_ints
        tops, values = begin + places, first + places
        return ScoreParts(
            ints[begin : begin + num_came],
            ints[tops : tops + num_came * top].reshape(num_came, top),
            floats[first : first + num_came],
            floats[values : values + num_came * top].reshape(num_came, top),
        )


@lru_cache(maxsize=256)
def places_of(num_reqs: int, num_drafts: int, num_top: int | None, size: int) -> ResultPlaces:
    """Those of a result of so many numbers: it has confidences if it has room for them."""
    places = ResultPlaces(num_reqs, num_drafts, num_top, has_confidence=num_drafts > 0)
    if size < places.size:
        places = ResultPlaces(num_reqs, num_drafts, num_top, has_confidence=False)
    return places
