"""Connections whose client does not read: found by the bytes that stay where they are.

Owns when a connection counts as stuck. Must not know requests, the engine or HTTP.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable

SEND_BUFFER_BYTES = 128 * 1024
"""Of the kernel, a connection. Left alone it grows to megabytes before a write says "not now": all
of it memory for a client that reads nothing, which would be noticed only once it is full."""


def bound_send_buffer(listener: socket.socket) -> None:
    """Bound the kernel's send buffer of every connection accepted from now on."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


class StuckConnections:
    """Remembers since when the write buffer of each connection has not moved.

    The server stops filling a buffer at 64 KiB, so that for a client that does not read it comes to
    stand still; any byte that the socket accepts moves it.

    Args:
        timeout: seconds of standing still from which a connection counts as stuck.
    """

    def __init__(self, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"slow_reader_timeout must be greater than 0, got {timeout}")
        self._timeout = timeout
        self._still: dict[asyncio.Transport, tuple[int, float]] = {}  # bytes left, since when

    def look(self, transports: Iterable[asyncio.Transport], now: float) -> list[asyncio.Transport]:
        """Those that are stuck at time `now`, seconds of any steady clock.

        A transport that is not given any more is forgotten.
        """
        still = {}
        for transport in transports:
            size = transport.get_write_buffer_size()
            if size:
                before = self._still.get(transport, (0, now))
                still[transport] = before if before[0] == size else (size, now)
        self._still = still
        return [one for one, (_, since) in still.items() if now - since >= self._timeout]


def cut(transport: asyncio.Transport) -> None:
    """End a connection at once, without waiting for its client to read what is left."""
    connection = transport.get_extra_info("socket")
    if connection is not None:  # a reset drops what the kernel holds, too
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
