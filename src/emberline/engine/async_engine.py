"""An engine in a thread of this process, one mailbox a request: how asyncio code talks to it.

Owns the thread and who gets which output. Must not know HTTP, text formats or tensors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from emberline.engine.detokenizer import TokenText
from emberline.engine.engine_loop import Arrival, CacheClearing, EngineLoop, Item, SteppingEngine
from emberline.engine.grammar import Compiled
from emberline.engine.output_stream import OutputStream, deliver, last_word, output_stream
from emberline.engine.running_engine import Errand, RunningEngine
from emberline.types import EngineSnapshot, FinishReason, Grammar, Request, RequestOutput


class AsyncEngine(RunningEngine):
    """An engine that a thread of this object's steps.

    Args:
        engine: stepped by that thread and by nobody else from now on.
        token_text: text of its tokenizer.
        stall_timeout: seconds after which a step that has not come back makes `health` bad.
    """

    def __init__(
        self, engine: SteppingEngine, token_text: TokenText, *, stall_timeout: float = 300.0
    ) -> None:
        super().__init__(stall_timeout=stall_timeout)
        self.token_text = token_text
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.max_request_tokens = engine.max_request_tokens
        self.max_draft_tokens = engine.max_draft_tokens
        self.max_queue = engine.config.scheduler.max_queue
        self.info = dict(engine.info)
        self._engine = engine
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="emberline-grammar")
        self._streams: dict[str, OutputStream[RequestOutput]] = {}  # of the engine's thread alone
        self._loop = EngineLoop(engine, token_text, self._deliver)
        self._thread = threading.Thread(target=self._run, name="emberline-engine", daemon=True)
        self._thread.start()

    async def submit_all(self, requests: Sequence[Request]) -> list[OutputStream[RequestOutput]]:
        """See `RunningEngine`."""
        grammars = {request.params.grammar for request in requests} - {None}
        compiled = {grammar: await self._compiled(grammar) for grammar in grammars if grammar}
        bell = asyncio.Event()
        streams = [output_stream(request, self.abort, bell) for request in requests]
        errand = Errand()

        def decide(refusal: Exception | None) -> None:
            if refusal is None:
                self._streams |= {stream.request.request_id: stream for stream in streams}
            errand.decide(refusal)

        self._send(Arrival(requests, compiled, decide))
        await errand.admitted(streams)
        return streams

    async def compile(self, grammar: Grammar) -> None:
        """See `RunningEngine`."""
        await self._compiled(grammar)

    def abort(self, request_id: str) -> None:
        """See `RunningEngine`."""
        self._loop.send(request_id)

    async def clear_prefix_cache(self) -> None:
        """See `RunningEngine`."""
        errand = Errand()
        self._send(CacheClearing(errand.decide))
        await errand.decided()

    def snapshot(self) -> EngineSnapshot:
        """See `RunningEngine`."""
        return self._loop.snapshot()

    def shutdown(self, timeout: float | None = 30.0) -> None:
        """See `RunningEngine`: returns when the thread has ended, or the time is over."""
        self._stopping = True
        self._loop.stop()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def seconds_in_step(self) -> float:
        """See `RunningEngine`."""
        return self._loop.seconds_in_step()

    async def _compiled(self, grammar: Grammar) -> Compiled:
        known = self._engine.known_grammar(grammar)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self._engine.compile, grammar)

    def _send(self, item: Item) -> None:
        self.check_open()
        self._loop.send(item)

    # The engine's thread.

    def _run(self) -> None:
        self._loop.run()
        self._failure, self._stopping = self._loop.failure, True
        reason = FinishReason.ABORT if self._failure is None else FinishReason.ERROR
        message = self._failure or "the engine was shut down"
        deliver([(one, last_word(one.request, reason, message)) for one in self._streams.values()])
        self._streams.clear()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        found = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            found.append((stream, output))
        deliver(found)
