"""Steps on the device under a planner that lags: its memory of them, and steps that fail."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from test_device_fuzz import alone, check_end, on_device

from emberline.batch import StepShape
from emberline.engine.device_flight import Landing, Landings
from emberline.engine.engine import Engine
from emberline.types import Request, SamplingParams
from emberline.verify.planner import DevicePlan, LaggedTopK, Numbers
from emberline.verify.step_cost import StepCosts

from support.bucketed import BucketDrafter, BucketTarget
from support.engines import Answer, Letters, collect, make_engine
from support.on_device import golden_runner
from support.triton_kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the doubles run on the host")
VOCAB = 23
COSTS = StepCosts(
    target=((1, 1, 1.0), (1, 4, 1.1), (1, 8, 2.0), (4, 4, 1.5), (4, 12, 2.0), (4, 24, 6.0)),
    draft=((1, 2, 0.05), (1, 5, 0.4), (4, 2, 0.1), (4, 5, 0.8)),
)


class OverwrittenLandings(Landings):
    """Memory that the next step overwrites as soon as it is given back."""

    def __init__(self) -> None:
        super().__init__(is_cuda=False)

    def bring(self, numbers: torch.Tensor) -> Landing:
        return Landing.on(numbers.clone())

    def give_back(self, landings: Iterable[Landing], event: object) -> None:
        for landing in landings:
            landing.numbers.fill_(11)


class KeptLandings(OverwrittenLandings):
    """Memory that nobody else ever gets."""

    def give_back(self, landings: Iterable[Landing], event: object) -> None:
        pass


class FailingPlanner(LaggedTopK):
    """Fails now and then when a step's confidences come."""

    def __init__(self, chance: random.Random, share: float, **options: int) -> None:
        super().__init__(COSTS, **options)  # type: ignore[arg-type]
        self.chance, self.share, self.num_failed = chance, share, 0

    def learn(self, shape: StepShape, confidence: Numbers | None, num_drafted: Numbers) -> None:
        if self.chance.random() < self.share:
            self.num_failed += 1
            raise ArithmeticError("as if a step had failed")
        super().learn(shape, confidence, num_drafted)


class NotedPlanner(LaggedTopK):
    """Remembers what it planned."""

    def __init__(self) -> None:
        super().__init__(COSTS)
        self.plans: list[DevicePlan] = []

    def device_plan(self, shape: StepShape) -> DevicePlan:
        self.plans.append(super().device_plan(shape))
        return self.plans[-1]


def any_request(chance: random.Random, name: str) -> Request:
    """Ends anywhere, so that blocks are cut near it."""
    params = SamplingParams(
        temperature=chance.choice([0.0, 0.9]),
        seed=chance.randrange(100),
        max_tokens=chance.randrange(1, 20),
        ignore_eos=chance.random() < 0.8,
        speculate=chance.random() < 0.9,
    )
    prompt = chance.choices(range(VOCAB), k=chance.choice([1, 3, 9]))
    return Request(name, tuple(prompt), params)


def lagged_engine(chance: random.Random, target: BucketTarget, share: float) -> Engine:
    planner = FailingPlanner(chance, share, every=chance.choice([1, 3, 16]))
    engine = make_engine(
        target,
        BucketDrafter(target, num_drafts=5, noise=1.0, doubt_every=chance.choice([2, 3, 5])),
        prefill_chunk=chance.choice([3, 64]),
        max_num_reqs=4,
        max_verify_tokens=chance.choice([5, 1024]),
    )
    on_device(engine, planner, overlap=chance.random() < 0.8)
    golden_runner(engine)._landings = OverwrittenLandings()
    return engine


@pytest.mark.parametrize(("seed", "share"), [(0, 0.0), (2, 0.15)])
def test_requests_that_come_and_go_end_as_if_alone(seed: int, share: float) -> None:
    """Blocks of any depth and limit follow each other; a step that fails takes nobody along."""
    chance = random.Random(seed)
    target = BucketTarget(VOCAB, scale=1.5, max_model_len=40, page_size=4)
    engine = lagged_engine(chance, target, share)
    to_come = [any_request(chance, f"r{i}") for i in range(6)]
    requests, answers = list(to_come), dict[str, Answer]()
    while engine.has_work or to_come:
        for _ in range(chance.choice([0, 0, 1, 3])):
            if to_come:
                request = to_come.pop()
                answers[request.request_id] = Answer()
                engine.add(request, Letters(request.params))
        try:
            outputs = engine.step()
        except ArithmeticError:
            continue
        for output in outputs:
            collect(answers[output.request_id], output)
        engine._scheduler.check()
    for request in requests:
        check_end(request, answers[request.request_id], alone(request, target))
    planner = golden_runner(engine).planner
    assert isinstance(planner, FailingPlanner)
    assert bool(planner.num_failed) == bool(share)


def test_plans_are_made_of_what_came_back_whatever_becomes_of_its_memory() -> None:
    plans = []
    for landings in (KeptLandings(), OverwrittenLandings()):
        target = BucketTarget(VOCAB, scale=1.5, max_model_len=40, page_size=4)
        engine = make_engine(
            target, BucketDrafter(target, num_drafts=5, noise=1.0, doubt_every=2), max_num_reqs=4
        )
        planner = NotedPlanner()
        on_device(engine, planner, overlap=True)
        golden_runner(engine)._landings = landings
        for i in range(4):
            params = SamplingParams(temperature=0.9, seed=i, max_tokens=30, ignore_eos=True)
            engine.add(Request(f"{i}", (1, 2, 3), params), Letters(params))
        while engine.has_work:
            engine.step()
        plans.append(planner.plans)
    assert plans[0] == plans[1]
    assert len({plan.budget for plan in plans[0]}) > 3, "the costs were meant to change plans"


def test_steps_without_requests_do_nothing() -> None:
    target = BucketTarget(VOCAB, scale=1.5, max_model_len=40, page_size=4)
    engine = make_engine(target, BucketDrafter(target, num_drafts=5, noise=1.0))
    on_device(engine, NotedPlanner(), overlap=True)
    assert [engine.step() for _ in range(3)] == [[], [], []]
    engine.add(Request("a", (1, 2), SamplingParams(max_tokens=9, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert [engine.step() for _ in range(3)] == [[], [], []]
