"""Steps that run behind the host: which of a plan does, what is on its way, what has come back.

Owns the order in which steps are launched and read, and the batch that goes on unchanged. Must not
know pages' owners, clients, or when requests end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberline.engine.outcome import Flight, Outcome, Runner
from emberline.engine.plan import ScheduledRequest
from emberline.engine.standing import CountSteps, StandingBatch


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that has been read."""

    plan: Sequence[ScheduledRequest]
    outcome: Outcome
    is_settled: bool  # its batch has taken note: nobody has to be looked at


class Flights:
    """Steps of a runner, the oldest first. Without a runner every step is somebody else's.

    Args:
        page_size: tokens of a page.
        count: takes note of a batch's verify steps.
    """

    def __init__(self, page_size: int, count: CountSteps) -> None:
        self.runner: Runner | None = None
        self.plan: list[ScheduledRequest] = []  # what it ran in the step before
        self._lag = 0  # steps that may stay unread
        self._page_size = page_size
        self._count = count
        self._on_their_way: deque[Flight] = deque()
        self._batch: StandingBatch | None = None  # those of `plan`, once nothing changes

    def use(self, runner: Runner, *, overlap: bool) -> None:
        """Run steps by a runner. `overlap`: a step is read once the next one runs."""
        self.runner, self._lag = runner, int(overlap)

    def __len__(self) -> int:
        """Steps that have been launched and not read."""
        return len(self._on_their_way)

    @property
    def is_batch(self) -> bool:
        """Whether requests' states are behind what has been read: they are written together."""
        return self._batch is not None

    def go_on(self, repeats: Callable[[Callable[[], int]], bool]) -> None:
        """End the batch unless its plan is the next one too: `Scheduler.repeats`."""
        if self._batch is not None and not repeats(self._batch.num_steps_to_go):
            self.dissolve()

    def launch(self, plan: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Start the step of those whose steps run behind the host; the others."""
        taken, others = plan, list[ScheduledRequest]()
        if not plan or plan is not self.plan:
            taken, others = _split(plan)
            self.plan = taken
        elif self._batch is None and all(
            entry.state.shared and not entry.state.is_followed for entry in plan
        ):  # all of them once more, as in the step before
            self._batch = StandingBatch(plan, self._page_size, len(self), self._count)
        if taken:
            assert self.runner is not None
            self._on_their_way.append(self.runner.launch(taken))
            if self._batch is not None:
                self._batch.launch()
            else:
                for entry in taken:
                    entry.state.launch(entry.num_known, entry.draft_limit, samples=entry.samples)
                    entry.state.placed = True
        return others

    @property
    def are_due(self) -> bool:
        """Whether the oldest is to be read: at once where no step runs beside it."""
        return len(self._on_their_way) > (self._lag if self.plan else 0)

    def land(self) -> Landed:
        """Read the oldest step, of at least one."""
        flight = self._on_their_way.popleft()
        outcome = flight.read()
        if self._batch is None:
            return Landed(flight.plan, outcome, is_settled=False)
        is_settled = self._batch.absorb(outcome)
        if not is_settled:
            self.dissolve()
        return Landed(flight.plan, outcome, is_settled)

    def write(self) -> None:
        """Bring the requests' states up to date."""
        if self._batch is not None:
            self._batch.write()

    def dissolve(self) -> None:
        """From now on requests are looked at one by one."""
        self.write()
        self._batch = None

    def forget(self) -> None:
        """What is on its way will not be read: its results would be of steps nobody waited for."""
        self.dissolve()
        self._on_their_way.clear()
        self.plan = []
        if self.runner is not None:
            self.runner.planner.abandon()


def _split(
    plan: list[ScheduledRequest],
) -> tuple[list[ScheduledRequest], list[ScheduledRequest]]:
    """Those whose step runs behind the host, and those who need the plain step."""
    taken = [e for e in plan if e.state.behind and not e.state.scores_prompt]
    if len(taken) == len(plan):
        return plan, []
    return taken, [e for e in plan if not e.state.behind or e.state.scores_prompt]
