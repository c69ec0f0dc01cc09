"""Whole engines over test doubles, and running them to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from emberline.cache.page_pool import PagePool
from emberline.config import CacheConfig, EngineConfig, LayoutKind, SchedulerConfig
from emberline.drafters.base import Drafter
from emberline.engine.engine import Engine
from emberline.engine.step import StepParts
from emberline.sampling.keys import KeyedDraws
from emberline.types import Request, RequestOutput, SamplingParams, TokenLogprobs
from emberline.verify.planner import Planner, VerifyAll

from support.paged import PrefixTarget

EOS = 1


def make_engine(
    target: PrefixTarget,
    drafter: Drafter | None = None,
    *,
    planner: Planner | None = None,
    layout: LayoutKind = "compact",
    num_pages: int = 256,
    eos_ids: Iterable[int] = (EOS,),
    prefix_cache: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **scheduler: int,
) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(
            page_size=target.page_size,
            num_tokens=num_pages * target.page_size,
            prefix_cache=prefix_cache,
        ),
        scheduler=SchedulerConfig(**{"max_num_reqs": 8, **scheduler}),
    ).on("cpu")
    parts = StepParts(
        target=target,
        drafter=drafter,
        planner=planner or VerifyAll(),
        draws=KeyedDraws(),
        history=torch.zeros(config.scheduler.max_num_reqs, target.max_model_len, dtype=torch.int64),
        page_size=target.page_size,
        layout=layout,
        eos_ids=frozenset(eos_ids),
    )
    return Engine(parts, PagePool(num_pages + 1, target.page_size), config, clock=clock)


class Letters:
    """A text stream in which token i is the letter i."""

    def __init__(self, params: SamplingParams) -> None:
        self.stop = params.stop
        self.text = ""
        self.taken = 0
        self.watches = bool(self.stop)

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            assert self.push(token_id) is None

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        self.text += chr(97 + token_id)
        for stop in self.stop if check_stop else ():
            if self.text.endswith(stop):
                self.text = self.text.removesuffix(stop)
                return stop
        return None

    def take(self, final: bool = False) -> str:
        hold = 0 if final else max((len(s) - 1 for s in self.stop), default=0)
        end = max(self.taken, len(self.text) - hold)
        delta, self.taken = self.text[self.taken : end], end
        return delta


@dataclass
class Answer:
    """A request's deltas, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


def run(
    engine: Engine,
    requests: Iterable[Request],
    *,
    text: Callable[[SamplingParams], object] | None = None,
    between: Callable[[int], None] | None = None,
    max_steps: int = 5000,
) -> dict[str, Answer]:
    """Step until idle. `between` runs after every step with its number."""
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add(request, text(request.params) if text else None)  # type: ignore[arg-type]
        answers[request.request_id] = Answer()
    for number in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            collect(answers.setdefault(output.request_id, Answer()), output)
        if between:
            between(number)
    assert not engine.has_work, "the engine did not come to rest"
    assert engine.snapshot().kv_usage == 0
    return answers


def collect(answer: Answer, output: RequestOutput) -> None:
    assert not (answer.outputs and answer.last.finished), "output after the end"
    answer.token_ids += output.token_ids
    if output.logprobs is not None:
        assert [r.token_id for r in output.logprobs] == list(output.token_ids)
        answer.logprobs += output.logprobs
    answer.text += output.text
    answer.outputs.append(output)
    assert output.num_output_tokens == len(answer.token_ids)


def ask(
    engine: Engine, prompt: Iterable[int], params: SamplingParams | None = None, **kwargs: object
) -> Answer:
    """One request, alone."""
    request = Request("r", tuple(prompt), params or SamplingParams(temperature=0, max_tokens=20))
    return run(engine, [request], **kwargs)["r"]  # type: ignore[arg-type]
