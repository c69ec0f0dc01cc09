"""Replaying policies: what the simulation promises, on made-up blocks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import replay
import scheduler_sim
from emberline.engine.trace import BlockTrace, RequestTrace, read_traces, samples
from emberline.verify.calibration import fit, sigmoid
from emberline.verify.outlook import PROBE_EVERY
from emberline.verify.planner import CausalGreedy, LaggedTopK, VerifyAll
from emberline.verify.step_cost import StepCosts
from replay import Decision, Point, Policy, Tape, View, no_draft, planned
from roofline import Roofline

import record

DRAFTS = 4
FLAT = StepCosts(target=((1, 1, 1.0), (1, 1000, 1.0)), draft=())
"""Verifying is free."""
LINEAR = StepCosts(target=((1, 0, 1.0), (1, 100, 11.0)), draft=((1, 1, 0.02), (1, 4, 0.05)))
"""A step costs ten tokens, and each of its own."""
CLIFF = StepCosts(
    target=((1, 1, 1.0), (1, 16, 1.0), (1, 17, 2.0), (1, 32, 2.0), (1, 33, 3.0), (1, 200, 13.0)),
    draft=((1, 1, 0.1), (1, 4, 0.2)),
)
STEEP = StepCosts(target=((1, 1, 1.0), (1, 1000, 1000.0)), draft=((1, 1, 0.5), (1, 4, 2.0)))
"""A token costs what it brings, and drafting comes on top: no draft can pay."""
SCHEDULED: tuple[type[CausalGreedy] | type[LaggedTopK], ...] = (CausalGreedy, LaggedTopK)


def traces(count: int = 12, blocks: int = 25, seed: int = 0) -> list[RequestTrace]:
    """Answers whose blocks survive as their confidences say."""
    rng = np.random.default_rng(seed)

    def block(name: str) -> BlockTrace:
        confidence = rng.beta(4, 2, DRAFTS)
        stood = rng.random(DRAFTS) < confidence
        return BlockTrace(name, tuple(confidence), DRAFTS, int(np.cumprod(stood).sum()))

    names = [f"prompt/{i}" for i in range(count)]
    return [RequestTrace(name, 1.0, tuple(block(name) for _ in range(blocks))) for name in names]


def tape(found: Sequence[RequestTrace] | None = None, *, every_token: bool = False) -> Tape:
    found = traces() if found is None else found
    confidence = replay.calibrated(found, DRAFTS, (1.0,) * DRAFTS)
    return Tape.of(found, confidence, every_token=every_token)


def run(policy: Policy, costs: StepCosts, users: int, steps: int = 60, warm_up: int = 0) -> Point:
    return replay.replay(
        tape(), costs, policy, num_users=users, num_steps=steps, num_warm_up=warm_up
    )


def test_verifying_everything_does_what_was_recorded() -> None:
    """Once through the deck: every block once."""
    blocks = [block for trace in traces() for block in trace.blocks]
    point = run(planned(VerifyAll()), FLAT, 1, len(blocks))
    emitted = sum(block.num_accepted + 1 for block in blocks)
    assert point.acceptance_length == emitted / len(blocks)
    assert point.tokens_per_second == emitted / len(blocks)
    assert point.verify_length == DRAFTS


@pytest.mark.parametrize("users", [1, 5, 40])
@pytest.mark.parametrize("costs", [FLAT, LINEAR, CLIFF, STEEP])
def test_nobody_beats_the_oracle(costs: StepCosts, users: int) -> None:
    points = {
        name: run(make(costs), costs, users, warm_up=7)
        for name, make in scheduler_sim.POLICIES.items()
    }
    rate = points[scheduler_sim.NONE].tokens_per_second
    best = replay.oracle_replay(
        tape(), costs, rate, num_users=users, num_steps=60, num_warm_up=7
    ).tokens_per_second
    assert best >= rate
    for name, point in points.items():
        assert point.tokens_per_second <= best * (1 + 1e-4), name


@pytest.mark.parametrize("kind", SCHEDULED)
def test_where_verifying_is_free_everything_is_verified(kind: type[CausalGreedy]) -> None:
    assert run(planned(kind(FLAT)), FLAT, 6) == run(planned(VerifyAll()), FLAT, 6)


@pytest.mark.parametrize("users", [1, 3, 17])
@pytest.mark.parametrize("kind", SCHEDULED)
def test_where_drafts_never_pay_only_probes_are_lost(kind: type[CausalGreedy], users: int) -> None:
    steps = 10 * PROBE_EVERY
    plain = run(no_draft, STEEP, users, steps)
    point = run(planned(kind(STEEP)), STEEP, users, steps, warm_up=5)
    assert point.drafting == pytest.approx(1 / PROBE_EVERY)
    assert point.tokens_per_second < plain.tokens_per_second
    probe = STEEP.draft_seconds(1, DRAFTS) + DRAFTS  # all of the block verified, in vain
    lost = probe / PROBE_EVERY / plain.step_seconds
    assert point.tokens_per_second >= plain.tokens_per_second / (1 + lost)


@pytest.mark.parametrize("every_token", [False, True])
def test_the_same_seed_gives_the_same_run(every_token: bool) -> None:
    ring = tape(every_token=every_token)

    def once(seed: int) -> Point:
        policy = planned(LaggedTopK(LINEAR))
        return replay.replay(ring, LINEAR, policy, num_users=5, num_steps=50, seed=seed)

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_users_go_on_by_blocks_or_by_tokens() -> None:
    found = traces(count=2, blocks=10)
    places, emitted = np.array([0, 3, 9, 8, 18]), np.array([1, 5, 1, 4, 1])
    moved, is_over = tape(found).after(places, emitted)
    assert moved.tolist() == [1, 4, 10, 9, 19]
    assert is_over.tolist() == [False, False, True, False, False]
    moved, is_over = tape(found, every_token=True).after(places, emitted)
    assert moved.tolist() == [1, 8, 10, 12, 19]
    assert is_over.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("every_token", [False, True])
def test_answers_are_dealt_evenly_and_begin_at_their_beginning(every_token: bool) -> None:
    ring = tape(traces(3, 10), every_token=every_token)
    seen: list[View] = []

    def spy(view: View) -> Decision:
        seen.append(view)
        return no_draft(view)

    replay.replay(ring, FLAT, spy, num_users=4, num_steps=31)
    begun: list[int] = []  # the answers that users go on to
    ages = [0, 2, 5, 7]  # blocks into the first answer, spread over the users
    for before, view in pairwise(seen):
        for user, serial in enumerate(view.serials):
            at = np.flatnonzero((ring.confidence == view.confidence[user]).all(1)).tolist()
            ages[user] += 1
            assert (serial != before.serials[user]) == (ages[user] == 10)
            ages[user] %= 10
            assert at[0] % 10 == ages[user]
            if not ages[user]:
                begun.append(at[0] // 10)
    assert len(begun) == 4 * 3
    # The first four came off the deck as well: one of each, and one of the next round.
    rounds = [sorted(begun[i : i + 3]) for i in (2, 5, 8)]
    assert rounds == [[0, 1, 2]] * 3
    assert len({serial for view in seen for serial in view.serials}) == 4 + 4 * 3


def test_blocks_that_were_not_verified_to_the_end_are_refused() -> None:
    trimmed = RequestTrace("p", 0.0, (BlockTrace("p", (0.9, 0.8), 1, 1),))
    with pytest.raises(ValueError, match="p: 1 of 2 drafts were verified"):
        tape([trimmed])


def test_blocks_that_were_drawn_short_are_offered_short() -> None:
    """Near the end of an answer fewer drafts are drawn: the planner's limits say so."""
    short = RequestTrace("p", 0.0, (BlockTrace("p", (0.9, 0.8), 2, 2), BlockTrace("p", (), 0, 0)))
    point = replay.replay(tape([short]), FLAT, planned(VerifyAll()), num_users=2, num_steps=2)
    assert (point.verify_length, point.acceptance_length) == (1.0, 2.0)


def test_confidences_are_read_with_what_other_prompts_were_fitted_to() -> None:
    found = [*traces(4, 60), *traces(4, 60, seed=1)]  # every prompt twice
    confidence = replay.calibrated(found, DRAFTS)
    for trace, read in zip(found, confidence, strict=True):
        parity = int(trace.prompt[-1]) % 2
        others = [other for other in found if int(other.prompt[-1]) % 2 != parity]
        temperatures = np.array(fit(samples(others, DRAFTS)))
        assert np.array_equal(read, sigmoid(samples([trace], DRAFTS).logits / temperatures))


def test_blocks_recorded_while_all_was_verified_stand_for_those_at_every_token() -> None:
    """What `emberline calibrate --traces` would have kept of the same answers, replayed."""

    def as_verified(trace: RequestTrace) -> RequestTrace:
        kept, start = [], 0
        while start < len(trace.blocks):
            kept.append(trace.blocks[start])
            start += trace.blocks[start].num_accepted + 1
        return replace(trace, blocks=tuple(kept))

    _, found = read_traces(scheduler_sim.TRACES)
    costs = Roofline().costs([64], 7)
    same = (1.0,) * 7
    all_, some = (
        Tape.of(kept, replay.calibrated(kept, 7, same), every_token=every)
        for kept, every in ((found, True), (list(map(as_verified, found)), False))
    )
    assert len(some.end) < len(all_.end) / 2
    for name in ("verify_all", "threshold 0.3", "threshold 0.5", "threshold 0.7", "causal_greedy"):
        make = scheduler_sim.POLICIES[name]
        rates = [
            replay.replay(ring, costs, make(costs), num_users=64, num_steps=120, num_warm_up=10)
            for ring in (all_, some)
        ]
        exact, close = (point.tokens_per_second for point in rates)
        assert close == pytest.approx(exact, rel=0.03), name


def test_a_roofline_is_flat_and_then_rises_with_its_tokens() -> None:
    roof = Roofline(params=1e9, bandwidth=1e12, flops=1e14, overhead=1e-3, context=0.0)
    assert roof.knee == 100
    costs = roof.costs([1, 64], DRAFTS)
    assert costs.target_seconds(64, np.array([64, 100])) == pytest.approx([3e-3, 3e-3])
    assert costs.target_seconds(64, np.array([200, 320])) == pytest.approx([5e-3, 7.4e-3])
    assert costs.draft_seconds(64, 3) == roof.draft_seconds(64, 3)


def test_padded_steps_cost_what_their_bucket_does() -> None:
    roof = Roofline(bucket=32)
    costs = roof.costs([64], DRAFTS)
    tokens = np.array([64, 65, 80, 96, 97, 256, 257, 288, 289, 320])
    expected = [roof.target_seconds(64, count) for count in tokens.tolist()]
    assert costs.target_seconds(64, tokens) == pytest.approx(expected)
    assert expected[5] < expected[6] == expected[7] < expected[8]


def test_it_runs_out_of_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces that ship, computed costs, few steps."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(scheduler_sim, "LEAST_STEPS", 20)
    picture = tmp_path / "picture.png"
    words = ["scheduler_sim.py", "--users", "4", "256", "--user-steps", "80", "--plot"]
    monkeypatch.setattr(sys, "argv", [*words, str(picture)])
    scheduler_sim.main()
    written = json.loads((tmp_path / "scheduler-sim-gpu.json").read_text())
    assert picture.read_bytes()[:4] == b"\x89PNG"
    policies = written["policies"]
    assert set(policies) == {*scheduler_sim.POLICIES, scheduler_sim.ORACLE}
    assert policies["verify_all"]["num_users"] == [4, 256]
    assert policies["verify_all"]["stops_paying"] == 256
    assert written["costs"]["bandwidth"] == 4.8e12


STAIRS = StepCosts(
    target=((1, 1, 1.0), (1, 16, 1.0), (1, 17, 1.3), (1, 32, 1.3), (1, 33, 1.6), (1, 48, 1.6),
            (1, 49, 1.9), (1, 80, 2.2)),
    draft=((1, 1, 0.05), (1, 4, 0.1)),
)  # fmt: skip
"""Steps are padded to 16 tokens, and plain decoding of 16 fills one."""


@pytest.mark.parametrize("kind", SCHEDULED)
def test_a_load_at_the_edge_of_a_bucket_costs_no_more_than_probes(
    kind: type[CausalGreedy],
) -> None:
    plain = run(no_draft, STAIRS, 16, 320)
    point = run(planned(kind(STAIRS)), STAIRS, 16, 320, warm_up=40)
    # One request in PROBE_EVERY steps drafts a whole block, for a tenth of a step's time.
    assert point.tokens_per_second >= plain.tokens_per_second * (1 - 0.1 / PROBE_EVERY) - 1e-9


GPU = StepCosts(
    target=(
        (1, 1, 0.58), (1, 5, 0.66), (8, 8, 0.66), (8, 40, 0.9), (32, 32, 1.0), (32, 160, 1.2),
        (128, 128, 1.35), (128, 640, 1.9), (512, 512, 2.4), (512, 2560, 9.0),
    ),
    draft=((1, 2, 0.06), (1, 4, 0.1), (512, 2, 0.3), (512, 4, 0.5)),
)  # fmt: skip
"""Milliseconds: at first nearly all is weights, at last all is tokens."""


@pytest.mark.parametrize("users", [1, 8, 32, 128, 512])
def test_errors_of_a_measurement_cost_less_than_the_margin(users: int) -> None:
    """As on a GPU: costs that are off by some percent, a plan kept for 16 steps."""
    fixed = [run(policy, GPU, users, 160) for policy in (no_draft, planned(VerifyAll()))]
    best = max(point.tokens_per_second for point in fixed)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        target = tuple((n, t, s * rng.uniform(0.97, 1.03)) for n, t, s in GPU.target)
        draft = tuple((n, k, s * rng.uniform(0.9, 1.1)) for n, k, s in GPU.draft)
        planner = LaggedTopK(StepCosts(target, draft), every=16, margin=0.03)
        point = run(planned(planner), GPU, users, 160, warm_up=5)
        assert point.tokens_per_second >= 0.97 * best
