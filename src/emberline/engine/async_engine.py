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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from emberline.config import EngineConfig
from emberline.engine.detokenizer import TextStream, TokenText
from emberline.engine.grammar import Compiled
from emberline.engine.output_stream import OutputStream
from emberline.types import (
    EngineSnapshot,
    FinishReason,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
)

logger = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine takes no more requests: a step failed, or it was shut down."""


class ShuttingDown(EngineStopped):
    """The engine takes no new requests because its process is about to end."""

    def __init__(self) -> None:
        super().__init__("shutting down: no new requests are taken")


class SteppingEngine(Protocol):
    """What the thread needs of an engine."""

    vocab_size: int
    max_model_len: int
    max_draft_tokens: int
    config: EngineConfig
    info: dict[str, object]

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def compile(self, grammar: Grammar) -> Compiled:
        """A grammar, compiled now or before, from any thread; `InvalidRequest` if it is none."""
        ...

    def known_grammar(self, grammar: Grammar) -> Compiled | None:
        """A grammar that is compiled already, from any thread."""
        ...

    def add(
        self, request: Request, text: TextStream | None = None, compiled: Compiled | None = None
    ) -> None:
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

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be answered, and why not."""

    ok: bool
    reason: str | None = None


class _Errand:
    """Something for the engine's thread to do between two steps, and who waits to hear of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._decided: asyncio.Future[None] = self._loop.create_future()

    async def decided(self) -> None:
        """Wait until the engine has done it, or raise its refusal."""
        await self._decided

    def decide(self, refusal: Exception | None) -> None:
        """Tell the caller, from the engine's thread, whether it was done."""
        # The caller's loop may be closed already; then nobody is waiting.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, refusal)

    def _settle(self, refusal: Exception | None) -> None:
        if self._decided.done():  # cancelled
            return
        if refusal is None:
            self._decided.set_result(None)
        else:
            self._decided.set_exception(refusal)


class _Arrival(_Errand):
    """Requests of one call, admitted together or not at all."""

    def __init__(
        self, streams: Sequence[OutputStream], compiled: Mapping[Grammar, Compiled]
    ) -> None:
        super().__init__()
        self.streams = streams
        self._compiled = compiled

    def grammar_of(self, request: Request) -> Compiled | None:
        """What binds one of the requests."""
        grammar = request.params.grammar
        return None if grammar is None else self._compiled[grammar]


class _CacheClearing(_Errand):
    """The prefix cache is to be emptied."""


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
        self.max_draft_tokens = engine.max_draft_tokens
        self.max_queue = engine.config.scheduler.max_queue
        self.info = dict(engine.info)
        self._engine = engine
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="emberline-grammar")
        self._stall_timeout = stall_timeout
        self._changed = threading.Condition()
        self._inbox: deque[_Errand | str] = deque()  # requests to add, ids to abort
        self._streams: dict[str, OutputStream] = {}
        self._draining = False
        self._stopping = False
        self._failure: str | None = None
        self._step_began: float | None = None
        self._snapshot = engine.snapshot()
        self._thread = threading.Thread(target=self._run, name="emberline-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> OutputStream:
        """Hand a request to the engine: `submit_all` of one."""
        [stream] = await self.submit_all([request])
        return stream

    async def submit_all(self, requests: Sequence[Request]) -> list[OutputStream]:
        """Hand requests to the engine, all or none; returns when they have been admitted.

        They are added between two steps, so that whether they fit the queue does not depend on
        what runs meanwhile. The caller must iterate every stream to its end or `aclose` it.

        Raises:
            InvalidRequest: one of them can never run.
            QueueFull: too many wait already.
            EngineStopped: the engine takes no more requests.
        """
        grammars = {request.params.grammar for request in requests} - {None}
        compiled = {grammar: await self.compile(grammar) for grammar in grammars if grammar}
        streams = [OutputStream(request, self.abort) for request in requests]
        arrival = _Arrival(streams, compiled)
        self._send(arrival)
        try:
            await arrival.decided()
        except asyncio.CancelledError:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def compile(self, grammar: Grammar) -> Compiled:
        """A grammar, compiled now or before; big ones one at a time, in a thread of their own.

        Raises:
            InvalidRequest: it does not compile; the message quotes the compiler.
        """
        known = self._engine.known_grammar(grammar)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self._engine.compile, grammar)

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
        self._send(request_id)

    async def clear_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds; returns when it is done.

        Raises:
            EngineStopped: the engine does nothing any more.
        """
        clearing = _CacheClearing()
        self._send(clearing)
        await clearing.decided()

    def health(self) -> Health:
        """Whether the thread lives and its step comes back in time."""
        if self._failure is not None:
            return Health(False, self._failure)
        if self._stopping or self._draining:
            return Health(False, str(ShuttingDown()))
        began = self._step_began
        if began is not None and time.monotonic() - began > self._stall_timeout:
            return Health(False, f"a step has been running for over {self._stall_timeout:g} s")
        return Health(True)

    def snapshot(self) -> EngineSnapshot:
        """The engine's counters as of its latest step."""
        with self._changed:
            arrivals = [item for item in self._inbox if isinstance(item, _Arrival)]
        arriving = sum(len(arrival.streams) for arrival in arrivals)
        return replace(self._snapshot, num_waiting=self._snapshot.num_waiting + arriving)

    def check_open(self) -> None:
        """Raise `EngineStopped` unless new requests are taken."""
        if self._failure is not None:
            raise EngineStopped(self._failure)
        if self._stopping or self._draining:
            raise ShuttingDown

    def drain(self) -> None:
        """Take no new requests; those admitted, waiting ones included, run to their end.

        Only sets a flag, so that a signal handler may call it.
        """
        self._draining = True

    def shutdown(self, timeout: float | None = 30.0) -> None:
        """Stop the thread after its current step; requests in flight end with ABORT."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _send(self, item: _Errand | str) -> None:
        with self._changed:
            if isinstance(item, _Errand):
                self.check_open()
            elif self._stopping:
                return  # everything is ended anyway
            self._inbox.append(item)
            self._changed.notify()

    # The engine's thread.

    def _run(self) -> None:
        ending = FinishReason.ABORT
        try:
            while (items := self._next_items()) is not None:
                self._apply(items)
                self._snapshot = self._engine.snapshot()
                if self._engine.has_work:
                    self._step_began = time.monotonic()
                    outputs = self._engine.step()
                    self._step_began = None
                    self._snapshot = self._engine.snapshot()
                    self._deliver(outputs)
        except Exception as problem:  # whatever a step raises must reach those who wait for it
            logger.exception("the engine failed and takes no more requests")
            ending = FinishReason.ERROR
            with self._changed:
                self._failure = f"the engine failed: {type(problem).__name__}: {problem}"
        self._step_began = None
        self._end_all(ending)

    def _next_items(self) -> list[_Errand | str] | None:
        """What came in since the last step; sleeps while there is nothing to do. None: stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._engine.has_work):
                self._changed.wait()
            if self._stopping:
                return None
            items = list(self._inbox)
            self._inbox.clear()
            return items

    def _apply(self, items: Iterable[_Errand | str]) -> None:
        left = deque(items)
        try:
            while left:
                match left.popleft():
                    case _Arrival() as arrival:
                        self._admit(arrival)
                    case _CacheClearing() as clearing:
                        self._clear(clearing)
                    case str(request_id):
                        self._engine.abort(request_id)
        finally:
            if left:  # the engine failed: who came behind must hear of it, too
                with self._changed:
                    self._inbox.extendleft(reversed(left))

    def _admit(self, arrival: _Arrival) -> None:
        taken: list[str] = []
        try:
            for stream in arrival.streams:
                request = stream.request
                text = self.token_text.stream(request.params)
                self._engine.add(request, text, arrival.grammar_of(request))
                taken.append(request.request_id)
        except (InvalidRequest, QueueFull) as refusal:
            for request_id in taken:
                self._engine.abort(request_id)
            arrival.decide(refusal)
        except Exception as problem:
            arrival.decide(EngineStopped(f"the engine failed: {problem}"))
            raise
        else:
            self._streams |= {stream.request.request_id: stream for stream in arrival.streams}
            arrival.decide(None)

    def _clear(self, clearing: _CacheClearing) -> None:
        try:
            self._engine.clear_prefix_cache()
        except Exception as problem:
            clearing.decide(EngineStopped(f"the engine failed: {problem}"))
            raise
        clearing.decide(None)

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
            left = [item for item in self._inbox if isinstance(item, _Errand)]
            self._inbox.clear()
        for errand in left:
            errand.decide(EngineStopped(self._failure) if self._failure else ShuttingDown())
        message = self._failure or "the engine was shut down"
        for request_id, stream in self._streams.items():
            logprobs = () if stream.request.params.logprobs is not None else None
            stream.put(
                RequestOutput(request_id, logprobs=logprobs, finish_reason=reason, error=message)
            )
        self._streams.clear()
