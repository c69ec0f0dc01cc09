"""Server-sent events out of bytes, however they are cut.

Knows the framing alone (https://html.spec.whatwg.org/multipage/server-sent-events.html), not what
the events say. A line ends with LF or CRLF; the lone CR that the standard also allows is not read,
as no server writes it.
"""

from __future__ import annotations


class EventParser:
    """Collects the `data` of events; every other field and comment lines are passed over."""

    def __init__(self) -> None:
        self._rest = b""  # a line whose end has not come
        self._data: list[bytes] = []  # lines of an event whose end has not come

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that `received` completes."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removesuffix(b"\r").removeprefix(b" "))
            elif line in (b"", b"\r") and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
