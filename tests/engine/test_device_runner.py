"""Steps on the device give the answers of plain steps, whoever stands beside whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from emberline.batch import ForwardBatch, TargetOutput
from emberline.engine.device_buckets import stands_in
from emberline.engine.device_step import Bucket
from emberline.engine.engine import Engine
from emberline.engine.readers import Readers
from emberline.layout import Scored
from emberline.types import FinishReason, Request, SamplingParams
from emberline.verify.planner import DevicePlanner, LaggedTopK, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.engines import Answer, run
from support.on_device import GOLDEN, golden_engine, golden_runner

PROMPTS = [
    t["prompt_ids"] for t in json.loads((GOLDEN / "vanilla/trace.json").read_text())["traces"]
]
COSTS = StepCosts(target=((1, 1, 1.0), (1, 8, 1.2), (4, 4, 1.1), (4, 32, 4.0)), draft=())


def requests(num_tokens: int = 7) -> list[Request]:
    """Greedy; the target's own draws; coins, in a prompt of its own length each."""
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, seed=1, max_tokens=num_tokens - 3, ignore_eos=True),
        SamplingParams(
            temperature=1.1, seed=2, accept="rejection", max_tokens=num_tokens, ignore_eos=True
        ),
    ]
    return [
        Request(f"r{i}", tuple(PROMPTS[i][: 40 - 13 * i]), option)
        for i, option in enumerate(params)
    ]


def compare(got: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert got[name].token_ids == answer.token_ids, name
        assert got[name].last.finish_reason is answer.last.finish_reason
        for mine, other in zip(got[name].logprobs, answer.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert (mine.rank, mine.top_ids) == (other.rank, other.top_ids)


@pytest.mark.parametrize("draft", [None, "vanilla", "dflash"])
def test_answers_are_those_of_plain_steps(draft: str | None) -> None:
    device = golden_engine(draft, on_device=True, prefill_chunk=16)
    got = run(device, requests())
    expected = run(golden_engine(draft, on_device=False, prefill_chunk=16), requests())
    compare(got, expected)
    if draft is not None:
        counts, plain = got["r0"].last.stats, expected["r0"].last.stats
        assert counts.num_accepted == plain.num_accepted > 0


@pytest.mark.parametrize(
    "planner", [lambda: Threshold(0.4), lambda: LaggedTopK(COSTS)], ids=["threshold", "lagged"]
)
@pytest.mark.parametrize("layout", ["static", "compact"])
def test_fewer_verified_drafts_change_no_answer(
    planner: Callable[[], DevicePlanner], layout: str
) -> None:
    device = golden_engine("vanilla", on_device=True, planner=planner(), layout=layout)
    got = run(device, requests()[:2])
    compare(got, run(golden_engine(None, on_device=False), requests()[:2]))


def test_plain_steps_stand_beside_those_of_the_device() -> None:
    """A penalty looks at what was emitted: its request goes by plain steps."""
    crowd = requests()[:2]
    penalised = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1.5, logprobs=0
    )
    crowd.append(Request("penalised", tuple(PROMPTS[3][:20]), penalised))
    got = run(golden_engine("vanilla", on_device=True, planner=VerifyAll()), crowd)
    compare(got, run(golden_engine("vanilla", on_device=False), crowd))


def test_a_step_that_is_waited_for_says_the_same() -> None:
    one = requests()[:1]
    got = run(golden_engine("vanilla", on_device=True, overlap=False), one)
    compare(got, run(golden_engine("vanilla", on_device=False), one))


def test_an_answer_goes_to_the_end_of_the_context() -> None:
    """Steps in flight may reach past it, as far as the host knows; pages end with it."""
    prompt = (PROMPTS[0] * 20)[:240]  # and 16 more make whole pages
    one = [Request("r", tuple(prompt), SamplingParams(temperature=0, ignore_eos=True))]
    got = run(golden_engine("vanilla", on_device=True), one)
    compare(got, run(golden_engine("vanilla", on_device=False), one))
    assert len(got["r"].token_ids) == 16


def test_a_planner_that_would_not_reach_the_device_is_refused() -> None:
    engine = golden_engine("vanilla", on_device=True)
    with pytest.raises(ValueError, match="ahead"):
        engine.use_planner(VerifyAll(), "verify_all")
    ahead = Threshold(0.5)
    engine.use_planner(Threshold(0.5), "threshold", ahead)
    assert engine.runner is not None
    assert engine.runner.planner is ahead


def spoil(engine: Engine, call: int) -> None:
    """From a call of the target on, the first row of its logits is NaN."""
    target, calls = engine.parts.target, iter(range(1000))
    forward = target.forward

    def spoilt(batch: ForwardBatch) -> TargetOutput:
        output = forward(batch)
        if next(calls) < call:
            return output
        logits = output.logits.clone()
        logits[0] = torch.nan
        return replace(output, logits=Scored(logits))

    target.forward = spoilt  # type: ignore[method-assign]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a captured step runs no Python")
def test_a_request_without_a_distribution_fails_alone() -> None:
    engine = golden_engine("vanilla", on_device=True)
    crowd = [replace(r, params=replace(r.params, logprobs=0)) for r in requests()[:2]]
    spoil(engine, 1)
    got = run(engine, crowd)
    assert got["r0"].last.finish_reason is FinishReason.ERROR
    alone = run(golden_engine("vanilla", on_device=False), crowd)
    assert got["r0"].token_ids == alone["r0"].token_ids[: len(got["r0"].token_ids)]
    assert got["r1"].token_ids == alone["r1"].token_ids[: len(got["r1"].token_ids)]
    assert engine.snapshot().num_running == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there `choose` has captured shapes")
def test_steps_in_larger_shapes_that_stand_in_say_the_same() -> None:
    """A step without drafts in one that draws blocks, few requests among nobody's, no coins."""
    engine = golden_engine("vanilla", on_device=True, prefill_chunk=16)
    runner = golden_runner(engine)
    wanted: list[Bucket] = []

    def largest(bucket: Bucket) -> Bucket:
        wanted.append(bucket)
        reqs = runner.sizes.prompts if bucket.chunk else runner.sizes.reqs
        most = replace(bucket, num_reqs=reqs[-1], num_pages=runner.sizes.pages[-1])
        whole = runner.sizes.whole(replace(most, coins=True, num_top=5))
        assert stands_in(whole, bucket)
        return whole

    runner._choose = largest  # type: ignore[method-assign]
    crowd = [
        replace(one, params=replace(one.params, speculate=i > 0))
        for i, one in enumerate(requests(8)[:2])
    ]
    got = run(engine, crowd[:1]) | run(engine, crowd[1:])
    compare(got, run(golden_engine(None, on_device=False), crowd))
    assert {bool(bucket.num_drafts) for bucket in wanted if not bucket.chunk} == {True, False}


def test_readers_are_told_in_rounds_whoever_comes_and_goes() -> None:
    """First tokens at once, then all of it when the time has come, a new plan or an old one."""
    engine, now = golden_engine(None, on_device=True), [0.0]
    engine._readers = Readers(lambda: now[0])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    told: dict[str, list[int]] = {"a": [], "b": []}
    rounds = []
    for step in range(100):
        if step in (0, 4):  # the second changes the plan
            name = "a" if step == 0 else "b"
            engine.add(Request(name, tuple(PROMPTS[0][:20]), params))
        if step == 12:
            now[0] += 1.0
        outputs = engine.step()
        rounds.append({output.request_id: len(output.token_ids) for output in outputs})
        for output in outputs:
            told[output.request_id] += output.token_ids
        if not engine.has_work:
            break
    first = [names for names in rounds[:12] if names]
    assert first == [{"a": 1}, {"b": 1}]
    assert set(rounds[12]) == {"a", "b"}
    assert sum(bool(names) for names in rounds[13:]) == 2  # the ends
    expected = run(
        golden_engine(None, on_device=False), [Request("a", tuple(PROMPTS[0][:20]), params)]
    )
    assert told["a"] == told["b"] == list(expected["a"].token_ids)
