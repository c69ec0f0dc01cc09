"""What every check works with: the servers, the prompts as ids, the noise, the sampling rule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from emberline.audit.client import Server
from emberline.audit.outcome import Malformed, NotSupported
from emberline.audit.records import Answer, Ask, TokenRecord
from emberline.audit.reference import Reference
from emberline.audit.settings import AuditSettings, Noise

_T = TypeVar("_T")

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6,",
    "Q: Why is the sky blue?\nA:",
    '{"name": "Ada", "born": 1815, "known for":',
    "The three primary colors are red,",
    "Dear Sir or Madam,\n\nI am writing to",
)
DEFAULT_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and its ids as the server reads it, or why they are not known."""

    text: str
    known: tuple[int, ...] | None
    why: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids. Raises `NotSupported` where the server does not tell them."""
        if self.known is None:
            raise NotSupported(self.why)
        return self.known

    def __str__(self) -> str:
        return repr(self.text)


@dataclass(slots=True)
class Session:
    """One audit under way."""

    server: Server
    settings: AuditSettings
    noise: Noise
    other: Server | None = None
    reference: Reference | None = None
    _prompts: tuple[Prompt, ...] = ()
    _seeds_hold: bool | None = None
    _scored: dict[tuple[int, ...], tuple[TokenRecord, ...]] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Most drafts a step, as far as is known."""
        return self.settings.block or self.server.features.block or DEFAULT_BLOCK

    async def prompts(self, count: int | None = None) -> tuple[Prompt, ...]:
        """The first `count` prompts (--prompts if None), repeated if there are not so many."""
        if not self._prompts:
            self._prompts = tuple(
                await self.gathered([partial(self._prompt, text) for text in TEXTS])
            )
        wanted = self.settings.num_prompts if count is None else count
        return tuple(self._prompts[i % len(TEXTS)] for i in range(wanted))

    async def known_prompts(self, count: int | None = None) -> tuple[Prompt, ...]:
        """The same, for what needs ids. Raises `NotSupported` where the server tells none."""
        prompts = await self.prompts(count)
        for prompt in prompts:
            if prompt.known is None:
                raise NotSupported(prompt.why)
        return prompts

    async def _prompt(self, text: str) -> Prompt:
        try:
            return Prompt(text, await self.server.token_ids(text))
        except NotSupported as problem:
            return Prompt(text, None, str(problem))

    def ask(self, prompt: Prompt | tuple[int, ...], **given: Any) -> Ask:
        """A request with the audit's usual length and alternatives."""
        sent = (prompt.known or prompt.text) if isinstance(prompt, Prompt) else prompt
        usual = {
            "max_tokens": self.settings.num_tokens,
            "num_top": self.settings.num_top,
            "mode": self.settings.mode,
        }
        return Ask(prompt=sent, **{**usual, **given})

    async def together(self, asks: Sequence[Ask], server: Server | None = None) -> list[Answer]:
        """Answers to requests that are under way at the same time, --concurrency at most."""
        asked = server or self.server
        return await self.gathered([partial(asked.ask, ask) for ask in asks])

    async def gathered(self, calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
        """Results of calls, --concurrency at a time; the first error, once all have ended."""
        gate = asyncio.Semaphore(self.settings.concurrency)

        async def gated(call: Callable[[], Awaitable[_T]]) -> _T:
            async with gate:
                return await call()

        # To the end, whatever fails: a request that is hung up on is another test than this.
        results: list[_T] = []
        for result in await asyncio.gather(*map(gated, calls), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    async def all_rows(
        self, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> list[tuple[TokenRecord, ...]]:
        """The rows of several answers, one prompt each."""
        pairs = zip(prompts, answers, strict=True)
        return await self.gathered([partial(self.rows, prompt, answer) for prompt, answer in pairs])

    async def rows(self, prompt: Prompt, answer: Answer) -> tuple[TokenRecord, ...]:
        """The server's prefill records of an answer's tokens, one an output token."""
        ids = prompt.ids + answer.ids
        if ids not in self._scored:
            self._scored[ids] = await self.server.score(ids, self.settings.num_top)
        return self._scored[ids][len(prompt.ids) :]

    async def rejecting(self) -> Mapping[str, Any]:
        """Options that make seeded draws go through accept and reject, where there is a choice."""
        if await self.server.lacks("accept", "rejection", "no such rule") is None:
            return {"accept": "rejection"}
        return {}

    async def needs(self, option: str, value: Any, nonsense: Any) -> None:
        """Raise `NotSupported` unless the server reads an optional field."""
        why = await self.server.lacks(option, value, nonsense)
        if why is not None:
            raise NotSupported(why)

    async def seeds_hold(self) -> bool:
        """Whether one request with a seed gives the same tokens twice, alone."""
        if self._seeds_hold is None:
            prompt = (await self.prompts())[1]
            ask = self.ask(prompt, temperature=1.0, seed=self.settings.seed + 1)
            try:
                first, again = await self.server.ask(ask), await self.server.ask(ask)
            except (NotSupported, Malformed):
                self._seeds_hold = False
            else:
                self._seeds_hold = first.keys == again.keys
        return self._seeds_hold
