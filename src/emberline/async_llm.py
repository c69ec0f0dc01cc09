"""The front door for asyncio programs: generate, stream, chat, score, many at once. No HTTP.

Owns the life of a call's requests: whatever ends a call early aborts them. Must not know tensors.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from emberline.config import EngineConfig
from emberline.encoding import (
    Message,
    Prompt,
    chat_ids,
    encode,
    encode_pairs,
    encode_prediction,
)
from emberline.engine.async_engine import AsyncEngine
from emberline.llm import Completion, check_prompts, join_outputs, load_engine, one_choice
from emberline.scores import Scores, make_scores, num_alternatives, scoring_params
from emberline.types import Request, RequestOutput, SamplingParams

T = TypeVar("T")


class AsyncLLM:
    """Generate and score from asyncio; calls that run at the same time share the engine's steps.

    Loading takes seconds and blocks: do it before the event loop has others to serve, or in a
    thread. The engine runs in a thread of its own until `aclose`, or the end of `async with`.

    More calls than the engine's queue holds wait for their turn. Cancelling a call, or leaving a
    stream, aborts what it has asked for. One object belongs to one event loop.

    >>> async with AsyncLLM() as llm:                                     # doctest: +SKIP
    ...     answers = await asyncio.gather(llm.generate("One"), llm.generate("Two"))
    """

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = None,
        config: EngineConfig | None = None,
        *,
        progress: bool = True,
    ) -> None:
        loaded = load_engine(model, draft, config, progress=progress)
        self.tokenizer = loaded.tokenizer
        self.token_text = loaded.token_text
        self.name = loaded.name
        self.engine = AsyncEngine(loaded.engine, loaded.token_text)
        self._ids = itertools.count()
        # What is in flight may all have to wait at once: no more than the queue can hold.
        self._room = asyncio.Semaphore(self.engine.max_queue)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the engine after its current step; calls in flight end with an abort."""
        await asyncio.to_thread(self.engine.shutdown)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Completion]:
        """Continue a text or token ids; one answer a choice (`params.n`).

        Args:
            prompt: text or token ids.
            params: how to sample.
            prediction: what the answer will probably be, to draft from; it changes no answer.
            priority: lower runs earlier.
            timeout: seconds after which the answers end with what they have.

        Raises:
            InvalidRequest: the prompt or its options can never run.
            EngineStopped: the engine has failed or was closed.
        """
        ids = encode(self.tokenizer, prompt)
        predicted = encode_prediction(self.tokenizer, prediction)
        return await self._choices(ids, params, priority, timeout, predicted)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt, one output a step: deltas. Leaving the iterator aborts the request.

        Raises:
            InvalidRequest: it can never run, or asks for more than one choice.
            EngineStopped: the engine has failed or was closed.
        """
        ids = encode(self.tokenizer, prompt)
        request = Request(
            f"llm-{next(self._ids)}", ids, one_choice(params), priority=priority, timeout=timeout
        )
        async with self._room, aclosing(await self.engine.submit(request)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Completion:
        """Answer a conversation with the model's own chat template.

        Raises:
            InvalidRequest: it can never run, or asks for more than one choice.
            EngineStopped: the engine has failed or was closed.
        """
        ids = chat_ids(self.tokenizer, messages)
        [answer] = await self._choices(ids, one_choice(params), priority, timeout)
        return answer

    async def score(self, texts: Sequence[Prompt], top: int = 0, start: int = 0) -> list[Scores]:
        """Raw log-probabilities of every token of `texts`, as `LLM.score` gives them.

        Raises:
            InvalidRequest: a text, `top` or `start` can never be scored.
            EngineStopped: the engine has failed or was closed.
        """
        check_prompts(texts, "texts")
        ids = [encode(self.tokenizer, text) for text in texts]
        return await self._score(ids, top, [start] * len(ids))

    async def score_continuations(
        self, pairs: Sequence[tuple[Prompt, Prompt]], top: int = 0
    ) -> list[Scores]:
        """Raw log-probabilities of continuations, as `LLM.score_continuations` gives them.

        Raises:
            InvalidRequest: a prompt or a continuation has no token, or can never be scored.
            EngineStopped: the engine has failed or was closed.
        """
        ids, starts = encode_pairs(self.tokenizer, pairs)
        return await self._score(ids, top, starts)

    async def _choices(
        self,
        ids: tuple[int, ...],
        params: SamplingParams | None,
        priority: int = 0,
        timeout: float | None = None,
        prediction: tuple[int, ...] = (),
    ) -> list[Completion]:
        params = params or SamplingParams()
        requests = [
            Request(
                f"llm-{next(self._ids)}",
                ids,
                params,
                prediction=prediction,
                choice=choice,
                priority=priority,
                timeout=timeout,
                stream=False,
            )
            for choice in range(params.n)
        ]
        return await _together([self._complete(request) for request in requests])

    async def _complete(self, request: Request) -> Completion:
        async with self._room, aclosing(await self.engine.submit(request)) as outputs:
            return join_outputs([output async for output in outputs])

    async def _score(
        self, texts: Sequence[tuple[int, ...]], top: int, starts: Sequence[int]
    ) -> list[Scores]:
        width = num_alternatives(top, self.engine.vocab_size)
        pairs = list(zip(texts, starts, strict=True))
        options = [scoring_params(len(ids), width, start) for ids, start in pairs]
        answers = await _together(
            [self._choices(ids, own) for ids, own in zip(texts, options, strict=True)]
        )
        return [
            make_scores(ids, answer.prompt_logprobs, top=width, start=start, error=answer.error)
            for (ids, start), (answer,) in zip(pairs, answers, strict=True)
        ]


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; if one fails the others are cancelled, then its error raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
