"""Steps on the device under a planner that lags: its memory of them, and steps that fail."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from test_device_fuzz import alone, check_end, on_device

from emberline.batch import StepShape
from emberline.engine.device_flight import Landing, Landings
from emberline.engine.engine import Engine
from emberline.types import Request, SamplingParams
from emberline.verify.planner import LaggedTopK
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
        return Landing(numbers.clone(), numbers.numel())

    def give_back(self, landings: Iterable[Landing], event: object) -> None:
        for landing in landings:
            landing.memory.fill_(11)


class FailingPlanner(LaggedTopK):
    """Fails now and then when a step's confidences come."""

    def __init__(self, chance: random.Random, share: float, **options: int) -> None:
        super().__init__(COSTS, **options)  # type: ignore[arg-type]
        self.chance, self.share, self.num_failed = chance, share, 0

    def learn(
        self, shape: StepShape, confidence: torch.Tensor | None, num_drafted: torch.Tensor
    ) -> None:
        if self.chance.random() < self.share:
            self.num_failed += 1
            raise ArithmeticError("as if a step had failed")
        super().learn(shape, confidence, num_drafted)


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


def test_a_planner_keeps_nothing_that_is_overwritten() -> None:
    """A plan is made of what came back, wherever that lay."""
    shape = StepShape(2, 2, (1, 2), (5, 5))
    sure, lens = np.full((2, 5), 0.6, dtype=np.float32), np.array([5, 5])
    kept, fresh = LaggedTopK(COSTS), LaggedTopK(COSTS)
    plans: list[list[object]] = [[], []]
    for _ in range(6):
        for planner, made in zip((kept, fresh), plans, strict=True):
            depths = planner.depths(shape)
            made.append((depths, planner.device_plan(StepShape(2, 2, (1, 2), depths))))
            width = max(depths)
            drawn, count = sure[:, :width].copy(), np.minimum(lens, width)
            planner.learn(shape, torch.from_numpy(drawn), torch.from_numpy(count))
            if planner is kept:
                drawn.fill(np.nan)
                count.fill(7)
    assert plans[0] == plans[1]
