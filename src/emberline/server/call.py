"""One call of either endpoint: its choices' requests, and the frame round what they answer.

Owns what is the same for completions and chat: chunks, endings, usage, the extension object. The
shape of a choice comes from a `ChoiceFormat`. One format serves streamed and whole answers, so that
they agree.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastapi import Request as HttpRequest
from fastapi import Response

from emberline.engine.output_stream import merge_outputs, num_records
from emberline.server.protocol import StreamOptions
from emberline.server.records import Json, Ledger
from emberline.server.request_metrics import request_metrics
from emberline.server.service import Service
from emberline.server.stream import (
    DONE,
    Answer,
    ClientGone,
    EventStream,
    Outputs,
    collect,
    dump_json,
    dump_long_json,
    sse,
)
from emberline.server.turns import LONG_WORK, off_loop
from emberline.types import FinishReason, InvalidRequest, Request, RequestOutput


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What a choice has turned out to be so far."""

    num_reasoning: int = 0  # tokens of reasoning
    num_calls: int = 0  # of tools


class ChoiceFormat(Protocol):
    """Writes the outputs of one choice, in order."""

    @property
    def facts(self) -> AnswerFacts:
        """What has been told of the outputs written so far."""
        ...

    def whole(self, output: RequestOutput) -> Json:
        """The choice of an answer that is not streamed."""
        ...

    def deltas(self, output: RequestOutput) -> list[Json]:
        """The choices of the chunks that say what `output` adds; none if nothing can be said."""
        ...

    def end(self) -> Json:
        """The choice of the last chunk, which carries the finish reason."""
        ...

    def root(self, output: RequestOutput) -> Json:
        """What the answer says outside its choices, from the first output."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """What every chunk or answer of a call begins with."""

    id: str
    whole: str  # the `object` of an answer
    chunk: str  # and of a chunk
    per_prompt: int  # choices a prompt


class Call:
    """The requests of one call and the formats of their choices, index by index."""

    def __init__(
        self,
        service: Service,
        frame: Frame,
        requests: Sequence[Request],
        formats: Sequence[ChoiceFormat],
        stream_options: StreamOptions | None,
        *,
        metrics: bool = False,  # of its only request, at the answer's root
        in_words: Callable[[InvalidRequest], InvalidRequest] = lambda problem: problem,
    ) -> None:
        self._requests, self._formats, self._frame = requests, formats, frame
        self._options = stream_options or StreamOptions()
        self._ledger = Ledger(len(requests), frame.per_prompt)
        self._times = service.metrics.call(len(requests))
        self._open = service.opener(requests, self._times)
        self._num_spec_tokens = service.engine.max_draft_tokens
        self._with_metrics = metrics
        self._in_words = in_words  # a refusal by the names of the call's body
        self._root_sent = False
        self._head: Json = {
            "id": frame.id,
            "object": frame.chunk,
            "created": int(time.time()),
            "model": service.name,
        }

    def stream(self) -> Response:
        """The answer as server-sent events."""
        return EventStream(self._open, self._events, self._in_words)

    async def answer(self, http: HttpRequest) -> Response:
        """The answer at once; nothing if the client hangs up."""
        try:
            parts = await collect(self._open(http.receive), len(self._requests))
        except ClientGone:
            return Response(status_code=499)
        except InvalidRequest as problem:
            raise self._in_words(problem) from None
        merged = [merge_outputs(outputs) for outputs in parts]
        return await off_loop(sum(map(num_records, merged)), partial(self._whole, merged))

    def _whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        """The answer that is not streamed, from the whole output of every choice."""
        choices = []
        for index, output in enumerate(outputs):
            form = self._formats[index]
            choice = form.whole(output)
            self._ledger.note(index, output, form.facts.num_reasoning)
            choices.append(choice | _ending(output, form.facts))
        return Answer(
            self._head
            | {"object": self._frame.whole, "choices": choices, "usage": self._ledger.usage()}
            | self._formats[0].root(outputs[0])
            | self._extensions()
        )

    async def _events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The chunks of every output together, with one for the usage behind the last if asked."""
        async for index, output in outputs:
            events = await off_loop(num_records(output), partial(self._write, index, output))
            if events:
                yield events

    def _write(self, index: int, output: RequestOutput) -> bytes:
        dump = dump_json if num_records(output) <= LONG_WORK else dump_long_json
        events = b"".join([sse(dump(chunk)) for chunk in self._chunks(index, output)])
        if not self._ledger.finished:
            return events
        if self._options.include_usage:
            usage = {"usage": self._ledger.usage()}
            events += sse(dump_json(self._chunk([]) | usage | self._extensions()))
        return events + DONE

    def _chunks(self, index: int, output: RequestOutput) -> Iterator[Json]:
        """A chunk for each thing that an output says, one for its ending."""
        form = self._formats[index]
        root = {} if index or self._root_sent else form.root(output)
        deltas = form.deltas(output)
        self._ledger.note(index, output, form.facts.num_reasoning)
        for choice in deltas:
            yield self._chunk([choice | {"finish_reason": None}]) | root
            root, self._root_sent = {}, self._root_sent or index == 0
        if output.finished:
            last = self._ledger.finished and not self._options.include_usage
            tail = self._extensions() if last else {}
            yield self._chunk([form.end() | _ending(output, form.facts)]) | root | tail

    def _extensions(self) -> Json:
        """What the end of an answer says beyond OpenAI's shape."""
        own: Json = {"emberline": self._ledger.extension()}
        if not self._with_metrics:
            return own
        times, latest = self._times.times(0), self._ledger.latest(0)
        return own | {"metrics": request_metrics(times, latest, self._num_spec_tokens)}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head | {"choices": choices}
        if self._options.continuous_usage_stats:
            return chunk | {"usage": self._ledger.usage()}
        return chunk | ({"usage": None} if self._options.include_usage else {})


def _ending(output: RequestOutput, facts: AnswerFacts) -> Json:
    called = facts.num_calls and output.finish_reason is FinishReason.STOP
    return {
        "finish_reason": "tool_calls" if called else output.finish_reason,
        "stop_reason": output.stop_reason,
    }
