"""What a server says of itself: its models, its counters. Owns requests that are not measured."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from emberline.bench.acceptance import read_counters
from emberline.bench.client import Failure
from emberline.bench.events import error_message
from emberline.bench.settings import BenchError, ServerSettings

# Answers that will be the same for every request: the run stops before it starts.
REFUSALS = (400, 401, 403, 404, 405, 413, 415, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is measured, as the server lists it."""

    name: str
    listed: dict[str, Any] | None = None  # its entry in /v1/models


class Server:
    """One server, asked about itself."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._http = httpx.AsyncClient(
            headers=settings.request_headers,
            timeout=min(settings.timeout, 30.0),
            trust_env=False,  # the environment's proxies stand for no measured request either
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def model(self) -> ServedModel:
        """The model to ask for: the one given, or the only one listed.

        Raises:
            BenchError: the server cannot be reached, wants a key, or which model is not clear.
        """
        entries, wanted = await self._listed(), self._settings.model
        for entry in entries:
            if wanted in (None, entry["id"]) and (wanted or len(entries) == 1):
                return ServedModel(name=entry["id"], listed=entry)
        if wanted is not None:  # an alias, perhaps: the first request will tell
            return ServedModel(name=wanted)
        if entries:
            names = ", ".join(entry["id"] for entry in entries)
            raise BenchError(f"{self._settings.root} serves several models, give --model: {names}")
        raise BenchError(f"{self._settings.root}/v1/models lists no model: give --model")

    async def _listed(self) -> list[dict[str, Any]]:
        root = self._settings.root
        try:
            answer = await self._http.get(f"{root}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            reason = str(problem) or type(problem).__name__
            raise BenchError(f"cannot reach {root}: {reason}") from None
        if answer.status_code in (401, 403):
            raise BenchError(refusal(root, f"http_{answer.status_code}", _message(answer)))
        try:
            data = answer.json()["data"]
            return [entry for entry in data if isinstance(entry["id"], str)]
        except (ValueError, TypeError, KeyError):
            return []  # no list: a server may have none

    async def counters(self) -> dict[str, float] | None:
        """The counters of speculation now; None where the server has none to read."""
        try:
            answer = await self._http.get(f"{self._settings.root}/metrics")
            return read_counters(answer.text) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None


def _message(answer: httpx.Response) -> str:
    try:
        found = error_message(answer.json())
    except ValueError:
        found = None
    return found or answer.text[:300]


def refusal(url: str, kind: str, message: str) -> str:
    """One line for an answer that every request would get."""
    remedy = {
        "http_401": "; give a key with --api-key",
        "http_403": "; give a key with --api-key",
    }.get(kind, "")
    status = kind.removeprefix("http_")
    return f"{url} answers {status}: {' '.join(message.split())}{remedy}"


def stops_the_run(failure: Failure) -> bool:
    """Whether every request would fail like this one."""
    return failure.kind == "connect" or failure.kind in {f"http_{code}" for code in REFUSALS}
