"""Requests that go on together, step after step: what happens to them is kept in arrays.

While nobody comes, ends or needs pages, a step costs the host next to nothing a request: whether
somebody has to be looked at is found for all at once, and results are laid aside as they came.
Now and then, and before anybody looks at a request, what has happened is written to the requests'
states; until then those are as they were some steps ago. Must not know pages' owners or clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from emberline.engine.logprob_run import LogprobRun, Records, StepRecords
from emberline.engine.outcome import Outcome
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import Ints, step_counts
from emberline.types import StepCounts

MOST_STEPS = 8
"""Steps that are laid aside at most."""
MOST_RUNS = 512
"""Requests' parts of them: writing all at once must not take as long as a step."""
NEVER = 1 << 62
CountSteps = Callable[[Mapping[StepCounts, int]], None]
"""Takes note of verify steps, each kind so many times."""


class StandingBatch:
    """The requests of a plan that is repeated, all of which decode.

    Args:
        plan: the same list for as long as this lasts. Nothing looks at its requests' tokens one by
            one, but for those that stop.
        page_size: tokens of a page.
        num_unread: steps of this plan that have been launched and not read.
        count: takes note of verify steps, when they are written.
    """

    def __init__(
        self,
        plan: Sequence[ScheduledRequest],
        page_size: int,
        num_unread: int,
        count: CountSteps,
    ) -> None:
        self.plan = plan
        self.states = states = [entry.state for entry in plan]
        self._drafts = [entry.draft_limit for entry in plan]
        self._widths = np.array(self._drafts) + 1
        self._lens = np.array([len(state.token_ids) for state in states])
        self._limits = np.array([state.length_limit for state in states])
        room = np.array([len(state.pages) * page_size for state in states])
        self._room = np.where(room >= self._limits, NEVER, room)
        self._stops = _table({i for state in states for i in state.all_stop_ids})
        self._num_unread = num_unread
        self._count = count
        self._most_steps = max(1, min(MOST_STEPS, MOST_RUNS // len(states)))
        self._num_launched = 0  # since what was written last
        self._landed: list[Outcome] = []  # read since then

    def launch(self) -> None:
        """Take note of a step that is on its way."""
        self._num_launched += 1
        self._num_unread += 1

    def num_steps_to_go(self) -> int:
        """Steps for which everybody certainly has pages."""
        reach = self._lens - 1 + self._num_unread * self._widths
        return int(((self._room - reach) // self._widths).min())

    def absorb(self, outcome: Outcome) -> bool:
        """Take note of what a step did; False, and nothing is done: somebody has to be looked at.

        Because it has reached its length, may stop, or has failed. Every few steps the states are
        written.
        """
        lens = self._lens + outcome.start_loc[1:] - outcome.start_loc[:-1]
        # (Counting takes a third of the time of asking for any.)
        if outcome.broken or np.count_nonzero(lens >= self._limits):
            return False
        if len(self._stops):
            places = np.minimum(outcome.token_ids, len(self._stops) - 1)
            if np.count_nonzero(self._stops[places]):
                return False
        self._lens = lens
        self._num_unread -= 1
        self._landed.append(outcome)
        if len(self._landed) == self._most_steps:
            self.write()
        return True

    def write(self) -> None:
        """Bring the requests' states up to date."""
        landed, num_launched = self._landed, self._num_launched
        self._landed, self._num_launched = [], 0
        fewer = num_launched - len(landed)
        if not landed:
            for state, drafts in zip(self.states, self._drafts, strict=True):
                state.num_computed += num_launched
                state.num_unread += num_launched
                state.ahead += num_launched * drafts
            return
        accepted: Ints = np.sum([outcome.num_accepted for outcome in landed], axis=0)
        codes = np.stack([outcome.codes() for outcome in landed], axis=1)
        order, start_loc = _by_request(landed)
        ids = np.concatenate([outcome.token_ids for outcome in landed])[order].tolist()
        runs = [ids[begin:end] for begin, end in pairwise(start_loc.tolist())]
        columns = zip(
            self.states, runs, codes.tolist(), accepted.tolist(), self._drafts, strict=True
        )
        for state, run, kinds, num_accepted, drafts in columns:
            state.num_computed += num_launched + num_accepted
            if fewer:
                state.num_unread += fewer
                state.ahead += fewer * drafts
            state.token_ids += run
            state.held_steps += kinds
        for records in _records(landed, order, start_loc):
            for state, own in zip(self.states, records, strict=True):
                if own is not None:
                    state.held_records.append(own)
        seen = Counter(codes.ravel().tolist())
        self._count({step_counts(code): times for code, times in seen.items()})


def _by_request(landed: Sequence[Outcome]) -> tuple[Ints | slice, Ints]:
    """What puts the tokens of several steps in the order of requests, and [B + 1] where each is."""
    if len(landed) == 1:
        return slice(None), landed[0].start_loc
    counts = np.stack([np.diff(outcome.start_loc) for outcome in landed])
    rows = np.tile(np.arange(counts.shape[1], dtype=np.int32), len(landed))
    order = np.repeat(rows, counts.ravel()).argsort(kind="stable")
    return order, np.concatenate([[0], counts.sum(axis=0).cumsum()])


def _records(landed: Sequence[Outcome], order: Ints | slice, start_loc: Ints) -> list[Records]:
    """Those of all the steps, cut once where every step's are a table, else step by step."""
    parts = [outcome.records for outcome in landed if isinstance(outcome.records, StepRecords)]
    if len(parts) < len(landed):
        return [outcome.record_runs() for outcome in landed if outcome.records is not None]
    ints = np.concatenate([part.table.ints for part in parts])[order]
    floats = np.concatenate([part.table.floats for part in parts])[order]
    return [StepRecords(LogprobRun(ints, floats), start_loc, parts[0].widths).runs()]


def _table(ids: Iterable[int]) -> NDArray[np.bool_]:
    """Whether an id is among these; the last entry is any larger one's. Empty: there are none."""
    known: Ints = np.array(sorted(ids), dtype=np.int64)
    if not len(known):
        return np.zeros(0, dtype=np.bool_)
    table = np.zeros(known[-1] + 2, dtype=np.bool_)
    table[known[known >= 0]] = True
    return table
