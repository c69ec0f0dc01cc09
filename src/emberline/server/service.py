"""What every endpoint works with: the engine, the prompts' encoder, the metrics, the served name.

Owns what the endpoints share of reading a call and starting its requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from emberline.engine.running_engine import RunningEngine
from emberline.server.dialect import Dialect
from emberline.server.errors import ApiError
from emberline.server.live_audit import LiveAudit
from emberline.server.metrics import CallMetrics, ServerMetrics
from emberline.server.prompts import PromptEncoder
from emberline.server.protocol import AnyBody, MetricsLevel, parse_body
from emberline.server.responses_store import ResponseStore
from emberline.server.running_calls import RunningCalls
from emberline.server.stream import Outputs, run_requests
from emberline.server.structured import AskedGrammar
from emberline.server.turns import Turnstile, off_loop
from emberline.types import (
    ALL_LOGPROBS,
    MAX_TOP_LOGPROBS,
    Grammar,
    InvalidRequest,
    Request,
    SamplingParams,
)

MAX_BODY_BYTES = 64 * 2**20
MAX_CALL_CHOICES = 256
BYTES_PARSED = 100  # of a body, in the time of one character of a text that is tokenised


class Asking(Protocol):
    """A body that says how to sample."""

    @property
    def bad_words(self) -> Sequence[str]:
        """Texts that the answer may not hold."""
        ...

    def sampling_params(self) -> SamplingParams:
        """The options, as far as a body can tell without a tokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """One served model."""

    engine: RunningEngine
    encoder: PromptEncoder
    metrics: ServerMetrics
    name: str
    created: int  # Unix seconds
    dialect: Dialect = field(default_factory=Dialect)
    audit: LiveAudit | None = None
    request_timeout: float | None = None  # seconds; None = no limit
    max_logprobs: int = MAX_TOP_LOGPROBS  # widest record that may be asked for; -1 = no limit
    per_request_metrics: MetricsLevel = "none"  # of answers whose body does not say
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: RunningCalls = field(default_factory=RunningCalls)
    turnstile: Turnstile = field(default_factory=Turnstile)

    async def read(self, kind: type[AnyBody], http: HttpRequest) -> AnyBody:
        """The validated body of a call for this model.

        Raises:
            ApiError: 400 for a bad body, 404 for another model, 413 for too many bytes.
            EngineStopped: the engine takes no more requests.
        """
        content = await _read_bytes(http)
        await self.turnstile.turn()
        self.engine.check_open()
        body = await off_loop(len(content) // BYTES_PARSED, partial(parse_body, kind, content))
        model = getattr(body, "model", None)
        if model is not None and model != self.name:
            raise ApiError(
                404,
                f"model {model!r} is not served here: use {self.name!r}",
                param="model",
                code="model_not_found",
            )
        return body

    async def params(self, body: Asking, *, width: str = "logprobs") -> SamplingParams:
        """The options of a call's requests.

        Args:
            body: what is asked for.
            width: the body's name for the number of alternatives.

        Raises:
            InvalidRequest: an option has no meaning, or is more than the server allows.
        """
        params = body.sampling_params()
        self.check_widths(params, width)
        if not body.bad_words:
            return params
        return replace(params, bad_words=await self.encoder.bad_words(body.bad_words))

    def check_widths(self, params: SamplingParams, width: str = "logprobs") -> None:
        """Raise `InvalidRequest` for more values a token than the server gives.

        `width` is what the body calls the number of alternatives.
        """
        limit = self.max_logprobs
        for name, asked in (
            (width, params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
            ("logprob_token_ids", len(params.logprob_token_ids)),
        ):
            every = asked == ALL_LOGPROBS
            values = self.engine.vocab_size if every else asked or 0
            if limit != ALL_LOGPROBS and values > limit:
                raise InvalidRequest(
                    f"{name} asks for {'all ' if every else ''}{values} values a token: at most "
                    f"{limit} are given here (--max-logprobs)",
                    name,
                )

    async def grammar(self, asked: AskedGrammar | None) -> Grammar | None:
        """The grammar of a call's requests, which compiles.

        Raises:
            InvalidRequest: it does not; the message quotes the compiler, `param` who asked for it.
        """
        if asked is None:
            return None
        try:
            await self.engine.compile(asked.grammar)
        except InvalidRequest as problem:
            raise InvalidRequest(str(problem), asked.param) from None
        return asked.grammar

    def timeout(self, asked: float | None) -> float | None:
        """Seconds that a request may take: what it asks for, but no more than the server's limit.

        Raises:
            InvalidRequest: it asks for more.
        """
        limit = self.request_timeout
        if asked is None:
            return limit
        if limit is not None and asked > limit:
            raise InvalidRequest(f"timeout is at most {limit:g} s here, got {asked:g}", "timeout")
        return asked

    def check_num_choices(self, num_prompts: int, n: int) -> None:
        """Raise `InvalidRequest` for a call of more choices than one call can have.

        All of them wait together at first, so that a call that the empty queue could not hold would
        be told to come back for ever.
        """
        limit = min(MAX_CALL_CHOICES, self.engine.max_queue)
        if num_prompts * n > limit:
            why = "" if limit == MAX_CALL_CHOICES else ", the length of the queue"
            raise InvalidRequest(
                f"{num_prompts} prompts with n {n} make {num_prompts * n} choices: a call may have "
                f"{limit}{why}",
                "n" if num_prompts == 1 else "prompt",
            )

    def wants_metrics(self, asked: MetricsLevel | None, num_choices: int) -> bool:
        """Whether the answer of a call carries its request's metrics: asked for, or the server's.

        Raises:
            InvalidRequest: it asks for them and has several choices, of which none is meant.
        """
        if asked == "summary" and num_choices != 1:
            message = "per_request_metrics are of one request: use one prompt and n 1"
            raise InvalidRequest(message, "per_request_metrics")
        return (asked or self.per_request_metrics) == "summary" and num_choices == 1

    def opener(
        self, requests: Sequence[Request], metrics: CallMetrics | None = None
    ) -> Callable[[Receive], Outputs]:
        """Starts the requests once it is given the connection's `receive`.

        Raises:
            InvalidRequest: one asks for more values a token than the server gives.
        """
        for request in requests:
            self.check_widths(request.params)
        counted = metrics or self.metrics.call(len(requests))
        return partial(run_requests, self.engine, requests, counted, self.audit)


def new_id(prefix: Literal["cmpl", "chatcmpl"], wanted: str | None = None) -> str:
    """The id of a call: with what its client wants to find it by, or a fresh one."""
    return f"{prefix}-{wanted or secrets.token_hex(12)}"


async def _read_bytes(http: HttpRequest) -> bytes:
    # What the client has not sent yet is never read: the connection cannot go on.
    too_large = ApiError(
        413,
        f"the body exceeds {MAX_BODY_BYTES} bytes",
        code="too_large",
        headers={"Connection": "close"},
    )
    announced = http.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise too_large
    except ClientDisconnect:
        raise ApiError(499, "the client hung up", code="client_gone") from None
    return bytes(body)
