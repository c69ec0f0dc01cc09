"""Rows of a draft's context: written late, all of them, and the last of a slot last."""

from __future__ import annotations

import torch

from emberline.drafters.backlog import ENOUGH, Backlog, ContextRows


def rows(*slots: int, mark: float = 0.0) -> ContextRows:
    at = torch.tensor(slots, dtype=torch.int64)
    return ContextRows(torch.full((len(slots), 2), mark), 10 * at, at)


def make() -> tuple[Backlog, list[ContextRows]]:
    written: list[ContextRows] = []
    return Backlog(written.append), written


def test_rows_are_written_together_once_somebody_reads() -> None:
    backlog, written = make()
    backlog.add(rows(3, 1))
    backlog.add(rows())
    backlog.add(rows(2, mark=1.0))
    assert not written
    backlog.settle()
    backlog.settle()
    (one,) = written
    assert one.slots.tolist() == [3, 1, 2]
    assert one.positions.tolist() == [30, 10, 20]
    assert one.taps[:, 0].tolist() == [0.0, 0.0, 1.0]


def test_enough_of_them_are_written_at_once() -> None:
    backlog, written = make()
    backlog.add(rows(*range(ENOUGH - 1)))
    assert not written
    backlog.add(rows(ENOUGH))
    assert [len(one.slots) for one in written] == [ENOUGH]


def test_a_slot_that_came_twice_holds_what_came_last() -> None:
    """Its page was given up and became another request's before anybody read."""
    backlog, written = make()
    backlog.add(rows(1, 2, mark=1.0))
    backlog.add(rows(2, 3, mark=2.0))
    backlog.settle()
    held: dict[int, float] = {}
    for one in written:
        assert len(set(one.slots.tolist())) == len(one.slots)
        held |= dict(zip(one.slots.tolist(), one.taps[:, 0].tolist(), strict=True))
    assert held == {1: 1.0, 2: 2.0, 3: 2.0}
