"""Recorded blocks, replayed by any policy at any load: what verification would have done.

Owns the closed loop of users and its clock. Must not know where costs and traces come from.

Each of N users replays recorded answers: when one ends, the next is dealt from a deck that holds
each once and is shuffled whenever it is through. A step shows the policy the confidences of N
blocks, as an engine's step would, and accepts as many of the verified drafts as were accepted when
all were. Prefill is left out: a step is N anchors and drafts.

What comes after a step that verified less than would have been accepted is a question of what was
recorded. Where a block begins at every token of an answer (`benchmarks/record_traces.py`) a user
moves on by the tokens emitted, and under the greedy and the coupled rule meets just the blocks that
an engine would. Where blocks begin as verifying everything had them begin, a user moves on by one
block a step: the blocks to come are taken as a sample of those that would have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.batch import DraftProposal, StepShape
from emberline.engine.trace import RequestTrace, samples
from emberline.verify.calibration import fit, sigmoid
from emberline.verify.planner import Planner
from emberline.verify.step_cost import StepCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EVERY_TOKEN = "every token"
"""What the header of a trace file calls `starts` where a block begins at each token."""
SAME = 1e-5
"""Relative difference of two rates that are taken for one."""


@dataclass(frozen=True, slots=True)
class Tape:
    """Recorded answers one after the other. A answers, T blocks in all, K drafts a block."""

    confidence: Floats  # [T, K], calibrated; 0 past `num_drafted`
    num_drafted: Ints  # [T]
    num_accepted: Ints  # [T], of all drafts
    starts: Ints  # [A], index of the first block
    end: Ints  # [T], index after the last block of the same answer
    every_token: bool  # whether a block begins at each token; else where the one before has ended

    @classmethod
    def of(
        cls, traces: Sequence[RequestTrace], confidence: Sequence[Floats], *, every_token: bool
    ) -> Tape:
        """The answers in this order, each with its calibrated confidences [blocks, K].

        Raises:
            ValueError: a block was not verified to its end, so what it was worth is not known.
        """
        lens = np.array([len(trace.blocks) for trace in traces], dtype=np.int64)
        if not lens.all():
            raise ValueError("an answer without blocks cannot be replayed: leave it out")
        blocks = [block for trace in traces for block in trace.blocks]
        for block in blocks:
            if block.num_verified < len(block.confidence):
                raise ValueError(
                    f"{block.request_id}: {block.num_verified} of {len(block.confidence)} drafts "
                    f"were verified: record with every draft verified"
                )
        ends = np.cumsum(lens)
        return cls(
            np.nan_to_num(np.concatenate(confidence)),
            np.array([len(block.confidence) for block in blocks]),
            np.array([block.num_accepted for block in blocks]),
            ends - lens,
            np.repeat(ends, lens),
            every_token,
        )

    def after(self, places: Ints, num_emitted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Where users go on, and whose answer is over. [N], [N] -> [N], [N]."""
        moved = places + (num_emitted if self.every_token else 1)
        return moved, moved >= self.end[places]


def calibrated(
    traces: Sequence[RequestTrace],
    num_draft_tokens: int,
    temperatures: Sequence[float] | None = None,
) -> list[Floats]:
    """Confidences of each answer, [blocks, K].

    Without temperatures they are fitted to answers to other prompts: prompts are dealt into two
    halves, and each is read with what was fitted to the other.
    """
    prompts = list(dict.fromkeys(trace.prompt for trace in traces))
    halves = (set(prompts[0::2]), set(prompts[1::2]))

    def scale(prompt: str) -> Floats:
        return scales[prompt in halves[1]]

    if temperatures is not None:
        scales = [np.array(temperatures)] * 2
    else:
        others = [[trace for trace in traces if trace.prompt not in half] for half in halves]
        scales = [np.array(fit(samples(other, num_draft_tokens))) for other in others]
    return [
        sigmoid(samples([trace], num_draft_tokens).logits / scale(trace.prompt)) for trace in traces
    ]


# Policies


@dataclass(frozen=True, slots=True)
class View:
    """What there is to decide on in one step of N users."""

    serials: tuple[int, ...]  # [N], of their requests
    confidence: Floats  # [N, K]
    num_drafted: Ints  # [N], drafts of a whole block
    num_accepted: Ints  # [N], if all are verified: for oracles only


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy did in a step."""

    num_verified: Ints  # [N]
    num_drafting: int  # users with a block
    depth: int  # drafts of the deepest block


class Policy(Protocol):
    """Decides step after step; may remember."""

    def __call__(self, view: View) -> Decision:
        """The decision of one step."""
        ...


def no_draft(view: View) -> Decision:
    """Plain decoding."""
    return Decision(np.zeros_like(view.num_drafted), 0, 0)


def planned(planner: Planner) -> Policy:
    """One of the engine's planners, asked in the order in which the engine's step asks."""

    def decide(view: View) -> Decision:
        count = len(view.serials)
        shape = StepShape(count, count, view.serials, tuple(view.num_drafted.tolist()))
        depths = planner.depths(shape)
        depth = max(depths)
        if not depth:
            return no_draft(view)
        proposal = DraftProposal(
            token_ids=torch.zeros(count, depth, dtype=torch.int64),
            num_drafted=torch.tensor(depths),
            logits=None,
            confidence=torch.from_numpy(view.confidence[:, :depth]).float(),
        )
        admission = planner.admit(proposal, replace(shape, draft_limits=depths))
        return Decision(admission.num_admitted.numpy(), sum(d > 0 for d in depths), depth)

    return decide


def oracle(costs: StepCosts, rate: float) -> Policy:
    """Verifies drafts that will be accepted and no others, as many as pay at a rate.

    Of all numbers of such drafts, and all depths for all users alike, it takes those that leave the
    most tokens - rate x seconds.
    """

    def decide(view: View) -> Decision:
        count = len(view.serials)
        useful = [
            np.minimum(view.num_accepted, depth) for depth in range(view.num_drafted.max() + 1)
        ]
        best = (-np.inf, 0, 0)
        for depth, lens in enumerate(useful):
            tokens = count + np.arange(lens.sum() + 1)
            seconds = costs.target_seconds(count, tokens) + costs.draft_seconds(count, depth)
            left = tokens - rate * seconds
            best = max(best, (float(left.max()), depth, int(left.argmax())))
        _, depth, budget = best
        # Which users get it makes no difference to this step: the first ones.
        before = np.cumsum(useful[depth]) - useful[depth]
        num_verified = np.clip(budget - before, 0, useful[depth])
        return Decision(num_verified, count if depth else 0, depth)

    return decide


# The loop


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy came to at one load. Means are over steps and users."""

    num_users: int
    tokens_per_second: float  # of all users
    step_seconds: float
    acceptance_length: float  # tokens a step, for one user
    verify_length: float  # drafts verified
    depth: float  # drafts drawn a block; 0 in steps without
    drafting: float  # share of steps that draft

    @property
    def tokens_per_second_per_user(self) -> float:
        """Speed as a user sees it."""
        return self.tokens_per_second / self.num_users


def replay(
    tape: Tape,
    costs: StepCosts,
    policy: Policy,
    *,
    num_users: int,
    num_steps: int,
    num_warm_up: int = 0,
    seed: int = 0,
) -> Point:
    """Run a closed loop of users for so many steps after some that do not count."""
    deck = _deck(tape.starts, np.random.default_rng(seed))
    places = np.array(list(islice(deck, num_users)))
    # Users begin at as many places of their answers, so that they do not go in step.
    places += (tape.end[places] - places) * np.arange(num_users) // num_users
    serials = np.arange(num_users)
    next_serial = num_users
    emitted = verified = depth = drafting = 0
    seconds = 0.0
    for step in range(num_warm_up + num_steps):
        view = View(
            tuple(serials.tolist()),
            tape.confidence[places],
            tape.num_drafted[places],
            tape.num_accepted[places],
        )
        decision = policy(view)
        num_emitted = np.minimum(view.num_accepted, decision.num_verified) + 1
        if step >= num_warm_up:
            num_verified = int(decision.num_verified.sum())
            tokens = np.array([num_users + num_verified])
            seconds += float(costs.target_seconds(num_users, tokens)[0])
            seconds += costs.draft_seconds(decision.num_drafting, decision.depth)
            emitted += int(num_emitted.sum())
            verified += num_verified
            depth += decision.depth
            drafting += decision.depth > 0
        places, is_over = tape.after(places, num_emitted)
        num_over = int(is_over.sum())
        places[is_over] = list(islice(deck, num_over))
        serials[is_over] = next_serial + np.arange(num_over)
        next_serial += num_over
    return Point(
        num_users=num_users,
        tokens_per_second=emitted / seconds,
        step_seconds=seconds / num_steps,
        acceptance_length=emitted / (num_users * num_steps),
        verify_length=verified / (num_users * num_steps),
        depth=depth / num_steps,
        drafting=drafting / num_steps,
    )


def _deck(answers: Ints, rng: np.random.Generator) -> Iterator[int]:
    """Answers without end, each as often as any other."""
    while True:
        yield from rng.permutation(answers)


def oracle_replay(
    tape: Tape,
    costs: StepCosts,
    rate: float,
    *,
    num_users: int,
    num_steps: int,
    num_warm_up: int = 0,
    seed: int = 0,
) -> Point:
    """The oracle at the rate that it reaches: no policy gets more out of the same blocks.

    Summed over the steps, tokens - rate x seconds is then 0 for the oracle and not over 0 for any
    policy that drafts for all or for none, which is to say that its rate is no higher. Users who go
    on by tokens meet other blocks under other policies: there the bound holds in the mean only.

    The rate is found by iteration (Dinkelbach 1967), from one that some policy reaches.
    """
    while True:
        point = replay(
            tape,
            costs,
            oracle(costs, rate),
            num_users=num_users,
            num_steps=num_steps,
            num_warm_up=num_warm_up,
            seed=seed,
        )
        if point.tokens_per_second <= rate * (1 + SAME):
            return point
        rate = point.tokens_per_second
