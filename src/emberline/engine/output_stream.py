"""The outputs of one request on their way from the engine's thread to a reader's event loop.

Owns the hand-over and what piles up when the reader is slower than the engine. Must not know HTTP,
the engine or what a reader does with an output.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from emberline.types import Request, RequestOutput

MERGED_RECORDS = 2048
"""Outputs that wait are merged up to about this many log-probability entries: few objects, and none
so large that turning it into JSON would hold up an event loop."""


class OutputStream:
    """The outputs of one request, as an async iterator of its single reader.

    Outputs that pile up while the reader is busy are merged: what is kept grows with the answer,
    never with the steps, and the engine never waits. `aclose` aborts what is not finished.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()  # set while anything is pending
        self._lock = threading.Lock()
        self._pending: deque[RequestOutput] = deque()
        self._finished = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        await self._ready.wait()
        with self._lock:
            output = self._pending.popleft()
            if not self._pending:
                self._ready.clear()
        self._finished = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request unless its last output has been read."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)

    def put(self, output: RequestOutput) -> None:
        """Hand over an output, from any thread; wakes the reader once until it has read."""
        with self._lock:
            wake = not self._pending
            if self._pending and num_records(self._pending[-1]) < MERGED_RECORDS:
                output = merge_outputs([self._pending.pop(), output])
            self._pending.append(output)
        if wake:
            # The reader's loop may be closed already; then nobody is waiting.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)


def num_records(output: RequestOutput) -> int:
    """Entries that an output takes when it is written: one a token, and one an alternative."""
    records = (*(output.prompt_logprobs or ()), *(output.logprobs or ()))
    twins = (record.processed for record in records if record is not None)
    alternatives = sum(1 + len(r.top_ids) for r in (*records, *twins) if r is not None)
    return len(output.token_ids) + alternatives


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that adds what several consecutive ones of a request add."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    logprobs = None
    if last.logprobs is not None:
        logprobs = tuple(record for output in outputs for record in output.logprobs or ())
    prompts = (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
    return replace(
        last,
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=logprobs,
        text="".join(output.text for output in outputs),
        prompt_logprobs=next(prompts, None),
    )
