"""A step on its way on the device, and what of it comes back: read once, one step later.

Owns the memory that results come down to, and the form in which the engine gets them. Must not know
how steps are planned or started (`device_runner`), nor when requests end (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch
from torch import Tensor

from emberline.batch import StepShape
from emberline.engine.device_step import Bucket, HostResult, unpack
from emberline.engine.outcome import BROKEN_ERROR, Outcome
from emberline.engine.scheduler import ScheduledRequest
from emberline.types import StepCounts, TokenLogprobs
from emberline.verify.planner import DevicePlanner

NOTHING: StepCounts = (0, 0, 0, 0, False)


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
        outcomes = [self._read(group) for group in self.groups]
        self.landings.give_back((group.landing for group in self.groups), self.done)
        if len(outcomes) == 1:
            return outcomes[0]
        count = len(self.plan)
        whole = Outcome([[]] * count, [NOTHING] * count, [None] * count, {})
        for group, outcome in zip(self.groups, outcomes, strict=True):
            for at, place in enumerate(group.places):
                whole.emitted[place] = outcome.emitted[at]
                whole.counts[place] = outcome.counts[at]
                whole.records[place] = outcome.records[at]
            for at, error in outcome.broken.items():
                whole.broken[group.places[at]] = error
        return whole

    def _read(self, group: Group) -> Outcome:
        """What a group's requests did, in its own order."""
        live, result = len(group.places), unpack(group.bucket, group.landing.numbers)
        if group.shape is not None:
            sure = result.confidence
            self.planner.learn(
                group.shape,
                None if sure is None else torch.from_numpy(sure[:live]),
                torch.from_numpy(result.num_drafted[:live]),
            )
        ids, bounds = result.token_ids, result.emitted_start_loc[: live + 1]
        runs = [ids[begin:end] for begin, end in pairwise(bounds)]
        broken: dict[int, str] = {}
        if result.is_broken:
            broken = {at: BROKEN_ERROR for at, run in enumerate(runs) if run and run[-1] < 0}
        drafted = result.num_drafted[:live].tolist()
        counts = zip(
            drafted, result.num_admitted, result.num_accepted, map(len, runs), repeat(False)
        )
        return Outcome(
            emitted=runs,
            counts=list(counts),
            records=self._records(group, result),
            broken=broken,
        )

    def _records(self, group: Group, result: HostResult) -> list[tuple[TokenLogprobs, ...] | None]:
        if group.bucket.num_top is None:
            return [None] * len(group.places)
        records: list[tuple[TokenLogprobs, ...] | None] = []
        for place, begin, end in zip(
            group.places, result.emitted_start_loc, result.emitted_start_loc[1:], strict=False
        ):
            width = self.plan[place].state.params.logprobs
            records.append(None if width is None else _scored(result, begin, end, width))
        return records


def _scored(result: HostResult, begin: int, end: int, width: int) -> tuple[TokenLogprobs, ...]:
    """Records of emitted tokens `begin` .. `end`, with so many alternatives."""
    return tuple(
        map(
            TokenLogprobs,
            result.token_ids[begin:end],
            result.logprobs[begin:end],
            result.ranks[begin:end],
            [tuple(ids[:width]) for ids in result.top_ids[begin:end]],
            [tuple(values[:width]) for values in result.top_logprobs[begin:end]],
        )
    )
