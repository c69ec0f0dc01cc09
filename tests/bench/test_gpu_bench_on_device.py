"""The benchmarks' script and policies in steps that run on the device."""

from __future__ import annotations

import pytest
import torch

from emberline.engine.engine import Engine
from emberline.types import Request, SamplingParams
from emberline.verify.planner import VerifyAll

from gpu.breakdown import run_steps
from gpu.scripted import Script
from gpu.workload import NO_DRAFT, SCHEDULED, THRESHOLD, VERIFY_ALL, Bench, Cell, generate_ids
from support.on_device import golden_engine, golden_runner

PROMPT = (7, 8, 9, 10, 11)


@pytest.fixture
def engine() -> Engine:
    engine = golden_engine("vanilla", on_device=True)
    engine.info["planner"] = "verify_all"
    script, target, drafter = Script(engine.vocab_size), engine.parts.target, engine.parts.drafter
    target.forward = script.speaking(target.forward)
    drafter.propose_block = script.drawing(drafter.propose_block)
    return engine


def test_the_device_says_the_script(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, seed=0, ignore_eos=True)
    engine.add(Request("r", PROMPT, params))
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            ids += output.token_ids
    script = Script(engine.vocab_size)
    assert ids == script.tokens(torch.arange(len(PROMPT), len(PROMPT) + 12)).tolist()
    assert engine.snapshot().num_accepted_tokens > 0


def test_policies_reach_the_device(engine: Engine) -> None:
    bench = Bench(engine, generate_ids(engine), [PROMPT], 12, least_prompts=1)
    everything, likely, nothing = (
        bench.run(Cell(2, policy, 0)) for policy in (VERIFY_ALL, THRESHOLD, NO_DRAFT)
    )
    assert nothing.drafts == 0
    assert 0 < likely.drafts / likely.block_steps < everything.drafts / everything.block_steps


def test_the_schedule_is_that_of_the_engine(engine: Engine) -> None:
    """Its planner ahead of the device knows the sizes of captured steps, the plain one does not."""
    scheduled = golden_runner(engine).planner = VerifyAll()
    bench = Bench(engine, generate_ids(engine), [PROMPT], 3, least_prompts=1)
    bench.run(Cell(1, THRESHOLD, 0))
    assert golden_runner(engine).planner is not scheduled
    bench.run(Cell(1, SCHEDULED, 0))
    assert golden_runner(engine).planner is scheduled


def test_steps_are_broken_down_where_they_overlap(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    steps = run_steps(engine, [PROMPT, PROMPT], params, 4)
    assert len(steps.walls) == 4
    assert steps.emitted >= 8
    assert not engine.has_work
