"""Calls of the endpoints that everything hangs on, straight from the connection.

The framework's way to an endpoint is made for routes that declare what they take. Its layers cost a
call, and each event of its answer, a seventh of all that the server's process does; these endpoints
read their bodies themselves. The framework knows them too: what it knows is what the documentation
shows. Must not know bodies or answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request as HttpRequest
from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from emberline.server.errors import api_error

Handler = Callable[[HttpRequest], Awaitable[Response]]


class Direct:
    """Answers POST calls of known paths; hands the others on.

    Args:
        app: the application.
        handlers: by path.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._handlers = dict(handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call, or the application's life cycle."""
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        response: Response
        try:
            response = await handler(HttpRequest(scope, receive, send))
        except Exception as problem:
            response = api_error(problem).response()
        await response(scope, receive, send)
