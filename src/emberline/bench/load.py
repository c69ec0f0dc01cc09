"""A level of load: which request goes out when. Knows nothing of prompts, answers or figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice

from emberline.bench.arrivals import arrivals
from emberline.bench.client import Client, RequestRecord
from emberline.bench.metrics import LevelRun
from emberline.bench.settings import ClosedLoop, Level, LoadSettings, OpenLoop

OnDone = Callable[[RequestRecord], None]


async def run_level(
    client: Client,
    level: Level,
    load: LoadSettings,
    bodies: Iterator[bytes],
    on_done: OnDone,
) -> LevelRun:
    """Put one level of load on the server and wait for every answer.

    Cancelling it (Ctrl-C) ends what is in flight and returns what was done. Bodies whose number is
    known are made before the clock starts.
    """
    records: list[RequestRecord] = []
    in_flight = 0

    async def one(index: int, body: bytes, start: float | None) -> None:
        nonlocal in_flight
        in_flight += 1
        record = await client.send(body, index, start)
        in_flight -= 1
        records.append(record)
        on_done(record)

    times = arrivals(level, load) if isinstance(level, OpenLoop) else None
    count = load.num_requests if times is None else len(times)
    numbered = enumerate(bodies if count is None else _made(bodies, count))
    interrupted = False
    computed, origin = time.process_time(), time.perf_counter()
    try:
        if isinstance(level, ClosedLoop):
            end = None if load.duration is None else origin + load.duration
            await _closed_loop(level.concurrency, numbered, one, end)
        elif times is not None:
            await _open_loop([origin + offset for offset in times], numbered, one)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # the level is over, the program is not: it has something to report
        interrupted = True
    return LevelRun(
        level=level,
        origin=origin,
        records=tuple(records),
        client_seconds=time.process_time() - computed,
        interrupted=interrupted,
        num_cut=in_flight,
    )


def _made(bodies: Iterator[bytes], count: int) -> Sequence[bytes]:
    return list(islice(bodies, count))


_Numbered = Iterator[tuple[int, bytes]]
_One = Callable[[int, bytes, float | None], Coroutine[None, None, None]]


async def _closed_loop(concurrency: int, numbered: _Numbered, one: _One, end: float | None) -> None:
    async def user() -> None:
        for index, body in numbered:  # one iterator for all: each body is sent once
            await one(index, body, None)
            if end is not None and time.perf_counter() >= end:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())


async def _open_loop(times: Sequence[float], numbered: _Numbered, one: _One) -> None:
    async with asyncio.TaskGroup() as group:
        for due, (index, body) in zip(times, numbered, strict=True):
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(one(index, body, due))
