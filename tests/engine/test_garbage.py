"""The collector is held off while a batch runs, and nothing is kept from it for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from emberline.engine import garbage
from emberline.engine.garbage import CollectorAside


class Knot:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that have been collected."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def make_records(turns: int, collector: CollectorAside | None) -> list[tuple[list[int], ...]]:
    kept = []
    for i in range(turns):
        kept += [([i], [i]) for _ in range(100)]
        if collector is not None:
            collector.set_aside()
    return kept


def test_records_that_stay_are_not_walked_through(collections: list[int]) -> None:
    kept = [make_records(300, None)]
    assert len(collections) > 20, "this many are walked through without"
    collections.clear()
    with CollectorAside() as collector:
        kept.append(make_records(300, collector))
    assert len(collections) <= 2
    assert len(kept[1]) == 30_000
    assert gc.get_freeze_count() == 0


def test_cycles_are_freed_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now[0])
    with CollectorAside() as collector:
        seen = weakref.ref(Knot())
        collector.set_aside()
        gc.collect()
        assert seen() is not None, "it was set aside"
        now[0] = garbage.LOOK_SECONDS
        collector.set_aside()
        assert seen() is None
        late = weakref.ref(Knot())
        collector.set_aside()
    gc.collect()
    assert late() is None


def test_everything_is_the_collectors_again_after_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError), CollectorAside():
        fail()
    assert gc.get_freeze_count() == 0
