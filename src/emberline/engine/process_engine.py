"""An engine in a process of its own, as its callers see it.

Owns the start of that process, who gets which output, and what everybody hears when it dies. Must
not know HTTP, or how the engine is built. Nothing of the engine is loaded into this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from emberline.engine import messages
from emberline.engine.channel import Channel
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine_child import Make
from emberline.engine.output_stream import OutputStream, deliver
from emberline.engine.running_engine import EngineStopped, Errand, RunningEngine, ShuttingDown
from emberline.types import EngineSnapshot, FinishReason, Grammar, InvalidRequest, Request

logger = logging.getLogger(__name__)

_COMMAND = "from emberline.engine.engine_child import main; main()"
_DYING_SECONDS = 5.0  # from the end of what a process says to its own

DeltaStream = OutputStream[messages.Delta]
AnyMessage = TypeVar("AnyMessage", bound=messages.FromEngine)


class StartingEngine:
    """An engine's process while it starts. An error within its `with` block ends it at once.

    Args:
        make: builds the engine there; it can be pickled.
    """

    def __init__(self, make: Make) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._channel = Channel(ours)
        self._batches = self._channel.batches()
        self._unread: Iterator[bytes] = itertools.chain.from_iterable(self._batches)
        self._channel.post(messages.encode(messages.Start(sys.path, pickle.dumps(make))))

    def __enter__(self) -> StartingEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def found(self) -> tuple[Path, str]:
        """Wait for the folder and the name of the model; the engine is still being built then.

        Raises:
            ModelError: a file is missing or foreign, or the process has ended.
        """
        message = self._wait_for(messages.Found)
        return Path(message.folder), message.name

    def ready(self, token_text: TokenText, *, stall_timeout: float = 300.0) -> ProcessEngine:
        """Wait until the engine is built.

        Args:
            token_text: text of its tokenizer.
            stall_timeout: seconds without a step's outcome after which `health` is bad.

        Raises:
            ModelError, InvalidRequest: it cannot be built, or the process has ended.
        """
        about = self._wait_for(messages.Ready)
        return ProcessEngine(
            self._process,
            self._channel,
            self._batches,
            about,
            token_text,
            stall_timeout=stall_timeout,
        )

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._channel.release()

    def _wait_for(self, kind: type[AnyMessage]) -> AnyMessage:
        # PyTorch comes with it, which takes as long to load here as there.
        from emberline.models.weights import ModelError

        for encoded in self._unread:
            message = messages.from_engine.decode(encoded)
            if isinstance(message, kind):
                return message
            if isinstance(message, messages.Unusable):
                if message.is_request:
                    raise InvalidRequest(message.message, message.param)
                raise ModelError(message.message)
        fate = _fate(self._process.wait())
        raise ModelError(f"the engine's process ended before the engine was built: {fate}")


class ProcessEngine(RunningEngine):
    """The engine of another process. Made by `StartingEngine.ready`.

    Args:
        process: where the engine is.
        channel: to it.
        batches: what comes from it.
        about: what it said when it was built.
        token_text: text of its tokenizer.
        stall_timeout: seconds without a step's outcome after which `health` is bad.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel,
        batches: Iterator[list[bytes]],
        about: messages.Ready,
        token_text: TokenText,
        *,
        stall_timeout: float,
    ) -> None:
        super().__init__(stall_timeout=stall_timeout)
        self.token_text = token_text
        self.vocab_size = about.vocab_size
        self.max_model_len = about.max_model_len
        self.max_request_tokens = about.max_request_tokens
        self.max_draft_tokens = about.max_draft_tokens
        self.max_queue = about.max_queue
        self.info = about.info
        self.pid = process.pid
        self._process, self._channel, self._batches = process, channel, batches
        self._snapshot = about.snapshot
        self._lock = threading.Lock()  # of what is under way, against the end of it all
        self._ended = False
        self._tickets, self._next_number = itertools.count(), 0
        self._errands: dict[int, tuple[Errand, range]] = {}  # by ticket; with the streams of it
        self._streams: dict[int, DeltaStream] = {}  # by number
        self._heard = time.monotonic()  # when the engine last said something, or had nothing to do
        self._reader = threading.Thread(target=self._read, name="emberline-reader", daemon=True)
        self._reader.start()

    async def submit_all(self, requests: Sequence[Request]) -> list[OutputStream[messages.Delta]]:
        """See `RunningEngine`."""
        for grammar in {request.params.grammar for request in requests}:
            if grammar is not None:
                await self.compile(grammar)
        bell = asyncio.Event()
        streams = [self._stream(request, bell) for request in requests]
        errand, ticket = Errand(), next(self._tickets)
        with self._lock:
            self.check_open()
            self._check_alive()
            first, self._next_number = self._next_number, self._next_number + len(requests)
            numbers = range(first, self._next_number)
            if not self._streams:  # until now it had nothing to say
                self._heard = time.monotonic()
            self._streams.update(zip(numbers, streams, strict=True))
            self._errands[ticket] = errand, numbers
            self._post(messages.Submit(ticket, first, list(requests)))
        await errand.admitted(streams)
        return streams

    async def compile(self, grammar: Grammar) -> None:
        """See `RunningEngine`."""
        errand, ticket = Errand(), next(self._tickets)
        with self._lock:
            self._check_alive()
            self._errands[ticket] = errand, range(0)
            self._post(messages.Compile(ticket, grammar))
        await errand.decided()

    def abort(self, request_id: str) -> None:
        """See `RunningEngine`."""
        self._post(messages.Abort(request_id))

    async def clear_prefix_cache(self) -> None:
        """See `RunningEngine`."""
        errand, ticket = Errand(), next(self._tickets)
        with self._lock:
            self.check_open()
            self._check_alive()
            self._errands[ticket] = errand, range(0)
            self._post(messages.ClearCache(ticket))
        await errand.decided()

    def snapshot(self) -> EngineSnapshot:
        """See `RunningEngine`: what has been handed over and is not there yet is waiting."""
        with self._lock:
            arriving = sum(len(numbers) for _, numbers in self._errands.values())
        return replace(self._snapshot, num_waiting=self._snapshot.num_waiting + arriving)

    def shutdown(self, timeout: float | None = 30.0) -> None:
        """See `RunningEngine`: returns when the process has ended; it is killed at the timeout."""
        self._stopping = True
        self._post(messages.Stop())
        self._reader.join(timeout)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join(_DYING_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def seconds_in_step(self) -> float:
        """See `RunningEngine`: since it was last heard of while it has something to do."""
        return time.monotonic() - self._heard if self._streams else 0.0

    def _stream(self, request: Request, bell: asyncio.Event) -> DeltaStream:
        reader = messages.DeltaReader(request.request_id)
        return OutputStream(request, self.abort, bell, messages.merge_deltas, reader.read)

    def _check_alive(self) -> None:
        if self._ended:
            raise EngineStopped(self._failure) if self._failure else ShuttingDown

    def _post(self, message: messages.ToEngine) -> None:
        self._channel.post(messages.encode(message))

    # The reader's thread.

    def _read(self) -> None:
        try:
            for batch in self._batches:
                self._heard = time.monotonic()
                self._take([messages.from_engine.decode(message) for message in batch])
        except Exception as problem:
            logger.exception("what the engine's process says cannot be read")
            self._failure = f"the engine's process cannot be understood: {problem}"
            self._process.kill()
        self._end()

    def _take(self, batch: Sequence[messages.FromEngine]) -> None:
        """Hand out what came together, each event loop being woken once for all of it."""
        parts: list[tuple[DeltaStream, messages.Delta]] = []
        for message in batch:
            match message:
                case messages.Step():
                    self._snapshot = message.snapshot
                    for delta in message.deltas:
                        parts.append((self._streams[delta.number], delta))
                        if delta.finish_reason is not None:
                            del self._streams[delta.number]
                case messages.Settled():
                    self._settle(message)
                case messages.Failed():
                    self._failure = message.message
        deliver(parts)

    def _settle(self, message: messages.Settled) -> None:
        if message.snapshot is not None:
            self._snapshot = message.snapshot
        with self._lock:
            errand, numbers = self._errands.pop(message.ticket)
        if message.refusal is not None:
            for number in numbers:
                del self._streams[number]
        errand.decide(messages.problem_of(message.refusal))

    def _end(self) -> None:
        """The process has nothing more to say: so does this to everybody who waits."""
        if self._failure is None and not self._stopping:
            self._failure = f"the engine's process died: {_fate(self._exit_code())}"
            logger.error("%s; no more requests are taken", self._failure)
        with self._lock:
            self._ended = True
            errands, streams = list(self._errands.values()), dict(self._streams)
            self._errands.clear()
            self._streams.clear()
        self._snapshot = replace(self._snapshot, num_running=0, num_waiting=0, kv_usage=0.0)
        failure = self._failure
        for errand, _ in errands:
            errand.decide(ShuttingDown() if failure is None else EngineStopped(failure))
        reason = FinishReason.ABORT if failure is None else FinishReason.ERROR
        admitted = {n: s for n, s in streams.items() if all(n not in of for _, of in errands)}
        message = failure or "the engine was shut down"
        deliver(
            [
                (stream, _last_delta(number, stream.request, reason, message))
                for number, stream in admitted.items()
            ]
        )
        self._exit_code()
        self._channel.release()

    def _exit_code(self) -> int:
        """Of the process, which must be about to end."""
        try:
            return self._process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _last_delta(
    number: int, request: Request, reason: FinishReason, message: str
) -> messages.Delta:
    """What ends a request that the engine can say nothing more of."""
    records = () if request.params.logprobs is not None else None
    return messages.Delta(
        number, (), "", 0, [], records=records, finish_reason=reason, error=message
    )


def _fate(code: int) -> str:
    """What an exit code says."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", as for want of memory" if name == "SIGKILL" else "")
