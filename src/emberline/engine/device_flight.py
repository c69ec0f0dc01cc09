"""A step on its way on the device, and what of it comes back: read once, one step later.

Owns the memory that numbers go up from and results come down to, and the form in which the engine
gets them. Must not know how steps are planned or started (`device_runner`), nor when requests end
(`engine`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.batch import StepShape
from emberline.engine.device_result import ScoreParts, places_of
from emberline.engine.device_step import Bucket
from emberline.engine.host_pace import HostPace
from emberline.engine.logprob_run import LogprobRun, StepRecords
from emberline.engine.outcome import BROKEN_ERROR, Outcome, spread
from emberline.engine.plan import ScheduledRequest
from emberline.verify.planner import DevicePlanner

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Landing:
    """Host memory where the results of a step come down, or what it is told waits to go up."""

    numbers: Tensor  # [size] int64
    array: NDArray[np.int64]  # the same memory

    @classmethod
    def on(cls, numbers: Tensor) -> Landing:
        """In this memory."""
        return cls(numbers, numbers.numpy())


class Landings:
    """Host memory that is copied to and from while the host goes on, used over and over.

    Args:
        is_cuda: whether there is a device behind the host; if not, numbers are where they are.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self.pace = HostPace()
        self._is_cuda = is_cuda
        self._free: dict[int, list[Landing]] = defaultdict(list)  # by size
        self._sent: list[Landing] = []  # since the last `mark`
        self._events: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None  # that steps run on; None: the current one

    def follow(self) -> None:
        """Steps run on the stream that is current by now: to ask at each takes the host long."""
        if self._is_cuda:
            self._stream = torch.cuda.current_stream()

    def bring(self, numbers: Tensor) -> Landing:
        """Those of a step on the host, once the device has got there: graphs overwrite them."""
        if not self._is_cuda:
            return Landing.on(numbers)
        landing = self._take(numbers.numel())
        landing.numbers.copy_(numbers, non_blocking=True)
        return landing

    def send(self, numbers: NDArray[np.int64]) -> Tensor:
        """Numbers of the host where a copy to the device reads them while the host goes on."""
        if not self._is_cuda:
            return torch.from_numpy(numbers)
        landing = self._take(1 << (numbers.size - 1).bit_length())
        self._sent.append(landing)
        landing.array[: numbers.size] = numbers.ravel()
        return landing.numbers[: numbers.size].view(numbers.shape)

    def _take(self, size: int) -> Landing:
        free = self._free[size]
        if free:
            return free.pop()
        return Landing.on(torch.empty(size, dtype=torch.int64, pin_memory=True))

    def mark(self) -> tuple[torch.cuda.Event | None, list[Landing]]:
        """The moment at which all that was started so far is done; None: that is now.

        And the memory that was sent from and that nothing reads any more by then.
        """
        if not self._is_cuda:
            return None, []
        event = self._events.pop() if self._events else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        sent, self._sent = self._sent, []
        return event, sent

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Until that moment has come."""
        if event is not None:
            began = time.perf_counter()
            event.synchronize()
            self.pace.waited(time.perf_counter() - began)

    def give_back(self, landings: Iterable[Landing], event: torch.cuda.Event | None) -> None:
        """Nobody reads these any more."""
        if event is not None:
            self._events.append(event)
            for landing in landings:
                self._free[len(landing.array)].append(landing)


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
    sent: Sequence[Landing]  # what the device had read by then
    planner: DevicePlanner
    landings: Landings

    def read(self) -> Outcome:
        """Wait for the device, and say what it did."""
        self.landings.wait(self.done)
        outcomes = [(group.places, self._read(group)) for group in self.groups]
        self.landings.give_back((*self.sent, *(group.landing for group in self.groups)), self.done)
        return outcomes[0][1] if len(outcomes) == 1 else spread(len(self.plan), outcomes)

    def _read(self, group: Group) -> Outcome:
        """What a group's requests did, in its own order."""
        live, bucket = len(group.places), group.bucket
        # Not what lies in the landing, which the next step may overwrite.
        numbers = group.landing.array.copy()
        places = places_of(bucket.num_reqs, bucket.num_drafts, bucket.num_top, len(numbers))
        result = places.read(numbers)
        if group.shape is not None:
            sure = result.confidence
            known = None if sure is None else sure[:live]
            self.planner.learn(group.shape, known, result.num_drafted[:live])
        start_loc = result.emitted_start_loc[: live + 1]
        ids, broken = result.token_ids[: start_loc[-1]], dict[int, str]()
        if np.count_nonzero(ids < 0):  # its last token, of who emitted any
            last = ids[start_loc[1:] - 1] < 0
            broken = dict.fromkeys(np.flatnonzero(last & (np.diff(start_loc) > 0)), BROKEN_ERROR)
        records = None
        if result.scores is not None:
            records = self._records(group, result.scores, ids, start_loc)
        return Outcome(
            token_ids=ids,
            start_loc=start_loc,
            num_drafted=result.num_drafted[:live],
            num_admitted=result.num_admitted[:live],
            num_accepted=result.num_accepted[:live],
            broken=broken,
            records=records,
        )

    def _records(
        self, group: Group, scores: ScoreParts[Numbers], ids: Numbers, start_loc: Numbers
    ) -> StepRecords:
        widths = [self.plan[place].state.request.params.logprobs for place in group.places]
        widest = max((width for width in widths if width is not None), default=0)
        parts = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        logprobs, ranks, top_ids, top_logprobs = (part[: len(ids)] for part in parts)
        table = LogprobRun.of(ids, logprobs, ranks, top_ids[:, :widest], top_logprobs[:, :widest])
        return StepRecords(table, start_loc, widths)
