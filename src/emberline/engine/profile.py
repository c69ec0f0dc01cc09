"""Seconds of the engine's own step at chosen sizes, drafting apart from the rest.

Owns what is measured and how. Must not know tables' files, machines or command lines.

The requests are synthetic, the step is not: `run_step` over the engine's target and drafter, in
pages of its pool. They sample with the default options, as a client does that asks for nothing:
greedy steps are a little cheaper, penalties and logprobs come on top.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from emberline.batch import (
    Admission,
    CommittedTokens,
    DraftContext,
    DraftProposal,
    KVSpec,
    StepShape,
)
from emberline.cache.kv_pool import KVPool
from emberline.cache.page_pool import PagePool
from emberline.config import SchedulerConfig
from emberline.drafters.base import Drafter
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.step import StepParts, run_step
from emberline.engine.step_inputs import build_inputs
from emberline.layout import in_granules
from emberline.types import Request, SamplingParams
from emberline.verify.step_cost import StepCosts

CONTEXT_LENGTH = 112
"""Tokens with KV before the step, of every request, where there is room for them.

Short on purpose. A longer context adds to a step of many requests much the same with drafts as
without. A table that has less of it than the steps it plans drafts a little too seldom; one that
has more would draft where plain decoding is faster.
"""
CHUNK = 128
"""Tokens of a prompt in the steps that prefill: enough for the slope that longer chunks follow."""
DENSE_DEPTHS = 4
"""Depths up to which every one is measured."""
DRAFTS_WITHOUT_DRAFTER = 7
"""Deepest block whose verification is measured where nobody drafts."""
BUDGET_SECONDS = 5.0
"""Time to spread over the points. Those that take longer than their share still get their turns."""
LEAST_TURNS, MOST_TURNS = 3, 16
CLOSE = 1.03
"""Ratio of two times that agree."""
PATIENCE = 2
"""Shares of time that a point gets at most, until the two least of its turns agree."""
LONG_SECONDS = 1.0
"""Steps that take longer get one turn: warming up and being disturbed are a small part of them."""

Report = Callable[[float], None]  # share done, 0 .. 1


@dataclass(frozen=True, slots=True)
class Grid:
    """Which steps are measured."""

    request_counts: tuple[int, ...]  # 1, 2, 4, .. the most
    depths: tuple[int, ...]  # drafts of each block: 0, 1, 2, 3, 4, 8, .. K
    context_length: int
    chunk: int  # known tokens of the request that prefills, in steps in which one does

    def points(self) -> Iterator[_Point]:
        """Every step, the cheapest number of requests first."""
        for num_reqs in self.request_counts:
            for depth in self.depths:
                yield _Point(num_reqs, depth, 1)
            prefill = _Point(num_reqs, 0, self.chunk)
            # Where whole blocks are as large, the last slope is known well enough without.
            if prefill.num_tokens >= 2 * num_reqs * (1 + self.depths[-1]):
                yield prefill


@dataclass(frozen=True, slots=True)
class _Point:
    """One size of step: decoding requests, of which the last may be a prompt's chunk instead."""

    num_reqs: int
    depth: int
    chunk: int  # known tokens of the last request

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * (1 + self.depth) + self.chunk - 1


@dataclass(slots=True)
class _Times:
    """What a point took in seconds, over its turns so far."""

    num_turns: int = 0
    total: float = 0.0  # of whole steps
    target: float = math.inf  # least of all but drafting
    draft: float = math.inf  # least of drafting; infinite where nobody drafts
    least: tuple[float, float] = (math.inf, math.inf)  # whole steps

    @property
    def is_sure(self) -> bool:
        """Whether the least was not luck: another turn came close."""
        return self.least[1] <= CLOSE * self.least[0]


def plan_grid(
    parts: StepParts,
    pool: PagePool,
    config: SchedulerConfig,
    context_length: int = CONTEXT_LENGTH,
) -> Grid:
    """The grid that fits the engine's limits and its free pages.

    Requests up to `config.max_num_reqs`, fewer if there are no pages for so many; a shorter context
    if the pages or the model's own limit ask for it.

    Raises:
        ValueError: not even one request fits.
    """
    longest = parts.history.shape[1]
    most_drafts = parts.drafter.max_draft_tokens if parts.drafter else DRAFTS_WITHOUT_DRAFTER
    most_drafts = max(1, min(most_drafts, longest - 2))  # a short context has no longer blocks
    least = 1 + 1 + most_drafts  # something to look back at, the anchor, its block
    most = min(config.max_num_reqs, pool.num_free // pool.pages_for(least))
    if most < 1 or longest < least:
        raise ValueError(
            f"no room to measure a step of {least} tokens: the KV cache (--kv-tokens) has "
            f"{pool.num_free * pool.page_size} free, the context (--max-model-len) is {longest}; "
            "raise them"
        )
    room = min(pool.num_free // most * pool.page_size, longest)
    context_length = min(context_length, room - 1 - most_drafts)
    return Grid(
        request_counts=_doubling(1, most),
        depths=_depths(most_drafts),
        context_length=context_length,
        chunk=min(CHUNK, context_length, config.prefill_chunk),
    )


def profile_steps(
    parts: StepParts,
    pool: PagePool,
    grid: Grid,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    report: Report | None = None,
) -> StepCosts:
    """Measure every point of the grid, while no request runs.

    Points take turns, so that a slow moment of the machine falls on all alike, and each is given
    the least of its turns: whatever else runs only ever adds to a time, so the least is nearest to
    the step's own. (A median would need more than half of the turns undisturbed.) Points of which
    the two least turns differ go on for a while. The first turn also warms up. What a machine that
    is busy throughout adds stays in, above all with several threads, which wait for each other.

    Pages are taken from the pool and given back; nothing else of the engine changes.

    Args:
        parts: of the engine.
        pool: of the engine; the pages are those of no request.
        grid: from `plan_grid`.
        budget_seconds: time to spread evenly over the points.
        report: told the share of the work that is done.
    """
    points = list(grid.points())
    times = {point: _Times() for point in points}
    share = budget_seconds / len(points)
    most_reqs, room = grid.request_counts[-1], grid.context_length + 1 + grid.depths[-1]
    pages = [pool.allocate(pool.pages_for(room)) for _ in range(most_reqs)]
    try:
        fill_with_noise(parts.kv_pools, [page for held in pages for page in held])
        bench = _Bench(parts, grid, pages)
        waiting = points
        while waiting:
            for point in waiting:
                bench.run(point, times[point])
                if report is not None:
                    report(sum(_share_done(t, share) for t in times.values()) / len(points))
            waiting = [point for point in waiting if _share_done(times[point], share) < 1.0]
    finally:
        for held in reversed(pages):
            pool.release(held)
    # Steps of as many granules run the same rows: what tells their times apart is noise, which a
    # planner would take for the price of the drafts.
    target: dict[tuple[int, int], float] = {}
    for point, found in times.items():
        size = point.num_reqs, in_granules(point.num_tokens, parts.target.row_granule)
        target[size] = min(target.get(size, math.inf), found.target)
    draft = [(p.num_reqs, p.depth, times[p].draft) for p in points if times[p].draft < math.inf]
    return StepCosts(tuple((*size, seconds) for size, seconds in target.items()), tuple(draft))


def _share_done(times: _Times, budget: float) -> float:
    """How much of its turns a point has had: 1 when it needs no more."""
    turns = 1 if times.total >= LONG_SECONDS else LEAST_TURNS
    budget *= 1 if times.is_sure else PATIENCE
    spent = times.total / budget if times.total < budget else 1.0
    return max(min(times.num_turns / turns, spent, 1.0), times.num_turns // MOST_TURNS)


def fill_with_noise(kv_pools: Sequence[KVPool], pages: Sequence[int]) -> None:
    """A context in pages: noise costs what text costs. Zeros that were never written do not."""
    for pool in kv_pools:
        device = pool.keys.device
        table = torch.tensor([list(pages)], dtype=torch.int64, device=device)
        slots = pool.slots_of(table, len(pages) * pool.page_size).flatten()
        generator = torch.Generator(device).manual_seed(0)
        for tensor in (pool.keys, pool.values):
            shape = (len(slots), *tensor.shape[2:])
            noise = torch.randn(shape, generator=generator, device=device)
            for layer in tensor:
                layer.index_copy_(0, slots, noise.to(tensor.dtype))


class _Bench:
    """Synthetic requests in pages, and the engine's step under a stopwatch."""

    def __init__(self, parts: StepParts, grid: Grid, pages: Sequence[list[int]]) -> None:
        self._device = parts.history.device
        self._drafter = _TimedDrafter(parts.drafter, grid.depths[-1], self._device)
        # A short cycle: text that repeats itself has drafts for a drafter that looks for repeats.
        tokens = [i % min(61, parts.target.vocab_size) for i in range(grid.context_length + 1)]
        self._decoding = [_decoding(slot, tokens, held) for slot, held in enumerate(pages)]
        self._prompt = tokens[: grid.chunk]
        self._parts = replace(
            parts,
            drafter=self._drafter,
            history=torch.tensor([tokens] * len(pages), device=self._device),
        )

    def run(self, point: _Point, times: _Times) -> None:
        """Run a step of this size and note what it took."""
        plan = [
            ScheduledRequest(state, 1, point.depth, 1, samples=True)
            for state in self._decoding[: point.num_reqs]
        ]
        if point.chunk > 1:
            last = self._decoding[point.num_reqs - 1]
            prompt = _prefilling(last.slot, self._prompt, last.pages)
            plan[-1] = ScheduledRequest(prompt, point.chunk, 0, 1, samples=True)
        parts = replace(self._parts, planner=_FixedDepth(point.depth))
        self._drafter.seconds = 0.0
        began = _now(self._device)
        result = run_step(parts, build_inputs(plan, parts.eos_ids, self._device))
        result.verdict.token_ids.tolist()  # the engine reads what was emitted
        whole = _now(self._device) - began
        times.num_turns += 1
        times.total += whole
        first, second, _ = sorted((*times.least, whole))
        times.least = first, second
        times.target = min(times.target, whole - self._drafter.seconds)
        if self._drafter.seconds:
            times.draft = min(times.draft, self._drafter.seconds)


def _decoding(slot: int, tokens: list[int], pages: list[int]) -> RequestState:
    """A request whose last token has no KV yet."""
    return replace(_prefilling(slot, tokens, pages), num_computed=len(tokens) - 1)


def _prefilling(slot: int, tokens: list[int], pages: list[int]) -> RequestState:
    """A request of which nothing has KV yet."""
    return RequestState(
        request=Request(f"profile-{slot}", tuple(tokens), SamplingParams()),
        text=None,
        seed=slot,
        length_limit=len(tokens),
        stop_ids=frozenset(),
        token_ids=tokens,
        serial=slot,
        pages=pages,
        slot=slot,
    )


class _FixedDepth:
    """Draws blocks of one depth and verifies all of them."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        return tuple(min(limit, self._depth) for limit in shape.draft_limits)

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        return Admission(proposal.num_drafted, sum(shape.draft_limits))

    def abandon(self) -> None:
        pass


class _TimedDrafter:
    """A drafter under a stopwatch, or none that drafts at no cost.

    Every block comes out as deep as asked for, or the step would not have the size that is being
    measured: a drafter may find nothing to draft.
    """

    taps: tuple[int, ...] = ()
    kv_spec: KVSpec | None = None

    def __init__(self, drafter: Drafter | None, most_drafts: int, device: torch.device) -> None:
        self._drafter = drafter
        self._device = device
        self.max_draft_tokens = most_drafts
        self.seconds = 0.0  # of the latest proposal

    def propose(self, context: DraftContext) -> DraftProposal:
        num_drafted = torch.full_like(context.anchors, context.num_drafts)
        if self._drafter is None:
            token_ids = num_drafted.new_zeros(len(num_drafted), context.num_drafts)
            return DraftProposal(token_ids, num_drafted, None, None)
        began = _now(self._device)
        proposal = self._drafter.propose(context)
        self.seconds = _now(self._device) - began
        return replace(proposal, num_drafted=num_drafted)

    def observe(self, committed: CommittedTokens) -> None:
        if self._drafter is not None:
            self._drafter.observe(committed)


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given.

    With one kernel thread on a CPU they are this thread's own: what other programs take of the
    machine is not counted, and on a quiet machine the two clocks agree.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def _depths(most: int) -> tuple[int, ...]:
    """None, then every small number: kernels take rows by the eight, so costs rise in stairs.

    Two and four requests reach their stairs at the depths 1 and 3; a table without those points
    would draw a slope through them and end blocks before the edge.
    """
    small = range(min(DENSE_DEPTHS, most) + 1)
    return (*small, *_doubling(2 * DENSE_DEPTHS, most)) if most > DENSE_DEPTHS else tuple(small)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """`first`, twice that, and so on, and `last`."""
    counts = []
    while first < last:
        counts.append(first)
        first *= 2
    return (*counts, last)
