"""One thread round the engine, one mailbox a request: how asyncio code talks to it.

Owns the thread, the hand-over in both directions and what happens when a step fails. Must not know
HTTP, text formats or tensors. The engine is only ever touched by its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from emberline.engine.detokenizer import TextStream, TokenText
from emberline.types import (
    EngineSnapshot,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
)

logger = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine takes no more requests: a step failed, or it was shut down."""


class SteppingEngine(Protocol):
    """What the thread needs of an engine."""

    vocab_size: int
    max_model_len: int
    max_draft_tokens: int
    info: dict[str, object]

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, request: Request, text: TextStream | None = None) -> None:
        """Queue a request, or raise `InvalidRequest` or `QueueFull`."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at the next step."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters since the start, and what is held now."""
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be answered, and why not."""

    ok: bool
    reason: str | None = None


class OutputStream:
    """The outputs of one request, as an async iterator of its single reader.

    Outputs that pile up while the reader is busy are merged into one: a slow reader holds no more
    than its own answer and never delays the engine. `aclose` aborts what is not finished.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._admitted: asyncio.Future[None] = self._loop.create_future()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._pending: list[RequestOutput] = []
        self._finished = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        await self._ready.wait()
        with self._lock:
            outputs, self._pending = self._pending, []
            self._ready.clear()
        merged = merge_outputs(outputs)
        self._finished = merged.finished
        return merged

    async def aclose(self) -> None:
        """Abort the request unless its last output has been read."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)

    async def admitted(self) -> None:
        """Wait until the engine has taken the request, or raise its refusal."""
        await self._admitted

    # Called by the engine's thread.

    def decide(self, refusal: Exception | None) -> None:
        """Tell the reader whether the request was taken."""
        self._call(self._settle, refusal)

    def put(self, output: RequestOutput) -> None:
        """Hand over an output; wakes the reader at most once until it has read."""
        with self._lock:
            wake = not self._pending
            self._pending.append(output)
        if wake:
            self._call(self._ready.set)

    def _settle(self, refusal: Exception | None) -> None:
        if self._admitted.done():
            return
        if refusal is None:
            self._admitted.set_result(None)
        else:
            self._finished = True
            self._admitted.set_exception(refusal)
            self._admitted.exception()  # the reader may have gone: then nobody has to look at it

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # The reader's loop may be closed already; then nobody is waiting.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


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


class AsyncEngine:
    """An engine for asyncio callers, on any number of event loops.

    Args:
        engine: stepped by this object's thread and by nobody else from now on.
        token_text: text of its tokenizer.
        stall_timeout: seconds after which a step that has not come back makes `health` bad.
    """

    def __init__(
        self, engine: SteppingEngine, token_text: TokenText, *, stall_timeout: float = 300.0
    ) -> None:
        self.token_text = token_text
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.info = dict(engine.info)
        self._engine = engine
        self._stall_timeout = stall_timeout
        self._changed = threading.Condition()
        self._inbox: deque[OutputStream | str] = deque()  # requests to add, ids to abort
        self._streams: dict[str, OutputStream] = {}
        self._stopping = False
        self._failure: str | None = None
        self._step_began: float | None = None
        self._snapshot = engine.snapshot()
        self._thread = threading.Thread(target=self._run, name="emberline-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> OutputStream:
        """Hand a request to the engine; returns when it has been admitted.

        The caller must iterate the stream to its end or `aclose` it.

        Raises:
            InvalidRequest: it can never run.
            QueueFull: too many wait already.
            EngineStopped: the engine takes no more requests.
        """
        stream = OutputStream(request, self.abort)
        self._send(stream)
        try:
            await stream.admitted()
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of a request, deltas. Closing or cancelling the iterator aborts it."""
        stream = await self.submit(request)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """End a request soon. Unknown or finished ids are ignored."""
        with contextlib.suppress(EngineStopped):
            self._send(request_id)

    def health(self) -> Health:
        """Whether the thread lives and its step comes back in time."""
        if self._failure is not None:
            return Health(False, self._failure)
        if self._stopping:
            return Health(False, "the engine is shutting down")
        began = self._step_began
        if began is not None and time.monotonic() - began > self._stall_timeout:
            return Health(False, f"a step has been running for over {self._stall_timeout:g} s")
        return Health(True)

    def snapshot(self) -> EngineSnapshot:
        """The engine's counters as of its latest step."""
        with self._changed:
            arriving = sum(isinstance(item, OutputStream) for item in self._inbox)
        return replace(self._snapshot, num_waiting=self._snapshot.num_waiting + arriving)

    def shutdown(self, timeout: float | None = 30.0) -> None:
        """Stop the thread after its current step; requests in flight end with ABORT."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _send(self, item: OutputStream | str) -> None:
        with self._changed:
            if self._stopping or self._failure is not None:
                raise EngineStopped(self._failure or "the engine is shutting down")
            self._inbox.append(item)
            self._changed.notify()

    # The engine's thread.

    def _run(self) -> None:
        ending = FinishReason.ABORT
        try:
            while (items := self._next_items()) is not None:
                self._apply(items)
                if self._engine.has_work:
                    self._step_began = time.monotonic()
                    outputs = self._engine.step()
                    self._step_began = None
                    self._snapshot = self._engine.snapshot()
                    self._deliver(outputs)
                else:
                    self._snapshot = self._engine.snapshot()
        except Exception as problem:  # whatever a step raises must reach those who wait for it
            logger.exception("the engine failed and takes no more requests")
            ending = FinishReason.ERROR
            with self._changed:
                self._failure = f"the engine failed: {type(problem).__name__}: {problem}"
        self._step_began = None
        self._end_all(ending)

    def _next_items(self) -> list[OutputStream | str] | None:
        """What came in since the last step; sleeps while there is nothing to do. None: stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._engine.has_work):
                self._changed.wait()
            if self._stopping:
                return None
            items = list(self._inbox)
            self._inbox.clear()
            return items

    def _apply(self, items: Iterable[OutputStream | str]) -> None:
        for item in items:
            if isinstance(item, str):
                self._engine.abort(item)
                continue
            request = item.request
            try:
                self._engine.add(request, self.token_text.stream(request.params))
            except (InvalidRequest, QueueFull) as refusal:
                item.decide(refusal)
            except Exception as problem:
                item.decide(EngineStopped(f"the engine failed: {problem}"))
                raise
            else:
                self._streams[request.request_id] = item
                item.decide(None)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            stream.put(output)

    def _end_all(self, reason: FinishReason) -> None:
        """Give everyone who waits a last word."""
        with self._changed:
            self._stopping = True
            left = [item for item in self._inbox if isinstance(item, OutputStream)]
            self._inbox.clear()
        message = self._failure or "the engine was shut down"
        for stream in left:
            stream.decide(EngineStopped(message))
        for request_id, stream in self._streams.items():
            logprobs = () if stream.request.params.logprobs is not None else None
            stream.put(
                RequestOutput(request_id, logprobs=logprobs, finish_reason=reason, error=message)
            )
        self._streams.clear()
