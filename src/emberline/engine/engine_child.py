"""The process that an engine has for itself: it is built here, stepped, and ends with its caller.

Owns the life of that process and the answers to what it is told. Must not know HTTP, or how the
engine is built: a call that is sent to it does that.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from emberline.engine import messages
from emberline.engine.channel import Channel
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine_loop import Arrival, CacheClearing, EngineLoop, SteppingEngine
from emberline.engine.running_engine import EngineStopped
from emberline.types import Grammar, InvalidRequest, RequestOutput

logger = logging.getLogger(__name__)

LAST_STEP_SECONDS = 10.0
"""How long the current step may go on once the caller's process is gone."""


class Made(Protocol):
    """An engine with its tokenizer's text."""

    @property
    def engine(self) -> SteppingEngine:
        """The engine."""
        ...

    @property
    def token_text(self) -> TokenText:
        """Text of its tokenizer."""
        ...


TellFound = Callable[[Path, str], None]
"""Told the folder and the name of the model, before the engine is built."""
Make = Callable[[TellFound], Made]
"""Builds the engine; it can be pickled. `ModelError` and `InvalidRequest` reach the caller."""


def main() -> None:
    """The process, its end of the channel being the file descriptor in its first argument."""
    # Signals are for the caller, which says when to end; a terminal sends them to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    batches = channel.batches()
    first = messages.to_engine.decode(next(batches, [b""])[0])
    if not isinstance(first, messages.Start):
        raise TypeError(f"the first message is {type(first).__name__}, not Start")
    sys.exit(_Child(channel, batches).run(first))


class _Child:
    """The engine and what is asked of it."""

    def __init__(self, channel: Channel, batches: Iterator[list[bytes]]) -> None:
        self._channel, self._batches = channel, batches
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="emberline-grammar")
        self._writers: dict[str, messages.DeltaWriter] = {}  # touched by the engine's thread alone
        self._engine: SteppingEngine
        self._loop: EngineLoop | None = None

    def run(self, start: messages.Start) -> int:
        """Build the engine and step it; the exit code."""
        threading.Thread(target=self._listen, name="emberline-listener", daemon=True).start()
        sys.path[:] = start.path
        make: Make = pickle.loads(start.make)
        try:
            made = make(lambda folder, name: self._post(messages.Found(str(folder), name)))
        except InvalidRequest as problem:
            return self._unusable(messages.Unusable(str(problem), problem.param, is_request=True))
        except Exception as problem:
            from emberline.models.weights import ModelError  # PyTorch comes with it

            if isinstance(problem, ModelError):
                return self._unusable(messages.Unusable(str(problem)))
            raise
        self._engine = engine = made.engine
        loop = self._loop = EngineLoop(engine, made.token_text, self._publish)
        # What is there now stays: the collector need not walk through it between two steps.
        gc.collect()
        gc.freeze()
        self._post(
            messages.Ready(
                vocab_size=engine.vocab_size,
                max_model_len=engine.max_model_len,
                max_request_tokens=engine.max_request_tokens,
                max_draft_tokens=engine.max_draft_tokens,
                max_queue=engine.config.scheduler.max_queue,
                info=dict(engine.info),
                snapshot=loop.latest,
            )
        )
        loop.run()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if loop.failure is not None:
            self._post(messages.Failed(loop.failure))
        self._channel.close()
        return 0 if loop.failure is None else 1

    def _unusable(self, message: messages.Unusable) -> int:
        self._post(message)
        self._channel.close()
        return 2

    def _post(self, message: messages.FromEngine) -> None:
        self._channel.post(messages.encode(message))

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        deltas = []
        for output in outputs:
            writer = self._writers.get(output.request_id)
            if writer is None:
                continue  # it was admitted with others that were not, so that none was
            if output.finished:
                del self._writers[output.request_id]
            deltas.append(writer.write(output))
        assert self._loop is not None
        self._post(messages.Step(deltas, self._loop.latest))

    # The listener's thread.

    def _listen(self) -> None:
        try:
            for batch in self._batches:
                for message in batch:
                    self._do(messages.to_engine.decode(message))
        except Exception:
            logger.exception("the engine's process cannot go on: a message could not be read")
        if self._loop is None:  # nobody waits for what is being built
            os._exit(1)
        self._loop.stop()
        time.sleep(LAST_STEP_SECONDS)
        os._exit(1)  # the step does not come back

    def _do(self, message: messages.ToEngine) -> None:
        loop = self._loop
        assert loop is not None
        match message:
            case messages.Submit():
                self._submit(loop, message)
            case messages.Abort():
                loop.send(message.request_id)
            case messages.Compile():
                self._compile(message)
            case messages.ClearCache():
                decide = partial(self._settle_by_engine, message.ticket)
                self._send(loop, CacheClearing(decide))
            case messages.Stop():
                loop.stop()
            case _:
                raise TypeError(f"{type(message).__name__} has no meaning here")

    def _submit(self, loop: EngineLoop, message: messages.Submit) -> None:
        requests = message.requests

        def decide(refusal: Exception | None) -> None:
            if refusal is None:
                for number, request in enumerate(requests, message.first):
                    self._writers[request.request_id] = messages.DeltaWriter(number)
            self._settle_by_engine(message.ticket, refusal)

        grammars = {r.params.grammar for r in requests if r.params.grammar is not None}
        try:  # all of them are known, unless one has been forgotten since it was compiled
            compiled = {grammar: self._engine.compile(grammar) for grammar in grammars}
        except InvalidRequest as problem:
            self._settle(message.ticket, problem)
            return
        self._send(loop, Arrival(requests, compiled, decide))

    def _send(self, loop: EngineLoop, item: Arrival | CacheClearing) -> None:
        try:
            loop.send(item)
        except EngineStopped as problem:
            item.decide(problem)

    def _compile(self, message: messages.Compile) -> None:
        def compile_now(grammar: Grammar) -> None:
            try:
                self._engine.compile(grammar)
            except Exception as problem:
                self._settle(message.ticket, problem)
            else:
                self._settle(message.ticket, None)

        if self._engine.known_grammar(message.grammar) is not None:
            self._settle(message.ticket, None)
        else:
            self._compiling.submit(compile_now, message.grammar)

    def _settle(self, ticket: int, problem: Exception | None) -> None:
        self._post(messages.Settled(ticket, messages.refusal_of(problem)))

    def _settle_by_engine(self, ticket: int, problem: Exception | None) -> None:
        """The same, from the engine's thread, with what has become of the engine."""
        refusal = messages.refusal_of(problem)
        self._post(messages.Settled(ticket, refusal, self._engine.snapshot()))
