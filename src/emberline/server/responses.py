"""`POST /v1/responses`, and what is kept of them: fetched, continued, deleted by id.

Owns the life of one response. The shapes are in `responses_shape`, `responses_output` and
`responses_events`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from itertools import chain

from fastapi import Request as HttpRequest
from fastapi import Response
from starlette.datastructures import QueryParams
from starlette.types import Receive

from emberline.engine.output_stream import merge_outputs, num_records
from emberline.server.answer_parts import AnswerReader
from emberline.server.conversation import plan
from emberline.server.errors import ApiError, api_error
from emberline.server.records import Json, Ledger, RecordFormat
from emberline.server.request_metrics import request_metrics
from emberline.server.responses_body import LOGPROBS, ResponsesBody, renamed
from emberline.server.responses_events import ResponseBuilder
from emberline.server.responses_items import (
    Item,
    MessageItem,
    as_input,
    check_results,
    to_messages,
)
from emberline.server.responses_output import fresh_id
from emberline.server.responses_reading import ItemReader
from emberline.server.responses_shape import ending, failure, response_head, usage_json
from emberline.server.responses_store import StoredResponse
from emberline.server.service import Service
from emberline.server.stream import (
    Answer,
    ClientGone,
    EventStream,
    Outputs,
    collect,
    dump_json,
    dump_long_json,
    sse,
)
from emberline.server.turns import off_loop
from emberline.types import InvalidRequest, Request, RequestOutput

_DEPTH = 6  # response, output, item, content, part, logprobs: as `stream` counts levels


async def create_response(service: Service, http: HttpRequest) -> Response:
    """Answer one call, at once or as a stream of named events."""
    body = await service.read(ResponsesBody, http)
    try:
        call = await _ResponseCall.of(service, body)
    except InvalidRequest as problem:
        raise renamed(problem) from None
    if body.stream:
        return EventStream(call.outputs, call.events)
    return await call.answer(http)


def get_response(service: Service, response_id: str, query: QueryParams) -> Response:
    """A response that is kept, as it was answered."""
    kept = _kept(service, response_id)
    for name, value in query.multi_items():
        if name not in ("include", "include[]"):
            raise ApiError(
                400,
                f"{name} is not supported by this server: leave it out",
                param=name,
                code="unsupported_parameter",
            )
        if value != LOGPROBS or not kept.has_logprobs:
            why = "the response was created without" if value == LOGPROBS else "is not supported"
            raise InvalidRequest(f"include: {value!r}: {why}", "include")
    return Response(kept.body, media_type="application/json")


def delete_response(service: Service, response_id: str) -> Response:
    """Forget a response that is kept."""
    service.responses.delete(_kept(service, response_id).id)
    return Answer({"id": response_id, "object": "response", "deleted": True})


def _kept(service: Service, response_id: str) -> StoredResponse:
    kept = service.responses.get(response_id)
    if kept is None:
        raise ApiError(
            404,
            f"no response {response_id!r} is kept here: it was created with store: false, "
            f"deleted, or had to make room",
            param="response_id",
            code="response_not_found",
        )
    return kept


def _earlier(service: Service, response_id: str | None) -> tuple[Item, ...]:
    """The conversation that a call goes on with."""
    if response_id is None:
        return ()
    kept = service.responses.get(response_id)
    if kept is None:
        raise ApiError(
            400,
            f"previous_response_id: no response {response_id!r} is kept here: send its "
            f"conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return kept.items


class _ResponseCall:
    """One response on its way: its request, and what its outputs become."""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        request: Request,
        items: tuple[Item, ...],
        reader: AnswerReader | None,
    ) -> None:
        self._service, self._body, self._items = service, body, items
        self._times = service.metrics.call(1)
        self._open = service.opener([request], self._times)
        self._ledger = Ledger(1, 1)
        self._form = RecordFormat(
            service.engine.token_text,
            request.params,
            as_ids=body.return_tokens_as_token_ids,
            with_ids=body.return_token_ids,
        )
        self._id = request.request_id
        head = response_head(body, self._id, int(time.time()), service.name)
        self._builder = ResponseBuilder(head, self._form if body.wants_logprobs else None)
        self._asked: Json = {}  # what only extensions show, as it comes
        if body.return_token_ids:
            self._asked |= {"prompt_token_ids": list(request.prompt_token_ids), "token_ids": []}
        self._reader = ItemReader(reader)
        self._num_records = 0

    @classmethod
    async def of(cls, service: Service, body: ResponsesBody) -> _ResponseCall:
        """The call that a body asks for.

        Raises:
            InvalidRequest, ApiError: it can never be answered.
        """
        earlier = _earlier(service, body.previous_response_id)
        check_results(earlier, body.items)
        items = (*earlier, *body.items)
        params = await service.params(body, width="top_logprobs")
        timeout = service.timeout(body.timeout)
        if not items:
            raise InvalidRequest("the input is empty: give a text or items", "input")
        said = items
        if body.instructions is not None:
            said = (MessageItem(role="system", content=body.instructions), *items)
        asked = body.conversation(to_messages(said), service.encoder.named_tokens)
        planned = await plan(service, asked, params)
        request = Request(
            fresh_id("resp"),
            planned.prompt.token_ids,
            planned.params,
            priority=body.priority,
            timeout=timeout,
        )
        return cls(service, body, request, items, planned.reader(service.engine.token_text))

    async def outputs(self, receive: Receive) -> Outputs:
        """The request's outputs; refusals speak the language of this API."""
        async with aclosing(self._open(receive)) as outputs:
            try:
                async for pair in outputs:
                    yield pair
            except InvalidRequest as problem:
                raise renamed(problem) from None

    async def answer(self, http: HttpRequest) -> Response:
        """The answer at once; nothing if the client hangs up."""
        try:
            [parts] = await collect(self.outputs(http.receive), 1)
        except ClientGone:
            return Response(status_code=499)
        output = merge_outputs(parts)
        content = await off_loop(num_records(output), partial(self._whole, output))
        return Response(content, media_type="application/json")

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The events of the answer, ready to be sent."""
        begun = False
        try:
            async for _, output in outputs:
                self._num_records += num_records(output)
                size = self._num_records if output.finished else num_records(output)
                events = (
                    self._told(output)
                    if begun
                    else chain(self._builder.begin(), self._told(output))
                )
                begun = True
                while (event := await off_loop(size, partial(next, events, None))) is not None:
                    yield await off_loop(size, partial(_framed, event))
                if output.finished:
                    yield await off_loop(size, partial(self._last, output))
        except (ClientGone, OSError):
            raise
        except Exception as problem:
            if not begun:
                raise  # an ordinary error answer is still possible
            yield _framed(self._builder.last("failed", **failure(api_error(problem).message)))

    def _told(self, output: RequestOutput) -> Iterator[Json]:
        """The events about what an output says."""
        self._ledger.note(0, output)
        self._note_asked(output)
        yield from self._builder.add(self._reader.read(output))
        if output.finished:
            yield from self._builder.end(ending(output, 0)[0])

    def _whole(self, output: RequestOutput) -> bytes:
        """The response that is not streamed, from its whole output."""
        for _ in self._told(output):
            pass
        status, fields = self._ending(output)
        return self._written(self._builder.response(status, **fields))

    def _last(self, output: RequestOutput) -> bytes:
        """The event that ends the response."""
        status, fields = self._ending(output)
        event = self._builder.last(status, **fields)
        content = self._written(event.pop("response"))
        return sse(dump_json(event)[:-1] + b',"response":' + content + b"}", event["type"])

    def _ending(self, output: RequestOutput) -> tuple[str, Json]:
        """The status at the end, and what the response says then besides its items."""
        status, fields = ending(output, int(time.time()))
        usage = usage_json(self._ledger.usage(), self._reader.num_reasoning)
        own = self._ledger.extension() | {"stop_reason": output.stop_reason}
        fields |= {"usage": usage} | self._asked | {"emberline": own}
        if self._service.wants_metrics(self._body.per_request_metrics, 1):
            width = self._service.engine.max_draft_tokens
            fields["metrics"] = request_metrics(self._times.times(0), output, width)
        return status, fields

    def _note_asked(self, output: RequestOutput) -> None:
        """Collect what only an extension shows: ids, and the prompt's records."""
        if self._body.return_token_ids:
            self._asked["token_ids"] += output.token_ids
        if self._body.prompt_logprobs is not None and not self._asked.get("prompt_logprobs"):
            self._asked["prompt_logprobs"] = self._form.prompt_entries(output.prompt_logprobs)

    def _written(self, response: Json) -> bytes:
        """The response as it is written, and kept where that was asked for."""
        content = dump_long_json(response, _DEPTH)
        if self._body.store:
            said = [item for one in self._builder.output for item in as_input(one)]
            items = (*self._items, *said)
            kept = StoredResponse(self._id, content, items, self._body.wants_logprobs)
            self._service.responses.put(kept)
        return content


def _framed(event: Json) -> bytes:
    return sse(dump_long_json(event, _DEPTH + 1), event["type"])
