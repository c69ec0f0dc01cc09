"""A replay of blocks at every token meets what an engine meets under any policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import replay
from emberline.batch import StepShape
from emberline.engine.trace import BlockTrace
from emberline.types import Request, SamplingParams
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts
from record_traces import blocks_at_every_token

from support.engines import make_engine, run
from support.paged import PrefixDrafter, PrefixTarget

DRAFTS = 4
TOKENS = 40
RISING = StepCosts(target=((1, 0, 2.0), (1, 20, 12.0)), draft=((1, 1, 0.1), (1, 4, 0.4)))
PLANNERS: dict[str, Callable[[], Planner]] = {
    "verify_all": VerifyAll,
    "threshold": lambda: Threshold(0.5),
    "causal_greedy": lambda: CausalGreedy(RISING),
    "lagged_top_k": lambda: LaggedTopK(RISING),
}


def drafter() -> PrefixDrafter:
    return PrefixDrafter(PrefixTarget(), DRAFTS, wrong_every=5, doubt_every=7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PLANNERS)
def test_step_by_step(name: str, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, max_tokens=TOKENS, seed=5, accept="coupled", ignore_eos=True
    )
    request = Request("r", (5, 3), params)
    recorder = drafter()
    (trace,) = blocks_at_every_token(make_engine(recorder.target, recorder), [request])
    assert len(trace.blocks) == TOKENS - DRAFTS - 1
    confidence = replay.calibrated([trace], DRAFTS, (1.0,) * DRAFTS)
    tape = replay.Tape.of([trace], confidence, every_token=True)

    drafts = drafter()
    engine = make_engine(drafts.target, drafts, planner=PLANNERS[name]())
    blocks: list[list[BlockTrace]] = []  # of each step
    engine.observer = lambda met: blocks.append(list(met))
    outputs = run(engine, [request])["r"].outputs

    planner = PLANNERS[name]()
    planner.depths(StepShape(2, 1, (0,), (0,)))  # the prompt's step, which drafts nothing
    policy, place, verified = replay.planned(planner), np.array([0]), []
    for met, output in list(zip(blocks, outputs, strict=True))[1:]:
        view = replay.View(
            (0,), tape.confidence[place], tape.num_drafted[place], tape.num_accepted[place]
        )
        decision = policy(view)
        emitted = np.minimum(decision.num_verified, view.num_accepted) + 1
        assert decision.depth == sum(len(block.confidence) for block in met)
        assert decision.num_verified.sum() == sum(block.num_verified for block in met)
        assert emitted.tolist() == [len(output.token_ids)]
        verified.append(int(decision.num_verified[0]))
        place, is_over = tape.after(place, emitted)
        if is_over[0]:
            break
    else:
        pytest.fail("the engine's steps ended before the recorded blocks")
    assert (min(verified) < DRAFTS) == (name != "verify_all")
