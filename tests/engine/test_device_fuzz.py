"""Random requests through steps on the device: each ends as if it were alone, in plain steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from emberline.drafters.base import Drafter
from emberline.engine.device_runner import make_runner
from emberline.engine.engine import Engine
from emberline.types import FinishReason, Request, SamplingParams
from emberline.verify.planner import DevicePlanner, LaggedTopK, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.bucketed import BucketDrafter, BucketTarget
from support.engines import Answer, Letters, collect, make_engine
from support.triton_kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the doubles run on the host")
VOCAB, EOS = 23, 1
STEM = [(7 * i + 3) % VOCAB for i in range(14)]
COSTS = StepCosts(
    target=((1, 1, 1.0), (1, 4, 1.1), (1, 8, 2.0), (4, 4, 1.5), (4, 12, 2.0), (4, 24, 6.0)),
    draft=((1, 4, 0.05), (4, 4, 0.1)),
)
DRAFTERS: dict[str, Callable[[BucketTarget], Drafter]] = {
    "right": lambda target: BucketDrafter(target, num_drafts=3, doubt_every=4),
    "noisy": lambda target: BucketDrafter(target, num_drafts=5, noise=2.0, doubt_every=3),
    "sure": lambda target: BucketDrafter(target, num_drafts=4, wrong_every=3, doubts=False),
}
PLANNERS: dict[str, Callable[[], DevicePlanner]] = {
    "all": VerifyAll,
    "threshold": lambda: Threshold(0.5),
    "lagged": lambda: LaggedTopK(COSTS),
}


def any_params(chance: random.Random) -> SamplingParams:
    """Mostly what the device takes; penalties and scored prompts need the plain step."""
    options: dict[str, object] = {
        "temperature": chance.choice([0.0, 0.0, 0.8, 1.2]),
        "seed": chance.choice([chance.randrange(1000), 2**64 - 1, -5]),
        "max_tokens": chance.choice([1, 2, 3, 9, 14, None]),
        "ignore_eos": chance.random() < 0.7,
        "logprobs": chance.choice([None, None, 0, 3]),
        "speculate": chance.random() < 0.85,
        "accept": chance.choice(["auto", "auto", "rejection"]),
    }
    if chance.random() < 0.2:
        options["stop_token_ids"] = chance.sample(range(VOCAB), 3)
    if chance.random() < 0.15:
        options["repetition_penalty"] = 1.3
    if chance.random() < 0.15:
        options["prompt_logprobs"] = 1
    return SamplingParams(**options)  # type: ignore[arg-type]


def any_request(chance: random.Random, name: str) -> Request:
    tail = chance.choices(range(VOCAB), k=chance.choice([1, 1, 2, 5, 9]))
    prompt = (*STEM[: chance.choice([0, 0, 4, 9, 14])], *tail)
    return Request(name, prompt, any_params(chance), priority=chance.choice([0, 0, 0, 1]))


def on_device(engine: Engine, planner: DevicePlanner, *, overlap: bool) -> None:
    """Its steps by a runner, kernel by kernel."""
    parts = engine.parts
    runner = make_runner(
        parts.target, parts.drafter, planner, engine.config, device=DEVICE, capture=False
    )  # fmt: skip
    engine.use_runner(runner, overlap=overlap)


def alone(request: Request, target: BucketTarget) -> Answer:
    """What a request says in plain steps, without drafts, cache and neighbours."""
    engine = make_engine(target, num_pages=40, prefix_cache=False)
    engine.add(request, Letters(request.params))
    answer = Answer()
    while engine.has_work:
        for output in engine.step():
            collect(answer, output)
    return answer


def check_end(request: Request, got: Answer, expected: Answer) -> None:
    assert got.last.finished
    count, ended = len(got.token_ids), got.last.finish_reason
    assert len(got.logprobs) == (count if request.params.logprobs is not None else 0)
    if not (request.params.greedy or request.params.coupled):
        return  # its draws are those of the drafts that it met
    if ended is not FinishReason.ABORT:
        assert expected.last.finish_reason is ended
    if ended not in (FinishReason.ABORT, FinishReason.ERROR):
        assert count == len(expected.token_ids)
        assert got.last.stop_reason == expected.last.stop_reason
    assert got.token_ids == expected.token_ids[:count]
    for mine, other in zip(got.logprobs, expected.logprobs, strict=False):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
        assert (mine.token_id, mine.rank, mine.top_ids) == (
            other.token_id, other.rank, other.top_ids
        )  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "drafter", "planner"),
    [(23, "right", "lagged"), (1, "noisy", "threshold"), (12, "sure", "all")],
)
def test_six_requests_of_any_kind_end_as_if_alone(seed: int, drafter: str, planner: str) -> None:
    chance = random.Random(seed)
    target = BucketTarget(
        VOCAB,
        scale=1.5,
        max_model_len=40,
        page_size=chance.choice([1, 2, 4, 8]),
        window=chance.choice([None, 9]),
    )
    engine = make_engine(
        target,
        DRAFTERS[drafter](target),
        # A few of them fit, so that some give way; or pages are taken ahead.
        num_pages=chance.choice([70, 400]) // target.page_size,
        layout=chance.choice(["static", "compact"]),
        prefill_chunk=chance.choice([3, 8, 64]),
        max_num_reqs=chance.choice([3, 4]),
        max_num_tokens=chance.choice([4, 64]),
        max_verify_tokens=chance.choice([3, 1024]),
    )
    on_device(engine, PLANNERS[planner](), overlap=chance.random() < 0.8)
    requests = {f"r{i}": any_request(chance, f"r{i}") for i in range(6)}
    broken = requests["r3"]  # the model says NaN after its first few tokens
    path = alone(broken, target).token_ids
    cut = chance.randrange(len(path))
    target.overrides[(*broken.prompt_token_ids, *path[:cut])] = torch.full((VOCAB,), torch.nan)

    to_come = list(requests.values())
    answers: dict[str, Answer] = {}
    for _ in range(400):
        for _ in range(chance.choice([0, 1, 3])):
            if to_come:
                request = to_come.pop()
                answers[request.request_id] = Answer()
                engine.add(request, Letters(request.params))
        if answers and chance.random() < 0.05:
            engine.abort(chance.choice(list(answers)))
        for output in engine.step():
            collect(answers[output.request_id], output)
        engine._scheduler.check()
        if not engine.has_work and not to_come:
            break
    assert not engine.has_work
    for key, request in requests.items():
        check_end(request, answers[key], alone(request, target))
    assert engine.snapshot().kv_usage == 0
