"""Calls that go straight to their endpoint are answered as the framework would answer them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from emberline.server.direct import Direct
from emberline.server.errors import ApiError, install_error_handlers
from emberline.types import InvalidRequest, QueueFull


async def handler(http: HttpRequest) -> Response:
    """Does what the body says."""
    match (await http.body()).decode():
        case "refuse":
            raise InvalidRequest("it must be odd", "number")
        case "full":
            raise QueueFull(3, 7)
        case "own":
            raise ApiError(418, "a teapot", code="teapot")
        case "fail":
            raise ZeroDivisionError("a bug")
    return Response(b"done", headers={"x-way": http.method})


def application(*, direct: bool) -> FastAPI:
    """One route, which either way leads to."""
    app = FastAPI()
    install_error_handlers(app)
    app.add_api_route("/known", handler, methods=["POST"])
    if direct:
        app.add_middleware(Direct, handlers={"/known": handler})
    return app


def call(app: FastAPI, method: str, path: str, body: str) -> tuple[int, Any, dict[str, str]]:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, content=body)

    answer = asyncio.run(run())
    return answer.status_code, answer.text, dict(answer.headers)


@pytest.mark.parametrize("body", ["", "refuse", "full", "own", "fail"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/known"), ("GET", "/known"), ("POST", "/known/"), ("POST", "/other")],
)
def test_both_ways_give_the_same_answer(method: str, path: str, body: str) -> None:
    ways = [call(application(direct=direct), method, path, body) for direct in (False, True)]
    assert ways[0] == ways[1]


def test_the_framework_is_not_asked() -> None:
    app = application(direct=True)
    app.router.routes.clear()
    assert call(app, "POST", "/known", "")[:2] == (200, "done")
