"""From one HTTP call to its engine requests and back: fan-out, merging, disconnects, SSE.

Owns the life of a call's requests: whatever ends it early aborts them. Must not know the shape of
the answers it carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from emberline.engine.output_stream import OutputStream
from emberline.engine.running_engine import RunningEngine
from emberline.server.errors import ApiError, api_error
from emberline.server.live_audit import LiveAudit
from emberline.server.metrics import CallMetrics
from emberline.types import ASKED_FOR, FinishReason, InvalidRequest, Request, RequestOutput

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
DONE = b"data: [DONE]\n\n"

_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode
_SLICE = 8  # items of a list, each with its alternatives: well under 10 ms for 200 of them
_ALTERNATIVES = 8 * 200  # of a slice; an item may have the whole vocabulary
_RECORDS_DEPTH = 4  # root, choices, choice, logprobs: below stand the lists that can be long


class ClientGone(Exception):
    """The client has hung up: nobody reads the answer."""


def dump_json(data: object) -> bytes:
    """Compact strict JSON: NaN and Infinity, which it has no word for, are null.

    (No log-probability is ever one of these: `records.finite`.)
    """
    return _encode(data)


def dump_long_json(data: object, depth: int = _RECORDS_DEPTH) -> bytes:
    """The same, long lists a slice at a time: the encoder lets no other thread run meanwhile.

    Args:
        data: what is written.
        depth: levels that are looked into for lists that are long.
    """
    return b"".join(_parts(data, depth))


def sse(data: bytes, name: str = "") -> bytes:
    """One server-sent event, with a name where events have one."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def _parts(data: object, depth: int) -> Iterator[bytes]:
    if isinstance(data, list) and len(data) > (step := _step(data)):
        slices = (data[start : start + step] for start in range(0, len(data), step))
        yield b"[" + b",".join(_encode(part)[1:-1] for part in slices) + b"]"
    elif depth and isinstance(data, list):
        yield b"["
        for i, item in enumerate(data):
            yield b"," if i else b""
            yield from _parts(item, depth - 1)
        yield b"]"
    elif depth and isinstance(data, dict):
        yield b"{"
        for i, (key, value) in enumerate(data.items()):
            yield (b"," if i else b"") + _encode(key) + b":"
            yield from _parts(value, depth - 1)
        yield b"}"
    else:
        yield _encode(data)


def _step(items: list[Any]) -> int:
    """How many items make a slice."""
    widest = max((len(item) for item in items if isinstance(item, dict)), default=0)
    return max(1, min(_SLICE, _ALTERNATIVES // max(1, widest)))


class Answer(JSONResponse):
    """A JSON answer, written strictly."""

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return dump_long_json(content)


async def run_requests(
    engine: RunningEngine,
    requests: Sequence[Request],
    metrics: CallMetrics,
    audit: LiveAudit | None,
    receive: Receive,
) -> Outputs:
    """Run requests side by side; yields (index, output) as they come, merged when we are slow.

    Refusals come before the first pair, so that they can still become an HTTP status. Leaving
    early aborts what runs.

    Raises:
        ClientGone: the client hung up.
        ApiError: the engine gave a request up.
        InvalidRequest, QueueFull, EngineStopped: they were not admitted, none of them.
    """
    gone = asyncio.ensure_future(_disconnected(receive))
    watch = audit.watch(requests) if audit is not None else None
    streams: list[OutputStream[Any]] = []
    try:
        streams += await engine.submit_all(requests if watch is None else watch.requests)
        metrics.admitted()
        bell = streams[0].bell  # one for the whole call, and for its client
        gone.add_done_callback(lambda _: bell.set())
        unfinished = dict(enumerate(streams))
        while unfinished:
            await bell.wait()
            bell.clear()
            if gone.done():
                raise ClientGone
            for index, stream in list(unfinished.items()):
                output = stream.take()
                if output is None:
                    continue
                if output.finished:
                    del unfinished[index]
                if watch is not None:
                    output = watch.take(index, output)
                metrics.observe(index, output)
                _raise_failure(output)
                yield index, output
    finally:
        gone.cancel()
        for stream in streams:
            await stream.aclose()
        metrics.close()
        if watch is not None:
            watch.close()


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has hung up; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _raise_failure(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        if output.error in ASKED_FOR:
            raise ApiError(400, output.error, code="no_token")
        raise ApiError(500, output.error or "the engine gave the request up", code="engine_error")
    # One that ran out of time, or that its client aborted, ends with what it has: no error.
    if output.finish_reason is FinishReason.ABORT and output.error is not None:
        raise ApiError(503, output.error, code="aborted")


class EventStream(Response):
    """Server-sent events: one `data:` line an event, `[DONE]` at the end.

    What fails before the first event is an ordinary error answer; later it is an event of its own.

    Args:
        open_outputs: starts the requests, given the connection's `receive`.
        events: what those outputs become, framed: one event or several at a time, which go out
            together. The last ones may be followed by `DONE`.
        in_words: a refusal by the names of the call's body.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        open_outputs: Callable[[Receive], Outputs],
        events: Callable[[Outputs], AsyncIterator[bytes]],
        in_words: Callable[[InvalidRequest], InvalidRequest] = lambda problem: problem,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._open_outputs, self._events, self._in_words = open_outputs, events, in_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that hangs up ends it."""
        started = ended = False
        try:
            async with aclosing(self._open_outputs(receive)) as outputs:
                async for events in self._events(outputs):
                    if not started:
                        await self._start(send)
                        started = True
                    ended = events.endswith(DONE)
                    await self._send(send, events, ends=ended)
        except (ClientGone, OSError):
            return
        except Exception as problem:  # an answer that has begun can only say so in the stream
            if ended:
                raise
            if isinstance(problem, InvalidRequest):
                problem = self._in_words(problem)
            error = api_error(problem)
            if not started:
                await error.response()(scope, receive, send)
                return
            await self._send(send, sse(dump_json(error.body())))
        if not ended:
            await self._send(send, DONE, ends=True)

    async def _start(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

    async def _send(self, send: Send, body: bytes, *, ends: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not ends})


async def collect(outputs: Outputs, num_requests: int) -> list[list[RequestOutput]]:
    """Every output of a call that is answered at once, by request."""
    parts: list[list[RequestOutput]] = [[] for _ in range(num_requests)]
    async with aclosing(outputs):
        async for index, output in outputs:
            parts[index].append(output)
    return parts
