"""Verification of changing width, in whole engines: faults by their numbers in docs/faults.md."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from emberline.batch import Admission, DraftContext, DraftProposal, StepShape
from emberline.types import Request, SamplingParams
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.doubles import ScriptedPlanner
from support.engines import Answer, ask, collect, make_engine, run
from support.paged import PrefixDrafter, PrefixTarget

PROMPT = [5, 9, 3, 7, 2]
# Twelve drafts beside any number of anchors are cheap, more are not.
COSTS = StepCosts(
    target=((1, 1, 1.0), (1, 13, 1.1), (1, 40, 4.0), (64, 64, 2.0), (64, 76, 2.2), (64, 300, 30.0)),
    draft=((1, 4, 0.05), (64, 4, 0.2)),
)
SCHEDULED = [CausalGreedy, LaggedTopK]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


class ByLoad:
    """Draws and verifies as many drafts as a function of the number of requests that decode."""

    def __init__(self, depth: Callable[[int], int]) -> None:
        self.depth = depth
        self.asked: list[tuple[int, int]] = []  # requests that may draft, drafts of each

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        num_reqs = sum(limit > 0 for limit in shape.draft_limits)
        depth = self.depth(num_reqs)
        self.asked.append((num_reqs, depth))
        return tuple(min(limit, depth) for limit in shape.draft_limits)

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        return VerifyAll().admit(proposal, shape)  # what was drawn, as the step says it


@pytest.mark.parametrize("prompt_len", range(119, 128))
def test_no_window_runs_past_the_context_limit_whatever_the_planner_wants(prompt_len):
    """E02: `PrefixTarget` fails on a position at the limit; blocks of eight reach over it."""
    target = PrefixTarget(max_model_len=128)
    prompt = [(3 * i) % 31 for i in range(prompt_len)]
    expected = target.greedy(prompt, 128 - prompt_len)
    planners: list[Planner] = [
        *(kind(COSTS) for kind in SCHEDULED),
        ScriptedPlanner(lambda ids, sure: ids[0] % 9),
        ScriptedPlanner(lambda ids, sure: 8),
    ]
    for planner in planners:
        engine = make_engine(target, PrefixDrafter(target, 8, doubt_every=3), planner=planner)
        params = SamplingParams(temperature=0, ignore_eos=True)
        assert ask(engine, prompt, params).token_ids == expected


@pytest.mark.parametrize("planner", SCHEDULED)
def test_many_that_end_about_together_all_end(planner):
    """E04: 64 of equal lengths, then ever fewer; a step emits a token of each, to the last."""
    target = PrefixTarget()
    engine = make_engine(
        target,
        PrefixDrafter(target, 4, wrong_every=3, doubt_every=5),
        planner=planner(COSTS),
        max_num_reqs=64,
        max_num_tokens=1024,
        num_pages=1000,
    )
    requests = [Request(f"r{i}", (i % 31, 3, i % 7), greedy(16 + i % 3)) for i in range(64)]
    answers = run(engine, requests, max_steps=20)
    for request in requests:
        expected = target.greedy(list(request.prompt_token_ids), request.params.max_tokens)
        assert answers[request.request_id].token_ids == expected
    assert engine.snapshot().num_accepted_tokens > 0


@pytest.mark.parametrize("layout", ["static", "compact"])
def test_what_runs_and_what_is_counted_is_what_was_scripted(layout):
    """E05, E16: the work of a step is its budget, and the counts are sums of real widths."""
    target = PrefixTarget()
    script = [3, 0, 5, 1, 0, 0, 7, 2, 6, 4]
    steps = iter(script)
    planner = ScriptedPlanner(lambda ids, sure: next(steps))
    engine = make_engine(target, PrefixDrafter(target, 7), planner=planner, layout=layout)
    count = 1 + sum(script) + len(script)
    # Some more tokens, so that no limit cuts a block; the request is then left.
    engine.add(Request("r", tuple(PROMPT), greedy(count + 20)))
    emitted: list[int] = []
    for _ in range(1 + len(script)):
        (output,) = engine.step()
        emitted.append(len(output.token_ids))
    assert emitted == [1, *(1 + width for width in script)]
    assert target.num_tokens_run == [len(PROMPT), *(1 + width for width in script)]
    assert target.num_scored_run == [1, *(1 + width for width in script)]
    stats = output.stats
    assert (stats.num_steps, stats.num_verified, stats.num_accepted) == (10, 28, 28)
    assert stats.num_drafted == 70
    assert stats.verified_per_pos == tuple(sum(width > k for width in script) for k in range(7))
    assert stats.acceptance_rate == 1.0
    engine.abort("r")
    engine.step()


def test_where_the_planner_wants_no_drafts_nobody_drafts():
    """E08: the drafter is not even asked; and once it is again, nothing of before is used."""
    target = PrefixTarget()
    drafter = PrefixDrafter(target, 5, wrong_every=4)
    planner = ByLoad(lambda num_reqs: 0 if num_reqs >= 4 else 5)
    engine = make_engine(target, drafter, planner=planner)
    five = [Request(f"r{i}", (i + 2, 5), greedy(20)) for i in range(5)]
    for key, answer in run(engine, five).items():
        expected = target.greedy([int(key[1:]) + 2, 5], 20)
        assert answer.token_ids == expected
        assert (answer.last.stats.num_drafted, answer.last.stats.num_steps) == (0, 19)
    assert drafter.num_proposals == 0
    mixed = [Request(f"r{i}", (i + 2, 5), greedy(8 if i < 2 else 30)) for i in range(5)]
    for key, answer in run(engine, mixed).items():
        index = int(key[1:])
        assert answer.token_ids == target.greedy([index + 2, 5], 8 if index < 2 else 30)
        assert (answer.last.stats.num_accepted > 0) == (index >= 2)
    assert drafter.num_proposals > 0


class Noting(PrefixDrafter):
    """Remembers for how many requests it drafted how many tokens each."""

    drawn: tuple[tuple[int, int], ...] = ()

    def propose(self, context: DraftContext) -> DraftProposal:
        self.drawn += ((len(context.anchors), context.num_drafts),)
        return super().propose(context)


@pytest.mark.parametrize("layout", ["static", "compact"])
def test_blocks_shrink_as_the_load_grows_and_grow_again(layout):
    """E10: from one request to twenty and back, with blocks of 6, 4 and 2."""
    target = PrefixTarget()
    planner = ByLoad(lambda num_reqs: 6 if num_reqs <= 3 else 4 if num_reqs <= 9 else 2)
    drafter = Noting(target, 6, wrong_every=5)
    engine = make_engine(
        target,
        drafter,
        planner=planner,
        layout=layout,
        max_num_reqs=20,
        num_pages=600,
    )
    requests = [Request(f"r{i}", tuple(range(2 + i % 5, 6 + i)), greedy(40)) for i in range(20)]
    answers = {request.request_id: Answer() for request in requests}
    coming = iter(requests)
    for _ in range(400):
        for request in [next(coming, None), next(coming, None)]:
            if request is not None:
                engine.add(request)
        for output in engine.step() if engine.has_work else ():
            collect(answers[output.request_id], output)
    assert not engine.has_work
    for request in requests:
        expected = target.greedy(list(request.prompt_token_ids), 40)
        assert answers[request.request_id].token_ids == expected
    assert all(width <= planner.depth(num_reqs) for num_reqs, width in drafter.drawn)
    seen = [depth for num_reqs, depth in planner.asked if num_reqs]
    assert {2, 4, 6} <= {*seen}
    assert 6 in seen[seen.index(2) :], "the load went down again"


@pytest.mark.parametrize("planner", [VerifyAll, *(lambda k=k: k(COSTS) for k in SCHEDULED)])
@pytest.mark.parametrize("layout", ["static", "compact"])
def test_prompts_of_very_different_lengths_share_steps(planner, layout):
    """E19: 3, 50 and 200 tokens, whose blocks are accepted to different lengths."""
    target = PrefixTarget(max_model_len=512, num_slots=8192)
    lengths = [3, 50, 200, 1, 121]
    starts = list(accumulate(lengths, initial=0))
    requests = [
        Request(f"r{n}", tuple((7 * i) % 31 for i in range(start, start + n)), greedy(40))
        for n, start in zip(lengths, starts, strict=False)
    ]
    engine = make_engine(
        target,
        PrefixDrafter(target, 6, wrong_every=3, doubt_every=4),
        planner=planner(),
        layout=layout,
        num_pages=512,
        prefill_chunk=64,
    )
    answers = run(engine, requests)
    for request in requests:
        expected = target.greedy(list(request.prompt_token_ids), 40)
        assert answers[request.request_id].token_ids == expected
    assert len({answer.last.stats.num_steps for answer in answers.values()}) > 1
