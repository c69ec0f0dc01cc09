"""A measurement from beginning to end: look at the server, then level after level.

Knows nothing of terminals and files: progress is told to an `Observer`, the result is a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from emberline.bench.acceptance import between
from emberline.bench.client import Client, RequestRecord, request_body
from emberline.bench.load import run_level
from emberline.bench.metrics import LevelRun
from emberline.bench.prompts import Prompt, PromptSet, random_prompts
from emberline.bench.server import ServedModel, Server, refusal, stops_the_run
from emberline.bench.settings import (
    BenchError,
    Level,
    LoadSettings,
    RandomPrompts,
    RequestSettings,
    ServerSettings,
)


class Observer(Protocol):
    """Is told how far a measurement is."""

    def level_begins(self, level: Level, load: LoadSettings) -> None:
        """A level's clock starts."""

    def request_ends(self, record: RequestRecord) -> None:
        """A request of the level is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a measurement is told."""

    server: ServerSettings
    request: RequestSettings
    load: LoadSettings
    prompts: PromptSet | RandomPrompts
    keep_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a measurement gave."""

    model: ServedModel
    prompts: PromptSet
    runs: tuple[LevelRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A server that takes the plan's requests, and what to send to it."""

    plan: Plan
    client: Client
    server: Server
    model: ServedModel
    prompts: PromptSet

    def bodies(self, prompts: Iterator[Prompt]) -> Iterator[bytes]:
        return _bodies(self.plan, prompts, self.model.name)


async def measure(plan: Plan, observer: Observer) -> Session:
    """Measure every level in turn; an interruption ends the level and the ones after it.

    One request is sent before anything is measured, to see that the server takes such requests.

    Raises:
        BenchError: the server cannot be reached or refuses what is asked.
    """
    client = Client(plan.server, keep_text=plan.keep_text)
    runs: list[LevelRun] = []
    try:
        async with Server(plan.server) as server:
            model = await server.model()
            prompts = await _accepted_prompts(client, plan, model.name)
            ready = _Ready(plan=plan, client=client, server=server, model=model, prompts=prompts)
            for number, level in enumerate(plan.load.levels):
                runs.append(await _level(ready, number, level, observer))
                if runs[-1].interrupted:
                    break
    finally:
        client.close()
    return Session(model=model, prompts=prompts, runs=tuple(runs))


async def _accepted_prompts(client: Client, plan: Plan, model: str) -> PromptSet:
    """Prompts that the server takes. Random ones are token ids where it takes these, else words."""
    if isinstance(plan.prompts, PromptSet):
        await _probe(client, plan, plan.prompts, model)
        return plan.prompts
    words = random_prompts(plan.prompts, plan.load.seed, as_ids=False)
    if plan.server.endpoint == "completions":
        ids = random_prompts(plan.prompts, plan.load.seed, as_ids=True)
        try:
            await _probe(client, plan, ids, model)
            return ids
        except BenchError as problem:
            note = f"the prompts are words, as token ids were refused: {problem}"
            words = replace(words, notes=(note,))
    await _probe(client, plan, words, model)
    return words


async def _probe(client: Client, plan: Plan, prompts: PromptSet, model: str) -> None:
    record = await client.send(next(_bodies(plan, prompts.warmup(0), model)))
    failure = record.failure
    if failure is not None and stops_the_run(failure):
        if failure.kind == "connect":
            raise BenchError(f"cannot reach {plan.server.root}: {failure.message}")
        raise BenchError(refusal(plan.server.url, failure.kind, failure.message))


def _bodies(plan: Plan, prompts: Iterator[Prompt], model: str) -> Iterator[bytes]:
    return (request_body(prompt, plan.server, plan.request, model) for prompt in prompts)


async def _level(ready: _Ready, number: int, level: Level, observer: Observer) -> LevelRun:
    """Warm up, measure, and read what the server counted meanwhile."""
    load = ready.plan.load
    if load.warmup:
        less = replace(load, num_requests=load.warmup, duration=None)
        bodies = ready.bodies(ready.prompts.warmup(number))
        warmed = await run_level(ready.client, level, less, bodies, lambda _record: None)
        if warmed.interrupted:
            return replace(warmed, records=())
    before = await ready.server.counters()
    observer.level_begins(level, load)
    bodies = ready.bodies(ready.prompts.measured(number))
    run = await run_level(ready.client, level, load, bodies, observer.request_ends)
    if run.interrupted or before is None:
        return run
    after = await ready.server.counters()
    return run if after is None else replace(run, counters=between(before, after))
