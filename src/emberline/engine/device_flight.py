"""A step on its way on the device, and what of it comes back: read once, one step later.

Owns the memory that results come down to, and the form in which the engine gets them. Must not know
how steps are planned or started (`device_runner`), nor when requests end (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emberline.batch import StepShape
from emberline.engine.device_step import Bucket, HostResult, HostScores, unpack
from emberline.engine.outcome import BROKEN_ERROR, Outcome, spread
from emberline.engine.scheduler import ScheduledRequest
from emberline.engine.scoring import Records
from emberline.types import TokenLogprobs
from emberline.verify.planner import DevicePlanner


@dataclass(frozen=True, slots=True)
class Landing:
    """Where results come down."""

    memory: Tensor  # [any] int64, on the host
    size: int  # leading numbers that are used

    @property
    def numbers(self) -> Tensor:
        """[size] int64."""
        return self.memory[: self.size]


class Landings:
    """Host memory that results are copied to while the host goes on, used over and over.

    Args:
        is_cuda: whether there is a device behind the host; if not, results are where they are.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._memory: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    def bring(self, numbers: Tensor) -> Landing:
        """Those of a step on the host, once the device has got there: graphs overwrite them."""
        size = numbers.numel()
        if not self._is_cuda:
            return Landing(numbers, size)
        at = next((i for i, free in enumerate(self._memory) if free.numel() >= size), None)
        if at is None:
            memory = torch.empty(1 << size.bit_length(), dtype=torch.int64, pin_memory=True)
        else:
            memory = self._memory.pop(at)
        landing = Landing(memory, size)
        landing.numbers.copy_(numbers, non_blocking=True)
        return landing

    def mark(self) -> torch.cuda.Event | None:
        """The moment at which all that was started so far is done; None: that is now."""
        if not self._is_cuda:
            return None
        event = self._events.pop() if self._events else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def give_back(self, landings: Iterable[Landing], event: torch.cuda.Event | None) -> None:
        """Nobody reads these any more."""
        if event is not None:
            self._events.append(event)
            self._memory += [landing.memory for landing in landings]


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of a plan that run as one step on the device."""

    bucket: Bucket
    places: Sequence[int]  # of its requests in the plan
    landing: Landing
    shape: StepShape | None  # of a step whose confidences the planner waits for


@dataclass(frozen=True, slots=True)
class DeviceFlight:
    """A launched step: its groups run one after the other."""

    plan: Sequence[ScheduledRequest]
    groups: list[Group]
    done: torch.cuda.Event | None  # None: where nothing runs behind the host
    planner: DevicePlanner
    landings: Landings

    def read(self) -> Outcome:
        """Wait for the device, and say what it did."""
        if self.done is not None:
            self.done.synchronize()
        outcomes = [(group.places, self._read(group)) for group in self.groups]
        self.landings.give_back((group.landing for group in self.groups), self.done)
        return outcomes[0][1] if len(outcomes) == 1 else spread(len(self.plan), outcomes)

    def _read(self, group: Group) -> Outcome:
        """What a group's requests did, in its own order. Keeps nothing that lies in the landing."""
        live, result = len(group.places), unpack(group.bucket, group.landing.numbers)
        if group.shape is not None:
            sure = result.confidence
            self.planner.learn(
                group.shape,
                None if sure is None else torch.from_numpy(sure[:live]),
                torch.from_numpy(result.num_drafted[:live]),
            )
        start_loc = result.emitted_start_loc[: live + 1].copy()
        ids, broken = result.token_ids[: start_loc[-1]].copy(), dict[int, str]()
        if len(ids) and ids.min() < 0:  # its last token, of who emitted any
            last = ids[start_loc[1:] - 1] < 0
            broken = dict.fromkeys(np.flatnonzero(last & (np.diff(start_loc) > 0)), BROKEN_ERROR)
        return Outcome(
            token_ids=ids,
            start_loc=start_loc,
            num_drafted=result.num_drafted[:live].copy(),
            num_admitted=result.num_admitted[:live].copy(),
            num_accepted=result.num_accepted[:live].copy(),
            broken=broken,
            records=self._records(group, result) if group.bucket.num_top is not None else None,
        )

    def _records(self, group: Group, result: HostResult) -> Records:
        bounds = result.emitted_start_loc.tolist()
        scores = result.scores()
        records: Records = []
        for place, begin, end in zip(group.places, bounds, bounds[1:], strict=False):
            width = self.plan[place].state.params.logprobs
            records.append(None if width is None else _scored(scores, begin, end, width))
        return records


def _scored(scores: HostScores, begin: int, end: int, width: int) -> tuple[TokenLogprobs, ...]:
    """Records of emitted tokens `begin` .. `end`, with so many alternatives."""
    return tuple(
        map(
            TokenLogprobs,
            scores.token_ids[begin:end],
            scores.logprobs[begin:end],
            scores.ranks[begin:end],
            [tuple(ids[:width]) for ids in scores.top_ids[begin:end]],
            [tuple(values[:width]) for values in scores.top_logprobs[begin:end]],
        )
    )
