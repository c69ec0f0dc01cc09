"""The HTTP application: routes, life cycle, what the server says about itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from emberline.engine.running_engine import RunningEngine
from emberline.server.api_keys import RequireKey
from emberline.server.chat import create_chat_completion
from emberline.server.chat_body import ChatBody
from emberline.server.completions import create_completion
from emberline.server.dialect import Dialect, dialect_of
from emberline.server.direct import Direct, Handler
from emberline.server.errors import ApiError, install_error_handlers
from emberline.server.live_audit import LiveAudit
from emberline.server.metrics import ServerMetrics
from emberline.server.native import generate
from emberline.server.native_body import GenerateBody
from emberline.server.native_routes import (
    AbortBody,
    abort_request,
    add_native_routes,
    internal_states,
)
from emberline.server.prompts import PromptEncoder
from emberline.server.protocol import Body, CompletionBody, MetricsLevel
from emberline.server.records import Json
from emberline.server.responses import create_response, delete_response, get_response
from emberline.server.responses_body import ResponsesBody
from emberline.server.service import Service
from emberline.server.stream import Answer
from emberline.server.tokens import detokenize, tokenize, tokenizer_info
from emberline.server.tokens_body import DetokenizeBody, TokenizeBody
from emberline.server.turns import bound_threads
from emberline.types import MAX_TIMEOUT, MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Endpoint = Callable[[Service, HttpRequest], Awaitable[Response]]

POST_ROUTES: dict[str, tuple[Endpoint, type[Body]]] = {
    "/v1/completions": (create_completion, CompletionBody),
    "/v1/chat/completions": (create_chat_completion, ChatBody),
    "/v1/responses": (create_response, ResponsesBody),
    "/generate": (generate, GenerateBody),
    "/abort_request": (abort_request, AbortBody),
    "/tokenize": (tokenize, TokenizeBody),
    "/detokenize": (detokenize, DetokenizeBody),
}


def create_app(
    engine: RunningEngine,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    metrics: ServerMetrics | None = None,
    audit: LiveAudit | None = None,
    request_timeout: float | None = None,
    max_logprobs: int = MAX_TOP_LOGPROBS,
    per_request_metrics: MetricsLevel = "none",
    api_keys: Sequence[str] = (),
    dialect: Dialect | None = None,
    info: Mapping[str, object] | None = None,
) -> FastAPI:
    """The application for one engine. Ending it shuts the engine down.

    Args:
        engine: what is served.
        tokenizer: the model's.
        name: what the model is called here.
        metrics: what `/metrics` shows, where others count with it too.
        audit: rescores a sample of the requests while the application lives.
        request_timeout: seconds that a request may take; None = no limit.
        max_logprobs: most values a token that a request may ask for; -1 = no limit.
        per_request_metrics: whether answers say how their request fared, unless asked.
        api_keys: what calls must show one of; none = no keys are needed.
        dialect: how the model writes calls and reasoning; None = what its template shows.
        info: what `/server_info` says besides.
    """
    if request_timeout is not None and not 0 < request_timeout <= MAX_TIMEOUT:
        raise ValueError(f"request_timeout must be in (0, {MAX_TIMEOUT:g}], got {request_timeout}")
    service = Service(
        engine=engine,
        encoder=PromptEncoder(
            tokenizer,
            engine.token_text,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
        ),
        metrics=metrics or ServerMetrics(engine.snapshot, name),
        dialect=dialect or dialect_of(tokenizer),
        audit=audit,
        name=name,
        created=int(time.time()),
        request_timeout=request_timeout,
        max_logprobs=max_logprobs,
        per_request_metrics=per_request_metrics,
    )
    about = {"api_keys_needed": bool(api_keys), **(info or {})}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bound_threads()
        auditing = asyncio.create_task(audit.run()) if audit is not None else None
        yield
        if auditing is not None:
            auditing.cancel()
            await asyncio.wait([auditing])
        engine.shutdown()

    app = FastAPI(
        title="Emberline",
        version=version("emberline"),
        lifespan=lifespan,
        redirect_slashes=False,  # an empty redirection says less than that there is no such path
    )
    install_error_handlers(app)
    handlers = {
        path: _add_post(app, service, path, endpoint, kind)
        for path, (endpoint, kind) in POST_ROUTES.items()
    }
    _add_gets(app, service, about)
    _add_kept_responses(app, service)
    add_native_routes(app, service)
    app.add_middleware(Direct, handlers=handlers)
    if api_keys:  # asked for before anything else: what is added last comes first
        app.add_middleware(RequireKey, keys=tuple(api_keys))
    return app


def _add_post(
    app: FastAPI, service: Service, path: str, endpoint: Endpoint, kind: type[Body]
) -> Handler:
    async def route(http: HttpRequest) -> Response:
        return await endpoint(service, http)

    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=place + "/$defs/{model}")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(
        path,
        route,
        methods=["POST"],
        name=endpoint.__name__,
        description=endpoint.__doc__ or "",
        openapi_extra={"requestBody": body},
    )
    return route


def _add_kept_responses(app: FastAPI, service: Service) -> None:
    @app.get("/v1/responses/{response_id}")
    async def kept_response(http: HttpRequest, response_id: str) -> Response:
        """A response that is kept, as it was answered."""
        return get_response(service, response_id, http.query_params)

    @app.delete("/v1/responses/{response_id}")
    async def forget_response(response_id: str) -> Response:
        """Forget a response."""
        return delete_response(service, response_id)


def _add_gets(app: FastAPI, service: Service, about: Mapping[str, object]) -> None:
    # Coroutines, for they wait for nothing: a plain function would queue for a thread.
    engine = service.engine

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine answers, 503 once it does not."""
        state = engine.health()
        if not state.ok:
            raise ApiError(503, state.reason or "unhealthy", code="unhealthy")
        return Response()

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model served."""
        return Answer({"object": "list", "data": [_model_card(service)]})

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> Response:
        """The model served, by its name."""
        if model != service.name:
            message = f"model {model!r} is not served here: use {service.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return Answer(_model_card(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(
            service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info")
    async def server_info() -> Response:
        """Model, draft, layout, budgets, and how exact the log-probabilities are."""
        return Answer(_server_info(service) | dict(about))

    @app.get("/version")
    async def package_version() -> Response:
        """The package's version."""
        return Answer({"version": app.version})

    @app.get("/tokenizer_info")
    async def about_tokenizer() -> Response:
        """Special tokens and chat template."""
        return Answer(tokenizer_info(service))


def _model_card(service: Service) -> Json:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "emberline",
        "root": service.name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }


def _server_info(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "model_name": service.name,
        "max_model_len": engine.max_model_len,
        "vocab_size": engine.vocab_size,
        **engine.info,
        "internal_states": internal_states(service),
        "request_timeout": service.request_timeout,
        "max_logprobs": service.max_logprobs,
        "per_request_metrics": service.per_request_metrics,
        "tool_parser": service.dialect.tools,
        "reasoning_parser": "think" if service.dialect.thinks else "none",
        "logprob_audit": service.audit.info() if service.audit is not None else None,
    }
