"""What a step on the device leaves for the host: one tensor, so that one copy brings it over.

Owns where its parts lie, for who writes them on the device and for who reads them on the host. Must
not know what they mean to a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[Any])


@dataclass(frozen=True, slots=True)
class ResultParts(Generic[Array]):
    """The parts for B requests and N tokens: on the device all there may be, on the host what came.

    Where nobody asked for scores, theirs are empty.
    """

    emitted_start_loc: Array  # [B + 1] int64
    num_accepted: Array  # [B] int64
    num_drafted: Array  # [B] int64
    num_admitted: Array  # [B] int64
    token_ids: Array  # [N] int64; -1: nothing could be drawn
    ranks: Array  # [N] int64
    top_ids: Array  # [N, L] int64
    logprobs: Array  # [N] float32
    top_logprobs: Array  # [N, L] float32
    confidence: Array | None  # [B, K] float32; None: the drafts have none


@dataclass(frozen=True, slots=True)
class ResultPlaces:
    """Where the parts lie in a tensor of int64, the float32 ones two to a number behind them."""

    num_reqs: int  # B
    num_drafts: int  # K
    num_top: int | None  # L; None: nobody asked for scores
    has_confidence: bool

    @classmethod
    def of(
        cls, num_reqs: int, num_drafts: int, num_top: int | None, numbers: Tensor
    ) -> ResultPlaces:
        """Those of a whole result: it has confidences if it has room for them."""
        places = cls(num_reqs, num_drafts, num_top, has_confidence=num_drafts > 0)
        if places.has_confidence and len(numbers) < places.size:
            places = cls(num_reqs, num_drafts, num_top, has_confidence=False)
        return places

    @property
    def num_tokens(self) -> int:
        """N, the most that can come."""
        return self.num_reqs * (1 + self.num_drafts)

    @property
    def num_ints(self) -> int:
        """Leading integers."""
        of_token = 1 if self.num_top is None else 2 + self.num_top
        return 1 + 4 * self.num_reqs + of_token * self.num_tokens

    @property
    def num_floats(self) -> int:
        """Floats behind them."""
        of_scores = 0 if self.num_top is None else (1 + self.num_top) * self.num_tokens
        return of_scores + self.has_confidence * self.num_reqs * self.num_drafts

    @property
    def size(self) -> int:
        """Numbers altogether."""
        return self.num_ints + (self.num_floats + 1) // 2

    def allocate(self, device: torch.device) -> tuple[Tensor, ResultParts[Tensor]]:
        """Room on the device, and its parts to be written."""
        numbers = torch.empty(self.size, dtype=torch.int64, device=device)
        return numbers, self._split(numbers, numbers.view(torch.float32), self.num_tokens)

    def read(self, numbers: Tensor) -> ResultParts[NDArray[Any]]:
        """The parts once they are on the host, in the memory that they were copied to."""
        ints = numbers.numpy()
        return self._split(ints, ints.view(np.float32), int(ints[self.num_reqs]))

    def _split(self, ints: Array, floats: Array, num_came: int) -> ResultParts[Array]:
        count, places, top = self.num_reqs, self.num_tokens, self.num_top or 0
        scored = 0 if self.num_top is None else places
        ids = 1 + 4 * count  # where they begin
        ranks, tops = ids + places, ids + places + scored
        first = 2 * self.num_ints
        sure = first + (1 + top) * scored
        came, tokens = min(num_came, scored), slice(ids, ids + num_came)
        return ResultParts(
            emitted_start_loc=ints[: count + 1],
            num_accepted=ints[count + 1 : 2 * count + 1],
            num_drafted=ints[2 * count + 1 : 3 * count + 1],
            num_admitted=ints[3 * count + 1 : ids],
            token_ids=ints[tokens],
            ranks=ints[ranks : ranks + came],
            top_ids=ints[tops : tops + came * top].reshape(came, top),
            logprobs=floats[first : first + came],
            top_logprobs=floats[first + scored : first + scored + came * top].reshape(came, top),
            confidence=(
                floats[sure : sure + count * self.num_drafts].reshape(count, self.num_drafts)
                if self.has_confidence
                else None
            ),
        )
