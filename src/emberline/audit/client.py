"""A server, asked in whichever dialect it speaks, answering in records.

Owns connections, what counts as a refusal, and what the server turns out to support. Knows no
check.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import httpx

from emberline.audit import native_api, openai_api
from emberline.audit.outcome import Malformed, NotSupported
from emberline.audit.records import Answer, Ask, TokenRecord
from emberline.audit.settings import AuditError, AuditSettings

LACKS = (400, 404, 405, 415, 422, 501)
"""Statuses by which a server says that it does not do something."""
_SHOWN = 300  # characters of what a server said


class Refused(NotSupported):
    """The server said no: `status` and its words."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"the server said {status}: {said}")
        self.status = status


class Broken(Exception):
    """The server failed where it should have answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a server turned out to have."""

    api: Literal["openai", "native"]
    openai: bool  # OpenAI's routes are there as well
    model: str
    ids: bool  # tokens are known by id, prompts may be given as ids
    ignore_eos: bool
    info: dict[str, Any]  # what it says of itself, if anything

    @property
    def dtype(self) -> str | None:
        """What it computes in, if it says so."""
        return next((str(self.info[k]) for k in ("dtype",) if k in self.info), None)

    @property
    def block(self) -> int | None:
        """Most drafts a step, if it says so."""
        for name in ("num_draft_tokens", "max_draft_tokens", "speculative_num_draft_tokens"):
            if isinstance(self.info.get(name), int):
                return int(self.info[name])
        return None


class Server:
    """One server. Any number of requests may be under way."""

    features: Features

    def __init__(self, url: str, settings: AuditSettings) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._settings = settings
        key = settings.api_key
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=settings.timeout,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._reads: dict[tuple[str, Any], str | None] = {}

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def discover(self) -> None:
        """Find out how the server is to be asked.

        Raises:
            AuditError: nobody answers, a key is wanted, the model is not there, or neither dialect
                is spoken.
        """
        try:
            model = await self._model()
            api = await self._dialect(model)
            await self._probe(api, model, await self._info())
        except httpx.TransportError as problem:
            raise AuditError(
                f"{self.url} does not answer: {problem or type(problem).__name__}"
            ) from None

    async def _probe(self, api: Literal["openai", "native"], model: str, info: Any) -> None:
        """Try what makes tokens known by id, and answers endless."""
        openai = api == "openai"
        plain = Features(
            api=api, openai=openai, model=model, ids=not openai, ignore_eos=False, info=info
        )
        self.features = plain
        if openai:
            await self._try(replace(plain, ids=True))
            if not self.features.ids and self._settings.api == "auto" and await self._is_native():
                self.features = replace(plain, api="native", ids=True)
        await self._try(replace(self.features, ignore_eos=True))

    async def _try(self, features: Features) -> None:
        """Keep `features` if a request that uses them is answered as it should be."""
        before, self.features = self.features, features
        ask = Ask(prompt="One, two,", max_tokens=1, num_top=2)
        try:
            answer = await self.ask(ask)
            keeps = not features.ids or all(isinstance(key, int) for key in answer.keys)
        except (Refused, Broken):
            keeps = False
        except Malformed:
            keeps = True  # the checks that ask will say what is wrong
        if not keeps:
            self.features = before

    async def ask(self, ask: Ask) -> Answer:
        """One answer.

        Raises:
            Refused: the server does not do this.
            Malformed: the answer has not its dialect's shape.
            Broken: the server failed.
        """
        return (await self.choices(ask))[0]

    async def choices(self, ask: Ask) -> list[Answer]:
        """Every choice of a request, as many as were asked for."""
        features = self.features
        if features.api == "native":
            path = native_api.GENERATE
            named = self._settings.model
            body = native_api.body(ask, named, ignore_eos=features.ignore_eos)
        else:
            path = openai_api.COMPLETIONS
            body = openai_api.body(
                ask, features.model, ids=features.ids, ignore_eos=features.ignore_eos
            )
        if ask.stream:
            events = await self.events(path, body)
            native = features.api == "native"
            found = native_api.streamed(events) if native else openai_api.streamed(ask, events)
        else:
            reply = await self.post(path, body)
            native = features.api == "native"
            found = native_api.answers(reply) if native else openai_api.answers(ask, reply)
        if len(found) != ask.n:
            raise Malformed(f"{ask.n} choices were asked for, {len(found)} came")
        return found

    async def score(self, ids: Sequence[int], num_top: int) -> tuple[TokenRecord, ...]:
        """Records of given tokens, computed by the server as a prompt. The first has no value."""
        ask = Ask(prompt=tuple(ids), max_tokens=1, num_top=num_top, score_prompt=True)
        answer = await self.ask(ask)
        if tuple(record.key for record in answer.prompt) != tuple(ids):
            raise NotSupported("scored prompts come back as other tokens than were sent")
        return answer.prompt

    async def token_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, as the server itself reads it."""
        if not self.features.ids:
            raise NotSupported("the server does not tell token ids (return_tokens_as_token_ids)")
        answer = await self.ask(Ask(prompt=text, max_tokens=1, num_top=1, score_prompt=True))
        return tuple(int(record.key) for record in answer.prompt)

    async def lacks(self, option: str, value: Any, nonsense: Any) -> str | None:
        """Why an optional field cannot be used; None if it is read.

        A server reads a field if it takes `value` and refuses `nonsense`: one that passes over
        unknown fields takes both.
        """
        if (option, value) not in self._reads:
            self._reads[option, value] = await self._lacks(option, value, nonsense)
        return self._reads[option, value]

    async def _lacks(self, option: str, value: Any, nonsense: Any) -> str | None:
        plain = Ask(prompt="One, two,", max_tokens=1, num_top=1)
        try:
            await self.ask(replace(plain, options={option: value}))
        except (Refused, Malformed, Broken) as problem:
            return str(problem)
        try:
            await self.ask(replace(plain, options={option: nonsense}))
        except (Refused, Malformed, Broken):
            return None
        return f"the server passes over {option}: it takes {nonsense!r} too"

    async def post(self, path: str, body: Any) -> Any:
        """The JSON of an answer."""
        try:
            reply = await self._http.post(path, json=body)
        except httpx.TransportError as problem:
            raise Broken(f"{path}: {type(problem).__name__} {problem}".strip()) from None
        self._check(path, reply.status_code, reply.text)
        try:
            return _strict(reply.text)
        except ValueError as problem:
            raise Malformed(f"{path}: {problem}") from None

    async def events(self, path: str, body: Any) -> list[Any]:
        """The JSON of every event of a stream, `[DONE]` left out."""
        events = []
        try:
            async with self._http.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    self._check(path, reply.status_code, reply.text)
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data and data != "[DONE]":
                        events.append(_strict(data))
        except httpx.TransportError as problem:
            raise Broken(f"{path}: {type(problem).__name__} {problem}".strip()) from None
        except ValueError as problem:
            raise Malformed(f"{path}, in a stream: {problem}") from None
        for event in events:
            if isinstance(event, dict) and event.get("error"):
                raise Broken(f"{path}, in a stream: {_said(json.dumps(event))}")
        return events

    def _check(self, path: str, status: int, text: str) -> None:
        if status in LACKS:
            raise Refused(status, _said(text))
        if status != 200:
            raise Broken(f"{path}: the server answered {status}: {_said(text)}")

    async def _model(self) -> str:
        """The model to name: the one given, or the first listed."""
        if self._settings.model is not None:
            return self._settings.model
        listed = await self._listed()
        return listed[0] if listed else "default"

    async def _listed(self) -> list[str]:
        """The models that the server lists; one of the native dialect alone may list none."""
        reply = await self._http.get("/v1/models")
        self._check_key(reply)
        try:
            return [str(model["id"]) for model in reply.json()["data"]]
        except (ValueError, LookupError, TypeError):
            return []

    async def _check_model(self) -> None:
        """Raise `AuditError` for a model that was asked for by name and is not listed.

        Many servers of the native dialect pass over the name: they would pass for another model.
        """
        name, listed = self._settings.model, await self._listed()
        if name is not None and listed and name not in listed:
            raise AuditError(f"--model {name}: {self.url} lists {', '.join(listed)}")

    async def _dialect(self, model: str) -> Literal["openai", "native"]:
        if self._settings.api == "native":
            await self._check_model()
        if self._settings.api != "auto":
            return self._settings.api
        body = {"model": model, "prompt": "One, two,", "max_tokens": 1, "logprobs": 1}
        reply = await self._http.post(openai_api.COMPLETIONS, json=body)
        if reply.status_code == 200:
            return "openai"
        self._check_key(reply)
        await self._check_model()
        if await self._is_native():
            return "native"
        raise AuditError(
            f"{self.url} speaks neither dialect: {openai_api.COMPLETIONS} answered "
            f"{reply.status_code} ({_said(reply.text)}), nor does {native_api.GENERATE}"
        )

    async def _is_native(self) -> bool:
        """Whether `/generate` is answered."""
        body: dict[str, Any] = {"text": "One, two,", "sampling_params": {"max_new_tokens": 1}}
        if self._settings.model is not None:
            body["model"] = self._settings.model
        reply = await self._http.post(native_api.GENERATE, json=body)
        return reply.status_code == 200

    def _check_key(self, reply: httpx.Response) -> None:
        if reply.status_code in (401, 403):
            raise AuditError(f"{self.url} wants a key: give --api-key ({_said(reply.text)})")

    async def _info(self) -> dict[str, Any]:
        """What the server says of itself; nothing is required."""
        for path in ("/server_info", "/get_server_info"):
            reply = await self._http.get(path)
            try:
                info = reply.json()
            except ValueError:
                continue
            if reply.status_code == 200 and isinstance(info, dict):
                return info
        return {}


def _strict(text: str) -> Any:
    """JSON without NaN and Infinity, which it does not have."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON: every number must be finite")

    return json.loads(text, parse_constant=refuse)


def _said(text: str) -> str:
    """What a server said, in one line."""
    try:
        said = json.loads(text)
        problem = said.get("error", said)
        text = str(problem.get("message", problem) if isinstance(problem, dict) else problem)
    except (ValueError, AttributeError):
        pass
    return " ".join(text[:_SHOWN].split()) or "(nothing)"
