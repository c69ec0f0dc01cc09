"""Every error as OpenAI's JSON object. Owns statuses and shapes; knows no endpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from emberline.engine.running_engine import EngineStopped, ShuttingDown
from emberline.types import InvalidRequest, QueueFull

logger = logging.getLogger(__name__)

RETRY_AFTER_SHUTDOWN = 5  # seconds; another server, or this one's successor, may answer by then

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error: status, message, and the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The JSON object, OpenAI's shape."""
        kind = _TYPES.get(self.status, "internal_server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def api_error(problem: BaseException) -> ApiError:
    """The answer to any exception. What is not foreseen is a 500 and is logged."""
    match problem:
        case ApiError():
            return problem
        case InvalidRequest():
            return ApiError(400, str(problem), param=problem.param, code="invalid_value")
        case QueueFull():
            headers = {"Retry-After": str(problem.retry_after)}
            return ApiError(429, str(problem), code="queue_full", headers=headers)
        case ShuttingDown():
            headers = {"Retry-After": str(RETRY_AFTER_SHUTDOWN), "Connection": "close"}
            return ApiError(503, str(problem), code="shutting_down", headers=headers)
        case EngineStopped():
            return ApiError(503, str(problem), code="engine_stopped")
        case HTTPException():
            return ApiError(problem.status_code, str(problem.detail), headers=problem.headers)
        case _:
            logger.error("unexpected error", exc_info=problem)
            return ApiError(500, f"internal error: {type(problem).__name__}", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Let every route of `app` answer errors in one shape."""

    async def answer(request: Request, problem: Exception) -> JSONResponse:
        error = api_error(problem)
        if isinstance(problem, HTTPException) and problem.status_code in (404, 405):
            what = "no such route" if problem.status_code == 404 else "wrong method for this route"
            error.message = f"{what}: {request.method} {request.url.path}"
            error.code = "not_found" if problem.status_code == 404 else "method_not_allowed"
        return error.response()

    for kind in (ApiError, InvalidRequest, QueueFull, EngineStopped, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
