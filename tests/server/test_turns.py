"""Nobody on the event loop waits long for somebody else."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import threading
import time

from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.server.run import make_server
from emberline.server.turns import LONG_WORK, NUM_THREADS, Turnstile, bound_threads, off_loop

from support.engines import make_engine
from support.serving import NAME, SayingTarget, make_tokenizer


def test_long_work_leaves_the_loop() -> None:
    async def work() -> None:
        here = threading.get_ident()
        assert await off_loop(LONG_WORK, threading.get_ident) == here
        assert await off_loop(LONG_WORK + 1, threading.get_ident) != here

    asyncio.run(work())


def test_threads_of_long_work_are_few() -> None:
    async def work() -> None:
        bound_threads()

        def long_work() -> int:
            time.sleep(0.01)
            return threading.get_ident()

        idents = await asyncio.gather(*(off_loop(LONG_WORK + 1, long_work) for _ in range(10)))
        assert len(set(idents)) == NUM_THREADS

    asyncio.run(work())


def test_a_burst_lets_others_in_between() -> None:
    async def work() -> None:
        turnstile, seen = Turnstile(), []

        async def call(number: int) -> None:
            await turnstile.turn()
            seen.append(number)

        async def somebody_else() -> None:
            while True:
                seen.append(-1)
                await asyncio.sleep(0)

        other = asyncio.create_task(somebody_else())
        await asyncio.gather(*map(call, range(20)))
        other.cancel()
        assert [one for one in seen if one >= 0] == list(range(20))
        assert all(-1 in (a, b) for a, b in itertools.pairwise(seen))

    asyncio.run(work())


def test_the_collector_does_not_walk_what_was_there_before() -> None:
    """A full collection of everything that was imported is a pause of 0.2 s."""
    target = SayingTarget(make_tokenizer())
    engine = AsyncEngine(make_engine(target), TokenText(make_tokenizer()))
    server = make_server(engine, make_tokenizer(), NAME, log_level="critical")
    server.should_exit = True
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server.run([listener])
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
