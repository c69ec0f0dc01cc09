"""Which requests are on their way when: closed and open loops, durations, interruptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

import pytest

from emberline.bench.arrivals import arrivals
from emberline.bench.client import Client, RequestRecord
from emberline.bench.load import run_level
from emberline.bench.metrics import LevelRun, summarize, ttft
from emberline.bench.settings import ClosedLoop, Level, LoadSettings, OpenLoop, ServerSettings

from support.fake_server import DONE, FakeServer, Reply, chat_chunk, fake_server, usage_chunk


def slow(seconds: float) -> Reply:
    return Reply([seconds, chat_chunk("a"), chat_chunk("b", "stop"), usage_chunk(3, 2), DONE])


def run(
    level: Level,
    delay: float = 0.1,
    *,
    on_done: Callable[[RequestRecord], None] = lambda _record: None,
    cancel_after: float | None = None,
    **load: float,
) -> tuple[LevelRun, FakeServer]:
    settings = LoadSettings(levels=(level,), **load)  # type: ignore[arg-type]
    bodies = (f'{{"n": {n}}}'.encode() for n in count())

    async def work(url: str) -> LevelRun:
        client = Client(ServerSettings(base_url=url))
        task = asyncio.create_task(run_level(client, level, settings, bodies, on_done))
        if cancel_after is not None:
            asyncio.get_running_loop().call_later(cancel_after, task.cancel)
        try:
            return await task
        finally:
            client.close()

    with fake_server(lambda _asked: slow(delay)) as server:
        return asyncio.run(work(server.url)), server


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_keeps_its_number_in_flight(concurrency: int) -> None:
    level, done = run(ClosedLoop(concurrency), 0.05, num_requests=10)
    assert done.peak == concurrency
    assert sorted(record.index for record in level.records) == list(range(10))
    assert sorted(asked.json["n"] for asked in done.posts) == list(range(10))
    row = summarize(level)
    assert (row.ok, row.in_flight_peak) == (10, concurrency)
    assert row.in_flight_mean > 0.6 * min(concurrency, 10 / 2)


def test_a_closed_loop_of_a_duration_finishes_what_it_began() -> None:
    level, server = run(ClosedLoop(2), 0.2, duration=0.5)
    assert len(level.records) == len(server.posts)
    assert 4 <= len(server.posts) <= 6  # begun at 0, 0.2 and 0.4, two each; fewer if it is slow
    assert all(record.start - level.origin < 0.55 for record in level.records)
    assert all(record.failure is None for record in level.records)
    assert summarize(level).duration_seconds > 0.5


def test_an_open_loop_does_not_wait_for_answers() -> None:
    opened = OpenLoop(100.0)
    level, server = run(opened, 0.5, num_requests=20, seed=1)
    assert server.peak == 20
    due = arrivals(opened, LoadSettings(levels=(opened,), num_requests=20, seed=1))
    starts = sorted(record.start - level.origin for record in level.records)
    assert starts == pytest.approx(due)
    assert all(record.sent >= record.start for record in level.records)


def test_the_clock_of_an_open_loop_starts_at_the_arrival_even_if_the_client_is_late() -> None:
    """Else the requests that suffered most from a busy moment would look the fastest."""
    stalled = False

    def stall(_record: RequestRecord) -> None:
        nonlocal stalled
        if not stalled:
            stalled = True
            time.sleep(0.4)

    level, _ = run(OpenLoop(50.0), 0.05, on_done=stall, num_requests=20)
    late = max(level.records, key=lambda record: record.sent - record.start)
    assert late.sent - late.start > 0.2
    assert ttft(late) > late.sent - late.start
    row = summarize(level)
    assert row.send_lag_ms is not None
    assert row.send_lag_ms.max > 200


def test_an_interruption_ends_a_level_and_keeps_what_was_done() -> None:
    for level in (ClosedLoop(2), OpenLoop(20.0)):
        began = time.perf_counter()
        found, _ = run(level, 0.2, cancel_after=0.5, num_requests=500)
        assert time.perf_counter() - began < 5
        assert found.interrupted
        assert found.num_cut > 0
        assert 0 < len(found.records) < 500
        assert all(record.failure is None for record in found.records)
        row = summarize(found)
        assert (row.interrupted, row.ok, row.failed) == (True, len(found.records), 0)
