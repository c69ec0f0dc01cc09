"""Whole messages over a connected pair of sockets, between two processes.

Owns their framing and that who sends never waits. Must not know what the messages are. That the
other process is gone shows at once, as the end of what comes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator

_HEADER = 4  # bytes of a message's length, little-endian
_CHUNK = 2**18  # bytes taken out of the socket at once


class Channel:
    """One end. `post` from any thread, `batches` from one.

    A message that the socket has no room for waits in this process, and a thread that is started
    for the first of them sends it: an engine does not wait for whoever reads what it says.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._changed = threading.Condition()
        self._left: deque[memoryview] = deque()  # the front one is being sent by the thread
        self._writer: threading.Thread | None = None
        self._closed = False

    def post(self, message: bytes) -> None:
        """Send a message; nothing happens where the other process is gone."""
        frame = memoryview(len(message).to_bytes(_HEADER, "little") + message)
        with self._changed:
            if self._closed:
                return
            if not self._left:
                frame = frame[self._send_some(frame) :]
            if frame:
                self._left.append(frame)
                if self._writer is None:
                    self._writer = threading.Thread(target=self._send_left, daemon=True)
                    self._writer.start()
                self._changed.notify_all()

    def batches(self) -> Iterator[list[bytes]]:
        """Messages as they come, those together that have come together, until the other's end."""
        buffer, chunk = bytearray(), memoryview(bytearray(_CHUNK))
        while size := self._receive_into(chunk):
            buffer += chunk[:size]
            messages, start = [], 0
            while len(buffer) >= (body := start + _HEADER):
                end = body + int.from_bytes(buffer[start:body], "little")
                if len(buffer) < end:
                    break
                messages.append(bytes(buffer[body:end]))
                start = end
            if messages:
                del buffer[:start]
                yield messages

    def close(self, timeout: float = 5.0) -> None:
        """Send what is left, as far as the other side takes it in time; then end both ways."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left or self._closed, timeout)
            self._closed = True
            self._left.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # wakes who sends and who reads
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the socket back, once nobody reads any more."""
        self.close(0)
        if self._writer is not None:
            self._writer.join()
        self._socket.close()

    def _send_some(self, frame: memoryview) -> int:
        """Bytes that the socket took without waiting."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # nobody reads: whoever does read here sees the end
            self._closed = True
            return len(frame)

    def _receive_into(self, chunk: memoryview) -> int:
        try:
            return self._socket.recv_into(chunk)
        except OSError:
            return 0

    def _send_left(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._closed)
                if self._closed:
                    return
                frame = self._left[0]
            try:
                self._socket.sendall(frame)
            except OSError:
                with self._changed:
                    self._closed = True
                    self._left.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                if self._left:
                    self._left.popleft()
                    self._changed.notify_all()
