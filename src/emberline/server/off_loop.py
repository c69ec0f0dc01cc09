"""Long work away from the event loop, which answers everybody else meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_WORK = 4096  # characters or records; from here on a thread costs less than the wait

Result = TypeVar("Result")


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread when its `size` says that it takes long.

    Args:
        size: characters or ids of a text, or records of an answer: about 10 us each.
        work: touches nothing that anybody else changes meanwhile.
    """
    return await asyncio.to_thread(work) if size > LONG_WORK else work()
