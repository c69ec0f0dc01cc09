"""The end of a server: requests may finish, then the engine ends them, then nothing is left.

Owns the order in which listener, requests, engine and connections end. Must not know endpoints.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from emberline.engine.async_engine import AsyncEngine

ENDING_SECONDS = 10.0  # for the engine's current step, once more for writing the last answers
_POLL_SECONDS = 0.05


class GracefulServer(uvicorn.Server):
    """A server that a first signal ends in order and a second one at once.

    On the first signal it accepts nothing more and lets requests run for `grace_seconds`. Then, or
    on a second signal, the engine is shut down, so that every request that is left gets its own
    error. Connections that still say nothing, such as a client in the middle of its body, are cut.
    No signal is raised again afterwards: `run` returns and the program ends with 0.

    Args:
        config: uvicorn's settings; its own limit on the shutdown is set here.
        engine: what the application serves.
        grace_seconds: how long requests may go on after the first signal.
    """

    def __init__(
        self, config: uvicorn.Config, engine: AsyncEngine, *, grace_seconds: float
    ) -> None:
        super().__init__(config)
        # uvicorn cancels handlers at its limit, which they cannot answer: ours must come first.
        config.timeout_graceful_shutdown = math.ceil(grace_seconds + 3 * ENDING_SECONDS)
        self._engine, self._grace_seconds = engine, grace_seconds
        self._hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin the end; end the grace if it has begun."""
        self._hurried = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order; returns when every connection is closed and the engine has stopped."""
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        await _until(lambda: self._hurried, self._grace_seconds)
        await asyncio.to_thread(self._engine.shutdown, ENDING_SECONDS)
        await _until(lambda: not self.server_state.connections, ENDING_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, at most so long. Polled: signals wake no event loop."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(_POLL_SECONDS)
