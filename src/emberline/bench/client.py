"""One request: sent, timed, read. Owns what counts as an answer and the kinds of failure.

Knows one answer at a time; load, sums and definitions of metrics are elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.bench import acceptance
from emberline.bench.acceptance import Acceptance
from emberline.bench.events import WHOLE, count_of, error_message, output_of
from emberline.bench.prompts import Prompt
from emberline.bench.settings import RequestSettings, ServerSettings
from emberline.bench.sse import EventParser
from emberline.bench.wire import Connections, WireError

_ERROR_BYTES = 65_536  # of an error's body that are kept


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an answer does not count.

    `kind` is http_<status>, connect, disconnected, protocol, timeout, error_event (an error inside
    the stream), bad_event (no JSON object), not_a_stream, unfinished (no finish_reason) or
    aborted (the server cut the answer).
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What came of one request. Times are `time.perf_counter()` seconds of this process."""

    index: int
    start: float  # the clock's start: its arrival in an open loop, else when it was sent
    sent: float  # when this program came to send it
    end: float  # the last output or the finish_reason; of a failure, when it was seen
    chunk_times: tuple[float, ...] = ()  # arrival of every chunk that carries output
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    acceptance: Acceptance | None = None
    failure: Failure | None = None
    text: str | None = None  # kept if tokens are to be counted from it


def request_body(
    prompt: Prompt, server: ServerSettings, asked: RequestSettings, model: str
) -> bytes:
    """The JSON of a request; `extra_body` has the last word."""
    body: dict[str, Any] = {
        "model": model,
        **prompt.fields(server.endpoint),
        "max_tokens": prompt.max_tokens or asked.max_tokens,
        "temperature": asked.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if asked.seed is not None:
        body["seed"] = asked.seed
    if asked.ignore_eos:
        body["ignore_eos"] = True
    if asked.logprobs is not None:
        chat = server.endpoint == "chat"
        body["logprobs"] = True if chat else asked.logprobs
        if chat:
            body["top_logprobs"] = asked.logprobs
    return json.dumps({**body, **asked.extra_body}).encode()


class Client:
    """Sends requests to one URL, any number at a time."""

    def __init__(self, server: ServerSettings, *, keep_text: bool = False) -> None:
        self._connections = Connections(server.url, server.request_headers)
        self._timeout = server.timeout
        self._keep_text = keep_text

    async def send(self, body: bytes, index: int = 0, start: float | None = None) -> RequestRecord:
        """Send one request and read its answer to the end. Failures are records too."""
        sent = time.perf_counter()
        answer = _Answer(self._keep_text)
        failure = None
        try:
            async with asyncio.timeout(self._timeout):
                await self._connections.post(body, answer)
        except TimeoutError:
            failure = Failure("timeout", f"no complete answer within {self._timeout:g} s")
        except WireError as problem:
            failure = Failure(problem.kind, str(problem))
        return answer.record(index, sent if start is None else start, sent, failure)

    def close(self) -> None:
        """Close the connections that are kept."""
        self._connections.close()


class _Answer:
    """Collects one answer; a `wire.Receiver`."""

    def __init__(self, keep_text: bool) -> None:
        self._parser = EventParser()
        self._texts: list[str] | None = [] if keep_text else None
        self._status = 0
        self._error_body = b""
        self._is_stream = False
        self._failure: Failure | None = None
        self._chunk_times: list[float] = []
        self._end: float | None = None
        self._finish_reason: str | None = None
        self._whole: dict[str, Any] = {}

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        if self._status != 200 or not self._is_stream:
            self._error_body = (self._error_body + data)[:_ERROR_BYTES]
            return
        for event in self._parser.feed(data):
            if event != b"[DONE]" and self._failure is None:
                self._read_event(event, now)

    def _read_event(self, data: bytes, now: float) -> None:
        try:
            event = json.loads(data)
            problem = error_message(event)
            if problem is not None:
                self._failure = Failure("error_event", problem)
                return
            for name in WHOLE:
                if event.get(name) is not None:
                    self._whole[name] = event[name]
            for choice in event.get("choices") or ():
                self._read_choice(choice, now)
        except (ValueError, AttributeError, TypeError):  # no JSON, or not of a chunk's shape
            shown = data[:200].decode(errors="replace")
            self._failure = Failure("bad_event", f"an event that is no chunk: {shown}")

    def _read_choice(self, choice: Mapping[str, Any], now: float) -> None:
        text = output_of(choice)
        if text is not None:
            self._chunk_times.append(now)
            self._end = now
            if self._texts is not None:
                self._texts.append(text)
        if choice.get("finish_reason"):
            self._finish_reason = str(choice["finish_reason"])
            self._end = now
        if choice.get("meta_info"):
            self._whole["meta_info"] = choice["meta_info"]

    def record(
        self, index: int, start: float, sent: float, failure: Failure | None
    ) -> RequestRecord:
        """What is known once nothing more comes; `failure` is the connection's, if any."""
        failure = self._failure or failure or self._shortcoming()
        usage = self._whole.get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        now = time.perf_counter()
        return RequestRecord(
            index=index,
            start=start,
            sent=sent,
            end=now if failure or self._end is None else self._end,
            chunk_times=tuple(self._chunk_times),
            prompt_tokens=count_of(usage, "prompt_tokens"),
            completion_tokens=count_of(usage, "completion_tokens"),
            cached_tokens=count_of(details, "cached_tokens"),
            finish_reason=self._finish_reason,
            acceptance=acceptance.from_answer(self._whole),
            failure=failure,
            text=None if self._texts is None else "".join(self._texts),
        )

    def _shortcoming(self) -> Failure | None:
        """What a complete HTTP answer lacks to be an answer."""
        if self._status != 200:
            return Failure(f"http_{self._status}", self._error_text())
        if not self._is_stream:
            return Failure("not_a_stream", f"200 without an event stream: {self._error_text()}")
        if self._finish_reason is None:
            return Failure("unfinished", "the stream ended without a finish_reason")
        if self._finish_reason == "abort":
            return Failure("aborted", "the server ended the request before its answer was whole")
        return None

    def _error_text(self) -> str:
        text = self._error_body.decode(errors="replace")
        try:
            found = error_message(json.loads(text))
        except ValueError:
            found = None
        return " ".join((found or text)[:500].split()) or "(empty body)"
