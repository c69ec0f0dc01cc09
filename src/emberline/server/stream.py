"""From one HTTP call to its engine requests and back: fan-out, merging, disconnects, SSE.

Owns the life of a call's requests: whatever ends it early aborts them. Must not know the shape of
the answers it carries.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from emberline.engine.async_engine import AsyncEngine, OutputStream
from emberline.server.errors import ApiError, api_error
from emberline.server.metrics import CallMetrics
from emberline.types import FinishReason, Request, RequestOutput

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has hung up: nobody reads the answer."""


def dump_json(data: object) -> bytes:
    """Compact strict JSON: NaN and Infinity raise instead of being written."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Answer(JSONResponse):
    """A JSON answer, written strictly."""

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return dump_json(content)


async def run_requests(
    engine: AsyncEngine, requests: Sequence[Request], metrics: CallMetrics, receive: Receive
) -> Outputs:
    """Run requests side by side; yields (index, output) as they come, merged when we are slow.

    Refusals come before the first pair, so that they can still become an HTTP status. Leaving
    early aborts what runs.

    Raises:
        ClientGone: the client hung up.
        ApiError: the engine gave a request up.
        InvalidRequest, QueueFull, EngineStopped: it was not admitted; none of the others runs on.
    """
    gone = asyncio.ensure_future(_disconnected(receive))
    streams: list[OutputStream] = []
    tasks: dict[asyncio.Future[RequestOutput], int] = {}
    try:
        streams += await _admit(engine, requests)
        metrics.admitted()
        tasks = {_next(stream): i for i, stream in enumerate(streams)}
        while tasks:
            waited: set[asyncio.Future[Any]] = {*tasks, gone}
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if gone in done:
                raise ClientGone
            for task in sorted(tasks.keys() & done, key=tasks.__getitem__):
                index, output = tasks.pop(task), task.result()
                metrics.observe(index, output)
                _raise_failure(output)
                if not output.finished:
                    tasks[_next(streams[index])] = index
                yield index, output
    finally:
        gone.cancel()
        for task in tasks:
            task.cancel()
        for stream in streams:
            await stream.aclose()
        metrics.close()


def _next(stream: OutputStream) -> asyncio.Future[RequestOutput]:
    return asyncio.ensure_future(anext(stream))


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has hung up; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _admit(engine: AsyncEngine, requests: Sequence[Request]) -> list[OutputStream]:
    """All requests or none."""
    tasks = [asyncio.ensure_future(engine.submit(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, OutputStream):
                await result.aclose()
        raise


def _raise_failure(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, output.error or "the engine gave the request up", code="engine_error")
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(503, output.error or "the request was aborted", code="aborted")


class EventStream(Response):
    """Server-sent events: one `data:` line an event, `[DONE]` at the end.

    What fails before the first event is an ordinary error answer; later it is an event of its own.

    Args:
        open_outputs: starts the requests, given the connection's `receive`.
        events: the JSON events of those outputs.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        open_outputs: Callable[[Receive], Outputs],
        events: Callable[[Outputs], AsyncIterator[Any]],
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._open_outputs, self._events = open_outputs, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that hangs up ends it."""
        started = False
        try:
            async with aclosing(self._open_outputs(receive)) as outputs:
                async for event in self._events(outputs):
                    if not started:
                        await self._start(send)
                        started = True
                    await self._send(send, b"data: " + dump_json(event) + b"\n\n")
        except (ClientGone, OSError):
            return
        except Exception as problem:  # an answer that has begun can only say so in the stream
            error = api_error(problem)
            if not started:
                await error.response()(scope, receive, send)
                return
            await self._send(send, b"data: " + dump_json(error.body()) + b"\n\n")
        await self._send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

    async def _send(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def collect(outputs: Outputs, num_requests: int) -> list[list[RequestOutput]]:
    """Every output of a call that is answered at once, by request."""
    parts: list[list[RequestOutput]] = [[] for _ in range(num_requests)]
    async with aclosing(outputs):
        async for index, output in outputs:
            parts[index].append(output)
    return parts
