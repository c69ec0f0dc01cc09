"""What a batch lays aside and writes later is what happened, request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from emberline.engine.logprob_run import LogprobRun, StepRecords
from emberline.engine.outcome import Outcome
from emberline.engine.outputs import delta
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState, append_run
from emberline.engine.standing import MOST_STEPS, StandingBatch
from emberline.types import Request, SamplingParams, StepCounts

from support.engines import Letters

PAGE, PROMPT, DRAFTS, LIMIT = 4, 3, 2, 200
STOP = 9


def make_plan(
    count: int, *, logprobs: Sequence[int | None] = (), limit: int = LIMIT
) -> list[RequestState]:
    states = []
    for serial in range(count):
        width = logprobs[serial] if logprobs else None
        params = SamplingParams(max_tokens=limit, logprobs=width, stop_token_ids=(STOP,))
        states.append(
            RequestState(
                request=Request(f"r{serial}", (1,) * PROMPT, params, stream=False),
                text=Letters(params) if serial % 2 else None,
                seed=0,
                length_limit=limit,
                stop_ids=frozenset(),
                token_ids=[1] * (PROMPT + 1),
                serial=serial,
                num_computed=PROMPT,
                pages=list(range(1, 12)),
                slot=serial,
            )
        )
    return states


def entries(states: list[RequestState]) -> list[ScheduledRequest]:
    drafts = [DRAFTS if i else 0 for i in range(len(states))]
    return [
        ScheduledRequest(state, 1, limit, 1, samples=True, decodes=True)
        for state, limit in zip(states, drafts, strict=True)
    ]


def any_outcome(generator: np.random.Generator, plan: list[ScheduledRequest]) -> Outcome:
    limits = np.array([entry.draft_limit for entry in plan])
    admitted = generator.integers(0, limits + 1)
    accepted = generator.integers(0, admitted + 1)
    bounds = np.cumsum([0, *(accepted + 1)])
    return Outcome(
        token_ids=generator.integers(2, STOP, bounds[-1]),
        start_loc=bounds,
        num_drafted=limits,
        num_admitted=admitted,
        num_accepted=accepted,
        broken={},
    )


def any_records(generator: np.random.Generator, plan: list[ScheduledRequest], outcome: Outcome):
    widths = [entry.state.params.logprobs for entry in plan]
    widest = max((width for width in widths if width is not None), default=0)
    count = len(outcome.token_ids)
    values = -generator.random((2, count, 1 + widest), dtype=np.float32)
    tops = generator.integers(0, 99, (count, widest))
    table = LogprobRun.of(
        outcome.token_ids, values[0, :, 0], tops[:, 0] + 1, tops, values[1, :, 1:]
    )
    return StepRecords(table, outcome.start_loc, widths)


def facts(state: RequestState) -> tuple[object, ...]:
    counts = state.num_computed, state.num_unread, state.ahead
    return state.token_ids, state.steps, counts, delta(state, lambda: 0.0)


@pytest.mark.parametrize("num_steps", [1, 2, MOST_STEPS, MOST_STEPS + 3])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("logprobs", [(), (5, 5, 5, 5, 5), (2, None, 5, 0, None)])
@pytest.mark.parametrize("tables", ["all", "some", "none"])
def test_what_is_written_late_is_what_happened(
    num_steps: int, lag: int, logprobs: tuple[int | None, ...], tables: str
) -> None:
    generator = np.random.default_rng(num_steps)
    late, at_once = (make_plan(5, logprobs=logprobs) for _ in range(2))
    tally, expected = Counter[StepCounts](), Counter[StepCounts]()
    plans = entries(late), entries(at_once)
    for entry in (*plans[0], *plans[1]) if lag else ():  # a step is on its way already
        entry.state.launch(1, entry.draft_limit, samples=True)
    batch = StandingBatch(plans[0], PAGE, lag, tally.update)
    for step in range(num_steps):
        outcome = any_outcome(generator, plans[1])
        if logprobs:
            records = any_records(generator, plans[1], outcome)
            lists = [None if run is None else tuple(run) for run in records.runs()]
            is_table = tables == "all" or (tables == "some" and step % 2 == 0)
            outcome = replace(outcome, records=records if is_table else lists)
        batch.launch()
        assert batch.absorb(outcome)
        columns = zip(
            plans[1], outcome.runs(), outcome.counts(), outcome.record_runs(), strict=True
        )
        for entry, run, counts, own in columns:
            state = entry.state
            assert (own is None) == (state.params.logprobs is None)
            if own is not None:
                assert [record.token_id for record in own] == run
                assert {len(record.top_ids) for record in own} == {state.params.logprobs}
                state.held_records.append(tuple(own))
            state.launch(1, entry.draft_limit, samples=True)
            state.land(counts[2], entry.draft_limit, samples=True)
            assert append_run(state, run)[1] is None
            state.count_step(counts)
            expected[counts] += 1
    batch.launch()
    for entry in plans[1]:
        entry.state.launch(1, entry.draft_limit, samples=True)
    batch.write()
    batch.write()  # nothing is written twice
    assert [facts(state) for state in late] == [facts(state) for state in at_once]
    assert tally == expected
    assert len(late[1].token_ids) > PROMPT + num_steps


def test_who_may_end_is_looked_at_first() -> None:
    """A stop, the length, a broken request: nothing of the step is taken then."""
    generator = np.random.default_rng(0)
    states = make_plan(3, limit=PROMPT + 4)
    plan = entries(states)
    calm = any_outcome(generator, plan)
    calm = Outcome(
        token_ids=np.array([2, 3, 4]), start_loc=np.arange(4), num_drafted=calm.num_drafted,
        num_admitted=np.zeros(3, np.int64), num_accepted=np.zeros(3, np.int64), broken={},
    )  # fmt: skip
    batch = StandingBatch(plan, PAGE, 1, Counter().update)
    stops = Outcome(np.array([2, STOP, 4]), *_rest(calm), broken={})
    broken = Outcome(calm.token_ids, *_rest(calm), broken={1: "NaN"})
    for outcome in (stops, broken):
        assert not batch.absorb(outcome)
    for _ in range(2):
        batch.launch()
        assert batch.absorb(calm)
    batch.launch()
    assert not batch.absorb(calm)  # that token would be the last
    batch.write()
    assert [state.token_ids[PROMPT:] for state in states] == [[1, i, i] for i in (2, 3, 4)]
    assert [state.num_unread for state in states] == [1, 1, 1]


def _rest(outcome: Outcome) -> tuple[np.ndarray, ...]:
    return outcome.start_loc, outcome.num_drafted, outcome.num_admitted, outcome.num_accepted


def test_steps_to_go_never_leave_the_pages() -> None:
    """As many as fit if every draft is accepted; whose pages reach its end never runs out."""
    states = make_plan(2)
    states[0].pages = list(range(1, 1 + -(-LIMIT // PAGE)))
    for state in states:
        state.launch(1, 0, samples=True)
    batch = StandingBatch(entries(states), PAGE, 1, Counter().update)
    room = len(states[1].pages) * PAGE
    width = 1 + DRAFTS
    assert batch.num_steps_to_go() == (room - PROMPT - width) // width
