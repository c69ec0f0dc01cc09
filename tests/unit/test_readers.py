"""Who reads along is told in time, of everything, and not of every short step."""

from __future__ import annotations

from dataclasses import replace

from emberline.engine.readers import LEAST_SECONDS, SECONDS_A_READER, Readers
from emberline.engine.request_state import RequestState
from emberline.types import Request, SamplingParams

PROMPT = (5, 6, 7)


def make_states(count: int) -> list[RequestState]:
    return [
        RequestState(
            request=Request(f"r{i}", PROMPT, SamplingParams(max_tokens=100)),
            text=None,
            seed=i,
            length_limit=103,
            stop_ids=frozenset(),
            token_ids=list(PROMPT),
            serial=i,
            arrived=0.0,
            deadline=1e9,
        )
        for i in range(count)
    ]


def test_many_wait_longer_than_few() -> None:
    for count, wait in ((2, LEAST_SECONDS), (128, 128 * SECONDS_A_READER)):
        now = [10.0]
        readers = Readers(lambda now=now: now[0])  # type: ignore[misc]
        for state in make_states(count):
            readers.add(state)
        assert readers.are_due
        readers.tell()
        assert not readers.are_due
        now[0] += 0.9 * wait
        assert not readers.are_due
        now[0] += 0.2 * wait
        assert readers.are_due


def test_everything_is_told_once_and_nothing_of_nothing() -> None:
    readers = Readers(lambda: 0.0)
    first, second, third = make_states(3)
    third.request = replace(third.request, stream=False)
    for state in (first, second, third):
        readers.add(state)
    first.token_ids += [1, 2]
    third.token_ids += [3]
    (output,) = readers.tell()
    assert (output.request_id, output.token_ids, output.num_output_tokens) == ("r0", (1, 2), 2)
    assert readers.tell() == []
    first.token_ids += [4]
    second.token_ids += [5]
    readers.forget(second)
    assert [output.token_ids for output in readers.tell()] == [(4,)]


def test_nobody_is_never_due() -> None:
    readers = Readers(lambda: 0.0)
    assert not readers.are_due
    (state,) = make_states(1)
    state.request = replace(state.request, stream=False)
    readers.add(state)
    assert not readers.are_due
