"""`POST /generate`, the native route: prompts continued or scored, one by one or in batches.

Owns how a call becomes requests and how their answers are put together, streamed or not. The shape
of one answer is in native_answer.py.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from fastapi import Request as HttpRequest
from fastapi import Response
from starlette.types import Receive

from emberline.engine.output_stream import merge_outputs, num_records
from emberline.server.lark import named_tokens
from emberline.server.native_answer import NativeAnswer, NativeRequest
from emberline.server.native_body import GenerateBody
from emberline.server.native_params import NativeSampling
from emberline.server.service import Service
from emberline.server.stream import ClientGone, EventStream, Outputs, collect, sse
from emberline.server.turns import off_loop
from emberline.types import Grammar, InvalidRequest, Request, RequestOutput

BYTES_A_RECORD = 100  # joined in the time that a record takes to be written, or less


async def generate(service: Service, http: HttpRequest) -> Response:
    """Continue or score prompts, with log-probabilities of prompt and answer."""
    body = await service.read(GenerateBody, http)
    try:
        call = await _prepare(service, body)
    except InvalidRequest as problem:
        raise body.in_its_words(problem) from None
    return call.stream() if body.stream else await call.answer(http)


async def _prepare(service: Service, body: GenerateBody) -> NativeCall:
    """The call of a body.

    Raises:
        InvalidRequest: something is wrong with it.
    """
    asked = body.asked()
    timeout = service.timeout(body.timeout)
    n = asked[0].sampling.n if asked else 1
    service.check_num_choices(len(asked), n)
    prompts = await service.encoder.prompts(
        [one.prompt for one in asked], add_special_tokens=True, echo=False, skip_special_tokens=True
    )
    grammars = await _grammars(service, [one.sampling for one in asked])
    names = body.rids(len(asked), n, secrets.token_hex(16))
    rids = [rid for _, own in names for rid in own]
    prefix = f"gen-{secrets.token_hex(12)}"
    requests: list[Request] = []
    native: list[NativeRequest] = []
    for one, prompt in zip(asked, prompts, strict=True):
        grammar = grammars[id(one.sampling)]
        params = one.params(len(prompt.token_ids), service.engine.max_request_tokens, grammar)
        if one.sampling.bad_words:
            words = await service.encoder.bad_words(one.sampling.bad_words)
            params = replace(params, bad_words=words)
        for choice in range(n):
            index = len(requests)
            requests.append(
                Request(
                    request_id=f"{prefix}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    params=params,
                    choice=choice,
                    priority=-body.priority,  # higher runs earlier in this API
                    timeout=timeout,
                )
            )
            place = index if body.is_batch or n > 1 else None
            native.append(
                NativeRequest(
                    rids[index], place, prompt.token_ids, one, params, body.return_text_in_logprobs
                )
            )
    return NativeCall(service, body, requests, native, _ids_by_name(names, requests))


async def _grammars(
    service: Service, options: Sequence[NativeSampling]
) -> dict[int, Grammar | None]:
    """What the answers must match, by the identity of the options that ask for it."""
    grammars: dict[int, Grammar | None] = {}
    for one in options:
        if id(one) not in grammars:
            tokens = named_tokens(service.encoder.tokenizer) if one.structural_tag else {}
            grammars[id(one)] = await service.grammar(one.asked_grammar(tokens))
    return grammars


def _ids_by_name(
    names: Sequence[tuple[str, Sequence[str]]], requests: Sequence[Request]
) -> dict[str, list[str]]:
    """The engine's ids by every name that a client may know them by."""
    ids = iter([request.request_id for request in requests])
    found: dict[str, list[str]] = {}
    for name, own in names:
        alone = {rid: [next(ids)] for rid in own}
        found |= alone | {name: [one for [one] in alone.values()]}
    return found


class NativeCall:
    """The requests of one call and their answers, index by index."""

    def __init__(
        self,
        service: Service,
        body: GenerateBody,
        requests: Sequence[Request],
        native: Sequence[NativeRequest],
        ids_by_name: Mapping[str, Sequence[str]],
    ) -> None:
        self._service, self._body, self._ids_by_name = service, body, ids_by_name
        self._open = service.opener(requests)
        self._answers = [NativeAnswer(one, service.engine.token_text) for one in native]
        self._is_list = native[0].index is not None

    def stream(self) -> Response:
        """The answers as server-sent events, each of which says everything so far."""
        return EventStream(self._outputs, self._events)

    async def answer(self, http: HttpRequest) -> Response:
        """The answers at once; nothing if the client hangs up."""
        try:
            parts = await collect(self._outputs(http.receive), len(self._answers))
        except ClientGone:
            return Response(status_code=499)
        merged = [merge_outputs(outputs) for outputs in parts]
        content = await off_loop(sum(map(num_records, merged)), partial(self._whole, merged))
        return Response(content, media_type="application/json")

    async def _outputs(self, receive: Receive) -> Outputs:
        """The requests' outputs, while their names can be used to abort them."""
        try:
            with self._service.running.hold(self._ids_by_name):
                async with aclosing(self._open(receive)) as outputs:
                    async for pair in outputs:
                        yield pair
        except InvalidRequest as problem:
            raise self._body.in_its_words(problem) from None

    async def _events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        async for index, output in outputs:
            size = num_records(output) + self._answers[index].num_bytes // BYTES_A_RECORD
            yield sse(await off_loop(size, partial(self._next, index, output)))

    def _next(self, index: int, output: RequestOutput) -> bytes:
        answer = self._answers[index]
        answer.add(output)
        return answer.json()

    def _whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        answers = [self._next(index, output) for index, output in enumerate(outputs)]
        return b"[%b]" % b",".join(answers) if self._is_list else answers[0]
