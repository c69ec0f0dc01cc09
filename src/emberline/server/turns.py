"""Whose turn it is on the event loop: long work leaves it, and what comes at once goes one by one.

Owns that nobody waits long for somebody else. Must not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_WORK = 4096  # characters or records; from here on a thread costs less than the wait

NUM_THREADS = 2
"""Of long work: one may tokenise, which needs no interpreter, while another writes an answer. Each
more would only take the interpreter from the engine, whose steps everybody waits for."""

Result = TypeVar("Result")


def bound_threads() -> None:
    """Let the running loop use that many threads for long work."""
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="emberline-long-work")
    asyncio.get_running_loop().set_default_executor(threads)


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread when its `size` says that it takes long.

    Args:
        size: characters or ids of a text, or records of an answer: about 10 us each.
        work: touches nothing that anybody else changes meanwhile.
    """
    return await asyncio.to_thread(work) if size > LONG_WORK else work()


class Turnstile:
    """Lets through one caller in a pass of the loop, so that everybody else gets a turn between.

    The bodies of a burst would otherwise be parsed in a row, while `/health` waits for all of them.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for one's turn, in the order of arrival."""
        async with self._lock:
            await asyncio.sleep(0)
