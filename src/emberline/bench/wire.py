"""HTTP/1.1 for load: kept connections, and bytes with the time at which they came.

An event of a stream is a hundred bytes in a chunk of its own. A general HTTP client spends more on
each than a fast server does, and sees it when its task gets its turn; here the loop hands over the
bytes as the socket has them, and h11 reads the framing. docs/bench.md has the figures. Knows no
JSON, no proxy, no redirect and no compression: what is measured is the server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import h11


class Receiver(Protocol):
    """Takes an answer as it comes. Times are `time.perf_counter()`'s."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The status line and headers have come; names are lower case."""

    def body(self, data: bytes, now: float) -> None:
        """Bytes of the body have come."""


class WireError(Exception):
    """The exchange broke: `kind` is connect, disconnected or protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Connections:
    """Connections to one URL: each carries one exchange at a time and is kept for the next."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        assert parts.hostname is not None  # ServerSettings refuses a URL without
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        self._target = parts.path or "/"
        self._headers = {
            "host": parts.netloc,
            "accept": "text/event-stream, application/json",
            "content-type": "application/json",
            **headers,
        }
        self._idle: list[_Connection] = []

    async def post(self, body: bytes, receiver: Receiver) -> None:
        """Send `body`; the answer goes to `receiver` until it is complete.

        A kept connection may have been closed by the server just before: if nothing of an answer
        has come over it, the request goes once more, over a new one.

        Raises:
            WireError: no connection, or one that broke before the answer's end.
        """
        connection = self._take()
        if connection is not None:
            try:
                await self._exchange(connection, body, receiver)
                return
            except WireError:
                if connection.answered:
                    raise
        await self._exchange(await self._connect(), body, receiver)

    def close(self) -> None:
        """Close what is kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        except (OSError, ssl.SSLError) as problem:
            raise WireError("connect", problem.strerror or str(problem)) from None
        return connection

    async def _exchange(self, connection: _Connection, body: bytes, receiver: Receiver) -> None:
        headers = [*self._headers.items(), ("content-length", str(len(body)))]
        request = h11.Request(method="POST", target=self._target, headers=headers)
        try:
            await connection.exchange(request, body, receiver)
        except BaseException:  # cancelled too: the answer's rest must not meet the next request
            connection.close()
            raise
        if connection.reusable():
            self._idle.append(connection)
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One socket."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._receiver: Receiver | None = None
        self.open = False
        self.answered = False  # bytes have come since the last request

    async def exchange(self, request: h11.Request, body: bytes, receiver: Receiver) -> None:
        self._receiver, self.answered = receiver, False
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.open:
            raise WireError("disconnected", "the server closed the connection")
        parts = [
            self._http.send(part) for part in (request, h11.Data(data=body), h11.EndOfMessage())
        ]
        self._transport.write(b"".join(part or b"" for part in parts))
        try:
            await self._done
        finally:
            self._receiver = None

    def reusable(self) -> bool:
        """Make ready for the next exchange, if there can be one."""
        if not self.open or self._http.our_state is not h11.DONE:
            return False
        if self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        self.open = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.answered = True
        self._read(data, now)

    def connection_lost(self, problem: Exception | None) -> None:
        self.open = False
        if self._receiver is None or self._done.done():
            return
        self._read(b"", time.perf_counter())  # a body may end with the connection
        if not self._done.done():
            reason = f": {problem}" if problem else ""
            self._fail("disconnected", f"the connection ended before the answer{reason}")

    def _read(self, data: bytes, now: float) -> None:
        if self._receiver is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        try:
            self._http.receive_data(data)
            self._dispatch(self._receiver, now)
        except h11.RemoteProtocolError as problem:
            if data:
                self._fail("protocol", f"the answer is not HTTP/1.1: {problem}")
            else:
                self._fail("disconnected", "the connection ended before the answer")
        except Exception as problem:  # the receiver's: whoever waits for the answer gets it
            self._done.set_exception(problem)

    def _dispatch(self, receiver: Receiver, now: float) -> None:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                receiver.body(bytes(event.data), now)
            elif isinstance(event, h11.Response):
                names = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                receiver.head(event.status_code, names)
            elif isinstance(event, h11.EndOfMessage):
                self._done.set_result(None)
                return
            elif not isinstance(event, h11.InformationalResponse):
                return  # NEED_DATA, PAUSED, ConnectionClosed

    def _fail(self, kind: str, message: str) -> None:
        self._done.set_exception(WireError(kind, message))
