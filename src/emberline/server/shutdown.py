"""The server's process: connections that are stuck are cut, and a signal ends everything in order.

Owns the order in which new requests, running ones, engine and connections end. Must not know
endpoints.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from emberline.engine.running_engine import RunningEngine
from emberline.server.slow_readers import StuckConnections, bound_send_buffer, cut

logger = logging.getLogger(__name__)

SLOW_READER_SECONDS = 60.0
ENDING_SECONDS = 10.0  # for the engine's current step, once more for writing the last answers
_POLL_SECONDS = 0.05
_TICKS_A_SECOND = 10  # uvicorn's


class GracefulServer(uvicorn.Server):
    """A server that a first signal drains and a second one ends at once.

    From the first signal on new requests are answered with 503, on new connections and on those
    that were kept alive; the requests that are there, waiting ones included, have `grace_seconds`.
    Then, on a second signal, or once the last of them is answered, the listener is closed and the
    engine shut down, so that every request that is left gets its own error. Connections that still
    say nothing, such as a client in the middle of its body, are cut. No signal is raised again
    afterwards: `run` returns and the program ends with 0.

    Args:
        config: uvicorn's settings; its own limit on the shutdown is set here.
        engine: what the application serves.
        grace_seconds: how long requests may go on after the first signal.
        slow_reader_timeout: seconds after which a connection that takes no byte is cut.
        on_slow_reader: called for each connection that is cut so.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: RunningEngine,
        *,
        grace_seconds: float,
        slow_reader_timeout: float = SLOW_READER_SECONDS,
        on_slow_reader: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        # uvicorn cancels handlers at its limit, which they cannot answer: ours must come first.
        config.timeout_graceful_shutdown = math.ceil(3 * ENDING_SECONDS)
        self._engine, self._grace_seconds = engine, grace_seconds
        self._stuck, self._on_slow_reader = StuckConnections(slow_reader_timeout), on_slow_reader
        self._grace_end: float | None = None  # set by the first signal
        self._admitted: set[asyncio.Task[None]] | None = None  # calls that were there by then

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to drain; end at once if that has begun."""
        if self._grace_end is not None:
            self.should_exit = True
            return
        self._grace_end = time.monotonic() + self._grace_seconds
        self._engine.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        # As with signals: in the main thread the process is the server's own. What is there now
        # stays, and walking through all of it takes the collector 0.2 s in which nothing else runs.
        if threading.current_thread() is threading.main_thread():
            gc.collect()
            gc.freeze()
        for listener in sockets or ():
            bound_send_buffer(listener)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end. Once a second: cut who is stuck."""
        now = time.monotonic()
        if self._grace_end is not None and self._is_drained(now, self._grace_end):
            self.should_exit = True
        if counter % _TICKS_A_SECOND == 0:
            transports = [connection.transport for connection in self.server_state.connections]
            for transport in self._stuck.look(transports, now):
                cut(transport)
                self._on_slow_reader()
        return await super().on_tick(counter)

    def _is_drained(self, now: float, end: float) -> bool:
        """Whether every call that was there at the signal is answered, or the time is over."""
        if self._admitted is None:
            self._admitted = set(self.server_state.tasks)
            state = self._engine.snapshot()
            logger.info(
                "draining: %d requests running, %d waiting, at most %g s",
                state.num_running,
                state.num_waiting,
                self._grace_seconds,
            )
        return now >= end or all(task.done() for task in self._admitted)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order; returns when every connection is closed and the engine has stopped."""
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.to_thread(self._engine.shutdown, ENDING_SECONDS)
        await _until(lambda: not self.server_state.connections, ENDING_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, at most so long."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(_POLL_SECONDS)
