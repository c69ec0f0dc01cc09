"""What stands round `/generate` in that API: model, server, cache, health, abort.

Owns these routes. Must not know how answers are made.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from emberline.engine.running_engine import RunningEngine
from emberline.server.errors import ApiError
from emberline.server.native_answer import WEIGHT_VERSION
from emberline.server.native_body import MAX_NAME
from emberline.server.protocol import Body
from emberline.server.records import Json
from emberline.server.service import Service
from emberline.server.stream import Answer
from emberline.types import FinishReason, InvalidRequest, QueueFull, Request, SamplingParams

PROBE_SECONDS = 20.0
_PROBE_PRIORITY = -(2**31)  # before everybody else
_ANY_TOKEN = 0


class AbortBody(Body):
    """`POST /abort_request`."""

    rid: Annotated[str, Field(max_length=MAX_NAME)] = ""
    abort_all: bool = False


async def abort_request(service: Service, http: HttpRequest) -> Response:
    """End the `/generate` requests of a name, or all; they answer with what they have."""
    body = await service.read(AbortBody, http)
    if not (body.rid or body.abort_all):
        raise InvalidRequest("rid is empty: give one, or abort_all: true", "rid")
    running = service.running
    for request_id in running.all_ids() if body.abort_all else running.ids_of(body.rid):
        service.engine.abort(request_id)
    return Answer({"success": True})


def add_native_routes(app: FastAPI, service: Service) -> None:
    """The routes that take no body."""
    engine = service.engine

    @app.get("/get_model_info")
    async def get_model_info() -> Response:
        """The model, as clients of the native route ask for it."""
        return Answer(_model_info(service))

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """200 once a token has been generated, 503 if none comes in time."""
        await _generate_one(engine)
        return Response()

    async def flush_cache() -> Response:
        """Forget every cached prefix that no running request holds."""
        await engine.clear_prefix_cache()
        return Answer({"success": True})

    for method in ("GET", "POST"):
        app.add_api_route(
            "/flush_cache",
            flush_cache,
            methods=[method],
            operation_id=f"flush_cache_{method.lower()}",
        )


def internal_states(service: Service) -> list[Json]:
    """The engine's own figures, where clients of the native route look for them."""
    now = service.engine.snapshot()
    state: Json = {
        "num_running_reqs": now.num_running,
        "num_queue_reqs": now.num_waiting,
        "kv_cache_usage": now.kv_usage,
    }
    if now.num_verify_steps:
        state["avg_spec_accept_length"] = now.num_emitted_tokens / now.num_verify_steps
    return [state]


def _model_info(service: Service) -> Json:
    return {
        "model_path": service.engine.info.get("model") or service.name,
        "tokenizer_path": service.engine.info.get("model") or service.name,
        "served_model_name": service.name,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "max_model_len": service.engine.max_model_len,
    }


async def _generate_one(engine: RunningEngine) -> None:
    """Generate a token.

    Raises:
        ApiError: 503, none came.
    """
    state = engine.health()
    if not state.ok:
        raise ApiError(503, state.reason or "unhealthy", code="unhealthy")
    params = SamplingParams(temperature=0.0, max_tokens=1, speculate=False)
    request = Request(
        request_id=f"health-{secrets.token_hex(12)}",
        prompt_token_ids=(_ANY_TOKEN,),
        params=params,
        priority=_PROBE_PRIORITY,
    )
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            async for output in engine.generate(request):
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise ApiError(503, output.error or "no token came", code="unhealthy")
    except QueueFull:
        return  # it has more to do than it can take on, which is no illness
    except TimeoutError:
        message = f"no token came within {PROBE_SECONDS:g} s"
        raise ApiError(503, message, code="unhealthy") from None
