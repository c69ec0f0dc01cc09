"""Who may call: bearer keys, compared in constant time, before anything of a call is read.

Owns what a key may look like and which routes need none. Keeps digests only, so that no key can be
printed by accident. Must not know bodies or endpoints.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from emberline.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""What load balancers and scrapers ask, which have no keys; nothing of a request is shown there."""


def check_key(key: str) -> str:
    """The key, or `ValueError` for what no header could carry; the message does not show it."""
    if not key or not all("!" <= character <= "~" for character in key):
        raise ValueError("an API key is a word of visible ASCII characters")
    return key


class RequireKey:
    """Answers calls without a known key with 401; hands the others on.

    Args:
        app: the application.
        keys: those that are known, at least one.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(check_key(key).encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call, or the application's life cycle."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if not self._known(given):
                await _refusal(given).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, headers: list[bytes]) -> bool:
        if len(headers) != 1:
            return False
        scheme, _, key = headers[0].partition(b" ")
        digest = _digest(key.strip())
        # Every key is compared, whichever fits: the time says nothing.
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(same)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(headers: list[bytes]) -> ApiError:
    challenge = 'Bearer realm="emberline"'
    message = "this server needs an API key: send it as `Authorization: Bearer KEY`"
    if headers:
        challenge += ', error="invalid_token"'
        message = "the API key is not one of this server's: `Authorization: Bearer KEY`"
        scheme, gap, _ = headers[0].partition(b" ")
        if scheme.lower() != b"bearer" or not gap:
            message = "the scheme must be Bearer: `Authorization: Bearer KEY`"
    # The body is never read, so the connection cannot go on.
    return ApiError(
        401,
        message,
        code="invalid_api_key",
        headers={"WWW-Authenticate": challenge, "Connection": "close"},
    )
