"""The outputs of one request on their way from the engine to a reader's event loop.

Owns the hand-over and what piles up when the reader is slower than the engine. Must not know HTTP,
the engine or what a reader does with an output.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from emberline.engine.logprob_run import join_logprobs, num_entries
from emberline.types import FinishReason, Request, RequestOutput, TokenLogprobs

MERGED_RECORDS = 2048
"""Outputs that wait are merged up to about this many log-probability entries: few objects, and none
so large that turning it into JSON would hold up an event loop."""
_PILE = (
    8  # parts that may wait before they are merged: one by one would cost more than reading them
)


class Part(Protocol):
    """What a step added to a request, in whatever form it comes."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        ...

    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None:
        """Their records, where asked for."""
        ...

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """The prompt's, once, where asked for."""
        ...


AnyPart = TypeVar("AnyPart", bound=Part)


class OutputStream(Generic[AnyPart]):
    """The outputs of one request, as an async iterator of its single reader.

    Parts that pile up while the reader is busy are merged: what is kept grows with the answer,
    never with the steps, and the engine never waits. `aclose` aborts what is not finished.

    Args:
        request: whose outputs they are.
        abort: ends a request by its id.
        bell: of the reader's loop; set when something comes. Streams with one reader may share it.
        merge: one part that adds what several consecutive ones add.
        finish: the output that a part is.
    """

    def __init__(
        self,
        request: Request,
        abort: Callable[[str], None],
        bell: asyncio.Event,
        merge: Callable[[Sequence[AnyPart]], AnyPart],
        finish: Callable[[AnyPart], RequestOutput],
    ) -> None:
        self.request = request
        self.bell = bell
        self.loop = asyncio.get_running_loop()
        self._abort, self._merge, self._finish = abort, merge, finish
        self._lock = threading.Lock()
        self._pending: deque[AnyPart] = deque()
        self._room = _PILE
        self._finished = False

    def __aiter__(self) -> OutputStream[AnyPart]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        while (output := self.take()) is None:
            self.bell.clear()
            await self.bell.wait()
        return output

    def take(self) -> RequestOutput | None:
        """What has come since the last time, merged; None: nothing, or the end has been read."""
        with self._lock:
            if not self._pending:
                return None
            part = self._first()
            if self._pending:  # everybody else on the loop first
                self.loop.call_soon(self.bell.set)
        output = self._finish(part)
        self._finished = self._finished or output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request unless its last output has been read."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)

    def put(self, part: AnyPart) -> bool:
        """Hand over a part, from any thread; whether the reader must be woken (`deliver` does)."""
        with self._lock:
            self._pending.append(part)
            if len(self._pending) > self._room:
                self._tidy()
            return len(self._pending) == 1

    def _first(self) -> AnyPart:
        """Parts from the front, merged until they are large enough."""
        parts = [self._pending.popleft()]
        size = num_records(parts[0])
        while self._pending and size < MERGED_RECORDS:
            parts.append(self._pending.popleft())
            size += num_records(parts[-1])
        return self._merge(parts) if len(parts) > 1 else parts[0]

    def _tidy(self) -> None:
        """Merge what waits; rarely, for it goes through all of it."""
        merged: list[AnyPart] = []
        while self._pending:
            merged.append(self._first())
        self._pending.extend(merged)
        self._room = _PILE + 2 * (len(merged) - 1)


def output_stream(
    request: Request, abort: Callable[[str], None], bell: asyncio.Event
) -> OutputStream[RequestOutput]:
    """A stream whose parts are outputs."""
    return OutputStream(request, abort, bell, merge_outputs, lambda output: output)


def deliver(parts: Iterable[tuple[OutputStream[AnyPart], AnyPart]]) -> None:
    """Hand over the parts of many requests, from any thread; each event loop is woken once."""
    bells: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for stream, part in parts:
        if stream.put(part):
            bells.setdefault(stream.loop, []).append(stream.bell)
    for loop, ringing in bells.items():
        # A reader's loop may be closed already; then nobody is waiting.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_ring, ringing)


def _ring(bells: Iterable[asyncio.Event]) -> None:
    for bell in bells:
        bell.set()


def last_word(request: Request, reason: FinishReason, message: str) -> RequestOutput:
    """The output that ends a request which the engine can say nothing more of."""
    logprobs = () if request.params.logprobs is not None else None
    return RequestOutput(request.request_id, logprobs=logprobs, finish_reason=reason, error=message)


def num_records(part: Part) -> int:
    """Entries that an output takes when it is written: one a token, and one an alternative."""
    logprobs = part.logprobs  # which a part may have to make
    entries = len(part.token_ids)
    if logprobs is not None:
        entries += num_entries(logprobs)
    if part.prompt_logprobs is not None:
        entries += num_entries([record for record in part.prompt_logprobs if record is not None])
    return entries


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that adds what several consecutive ones of a request add."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    prompts = (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
    return replace(
        last,
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=join_logprobs(outputs),
        text="".join(output.text for output in outputs),
        prompt_logprobs=next(prompts, None),
    )
