"""What asyncio code sees of an engine that runs by itself, in a thread or in a process of its own.

Owns the interface, who is let in, and how somebody waits for the engine to do a thing. Must not
know HTTP, text formats, tensors, or where the engine runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from emberline.engine.detokenizer import TokenText
from emberline.engine.output_stream import OutputStream
from emberline.types import EngineSnapshot, Grammar, Request, RequestOutput


class EngineStopped(RuntimeError):
    """The engine takes no more requests: a step failed, or it was shut down."""


class ShuttingDown(EngineStopped):
    """The engine takes no new requests because its process is about to end."""

    def __init__(self) -> None:
        super().__init__("shutting down: no new requests are taken")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be answered, and why not."""

    ok: bool
    reason: str | None = None


class RunningEngine(ABC):
    """An engine for asyncio callers, on any number of event loops."""

    token_text: TokenText
    vocab_size: int
    max_model_len: int
    max_request_tokens: int  # prompt and answer: of the context, or what the KV cache holds
    max_draft_tokens: int
    max_queue: int
    info: dict[str, object]

    def __init__(self, *, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._draining = False
        self._stopping = False
        self._failure: str | None = None

    @abstractmethod
    async def submit_all(self, requests: Sequence[Request]) -> list[OutputStream[Any]]:
        """Hand requests to the engine, all or none; returns when they have been admitted.

        They are added between two steps, so that whether they fit the queue does not depend on
        what runs meanwhile. The caller must iterate every stream to its end or `aclose` it.

        Raises:
            InvalidRequest: one of them can never run.
            QueueFull: too many wait already.
            EngineStopped: the engine takes no more requests.
        """

    @abstractmethod
    async def compile(self, grammar: Grammar) -> None:
        """See that a grammar is compiled, now or before; big ones one at a time, beside the steps.

        Raises:
            InvalidRequest: it does not compile; the message quotes the compiler.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request soon. Unknown or finished ids are ignored."""

    @abstractmethod
    async def clear_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds; returns when it is done.

        Raises:
            EngineStopped: the engine does nothing any more.
        """

    @abstractmethod
    def snapshot(self) -> EngineSnapshot:
        """The engine's counters as of its latest step."""

    @abstractmethod
    def shutdown(self, timeout: float | None = 30.0) -> None:
        """Stop after the current step; requests in flight end with ABORT."""

    @abstractmethod
    def seconds_in_step(self) -> float:
        """How long the engine has been at a step that has not come back; 0.0: it is at none."""

    async def submit(self, request: Request) -> OutputStream[Any]:
        """Hand a request to the engine: `submit_all` of one."""
        [stream] = await self.submit_all([request])
        return stream

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of a request, deltas. Closing or cancelling the iterator aborts it."""
        stream = await self.submit(request)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def health(self) -> Health:
        """Whether the engine lives and its step comes back in time."""
        if self._failure is not None:
            return Health(False, self._failure)
        if self._stopping or self._draining:
            return Health(False, str(ShuttingDown()))
        if self.seconds_in_step() > self._stall_timeout:
            return Health(False, f"a step has been running for over {self._stall_timeout:g} s")
        return Health(True)

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


class Errand:
    """Something for the engine to do between two steps, and who waits to hear of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._decided: asyncio.Future[None] = self._loop.create_future()

    async def decided(self) -> None:
        """Wait until the engine has done it, or raise its refusal."""
        await self._decided

    async def admitted(self, streams: Sequence[OutputStream[Any]]) -> None:
        """`decided`, of requests: who stops waiting takes them back."""
        try:
            await self.decided()
        except asyncio.CancelledError:
            for stream in streams:
                await stream.aclose()
            raise

    def decide(self, refusal: Exception | None) -> None:
        """Tell the caller, from any thread, whether it was done."""
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
