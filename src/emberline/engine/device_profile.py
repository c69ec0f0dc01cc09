"""Seconds of the device's own steps at chosen sizes, drafting apart from the rest.

What `profile` does for plain steps, for steps that run behind the host: a captured step is replayed
several times in a row, so that what is measured is the device and not the host that starts it. The
requests are synthetic and sample with the default options, the steps are those of the runner. Must
not know tables' files, machines or command lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from emberline.cache.kv_pool import KVPool
from emberline.cache.page_pool import PagePool
from emberline.engine.device_buckets import fit
from emberline.engine.device_runner import DeviceRunner
from emberline.engine.device_step import Bucket, draw_block
from emberline.engine.plan import ScheduledRequest
from emberline.engine.profile import Report, fill_with_noise
from emberline.engine.request_state import RequestState
from emberline.engine.step_graph import GraphCache
from emberline.types import Request, SamplingParams
from emberline.verify.step_cost import Point, StepCosts

CONTEXT_LENGTH = 112  # tokens with KV of every request: see `profile.CONTEXT_LENGTH`
REPLAYS = 8  # in a row, of one measurement, at most
REPLAY_SECONDS = 0.006  # that it takes at least, if those are not enough
TURNS = 2  # measurements of a point, of which the least counts
MOST_SECONDS = 2.0  # for everything; only then are points left out, for others lie beside them
SHARES = (1, 2, 4)  # verified share of all drafts, as divisors, beside none
DRAFT_COUNTS = 2  # every so many numbers of requests drafting is measured by itself


@dataclass(frozen=True, slots=True)
class _Point:
    """A decode step of B requests: T tokens verified, of blocks of K drafts."""

    num_reqs: int
    num_tokens: int
    num_drafts: int


def profile_device_steps(
    runner: DeviceRunner,
    pool: PagePool,
    kv_pools: Sequence[KVPool],
    *,
    report: Report | None = None,
) -> StepCosts:
    """Measure the runner's decode steps while no request runs.

    Args:
        runner: of the engine; nothing is in flight.
        pool: of the engine. Pages are taken from it and given back.
        kv_pools: of target and draft; what lies in those pages is written over.
        report: told the share of the work that is done.

    Raises:
        ValueError: there is no room for one request.
    """
    ends = time.monotonic() + MOST_SECONDS
    bench = _Bench(runner, pool, kv_pools)
    counts, depths = _counts(bench.most_reqs), runner.sizes.drafts
    drafting: dict[tuple[int, int], float] = {}
    whole: dict[_Point, float] = {}
    try:
        points = list(_points(counts, runner))
        drafters = sorted({*counts[::DRAFT_COUNTS], counts[-1]})
        work = len(drafters) * len(depths) + len(points)
        for num_reqs, depth in product(drafters, depths):
            drafting[num_reqs, depth] = bench.draft_seconds(_Point(num_reqs, num_reqs, depth))
            if report is not None:
                report(len(drafting) / work)
        for point in points:
            if len(whole) >= 2 * len(counts) and time.monotonic() >= ends:
                break
            whole[point] = bench.seconds(point)
            if report is not None:
                report((len(drafting) + len(whole)) / work)
    finally:
        bench.release()
    if report is not None:
        report(1.0)
    draft = tuple(_by_depth(drafting, depths))
    blocks = StepCosts(((1, 1, 1.0),), draft)  # for drafting between those numbers of requests
    least = min(seconds for point, seconds in whole.items() if not point.num_drafts)
    target = {
        (p.num_reqs, p.num_tokens): seconds - blocks.draft_seconds(p.num_reqs, p.num_drafts)
        for p, seconds in whole.items()
    }
    return StepCosts(
        target=tuple((*at, max(seconds, least / 2)) for at, seconds in sorted(target.items())),
        draft=draft,
    )


def _by_depth(draft: dict[tuple[int, int], float], sizes: Sequence[int]) -> Iterator[Point]:
    """Seconds at every depth: a block is drawn as deep as the size that it fits."""
    for num_reqs in sorted({num_reqs for num_reqs, _ in draft}):
        for depth in range(1, sizes[-1] + 1):
            yield num_reqs, depth, draft[num_reqs, fit(depth, sizes)]


def _counts(most: int) -> list[int]:
    """1, 2, 4, .. and the most: what rows cost rises by steps, which far points would not show."""
    counts = []
    count = 1
    while count < most:
        counts.append(count)
        count *= 2
    return [*counts, most]


def _points(counts: Sequence[int], runner: DeviceRunner) -> Iterator[_Point]:
    """Those that costs hang on come first: steps of any number of requests, without and with all.

    They are shapes that are captured in any case.
    """
    for num_reqs in counts:
        yield _Point(num_reqs, num_reqs, 0)
    most = runner.sizes.drafts[-1] if runner.sizes.drafts else 0
    seen = {(num_reqs, num_reqs) for num_reqs in counts}
    for share, num_reqs in product(SHARES if most else (), counts):
        sizes = runner.sizes.verify(num_reqs, most)
        num_tokens = fit(num_reqs + max(1, num_reqs * most // share), sizes)
        if (num_reqs, num_tokens) not in seen:
            seen.add((num_reqs, num_tokens))
            yield _Point(num_reqs, num_tokens, most)


class _Bench:
    """Synthetic requests in pages, and the runner's steps under a stopwatch."""

    def __init__(self, runner: DeviceRunner, pool: PagePool, kv_pools: Sequence[KVPool]) -> None:
        self._runner, self._pool = runner, pool
        self._is_cuda = runner.parts.rows.is_cuda
        most_drafts = runner.sizes.drafts[-1] if runner.sizes.drafts else 0
        # A measurement may accept every draft: its requests must not reach their end.
        room = CONTEXT_LENGTH + (1 + REPLAYS) * (1 + most_drafts) + 1
        room = min(room, runner.sizes.pages[-1] * pool.page_size)
        pages = pool.pages_for(room)
        self.most_reqs = min(runner.sizes.reqs[-1], pool.num_free // pages)
        if self.most_reqs < 1:
            raise ValueError(
                f"no room to measure a step of {room} tokens: the KV cache (--kv-tokens) has "
                f"{pool.num_free * pool.page_size} free; raise it"
            )
        self._pages = [pool.allocate(pages) for _ in range(self.most_reqs)]
        fill_with_noise(kv_pools, [page for held in self._pages for page in held])
        context = room - (1 + REPLAYS) * (1 + most_drafts)
        self._plan = [
            _entry(slot, held, max(2, context), room, most_drafts)
            for slot, held in enumerate(self._pages)
        ]
        self._drafts: GraphCache[Bucket, object] | None = None
        if self._is_cuda:
            self._drafts = GraphCache(self._draw, runner.be_idle)

    def release(self) -> None:
        """Give the pages back."""
        for held in reversed(self._pages):
            self._pool.release(held)

    def seconds(self, point: _Point) -> float:
        """Of one step of that size, the least of several measurements."""
        bucket = self._bucket(point)
        self._runner.prepare(bucket)
        return self._least(point, bucket, self._runner.replay)

    def draft_seconds(self, point: _Point) -> float:
        """Of its drafts alone."""
        bucket = self._bucket(point)
        replay: Callable[[Bucket], object] = self._draw
        if self._drafts is not None:
            self._drafts.prepare(bucket)
            replay = self._drafts.replay
        return self._least(point, bucket, replay)

    def _bucket(self, point: _Point) -> Bucket:
        sizes = self._runner.sizes
        return Bucket(
            num_reqs=fit(point.num_reqs, sizes.reqs),
            num_tokens=fit(point.num_tokens, sizes.verify(point.num_reqs, point.num_drafts)),
            num_pages=fit(len(self._pages[0]), sizes.pages),
            num_drafts=point.num_drafts,
        )

    def _draw(self, bucket: Bucket) -> object:
        return draw_block(self._runner.parts, bucket)

    def _least(self, point: _Point, bucket: Bucket, replay: Callable[[Bucket], object]) -> float:
        about = self._measure(point, bucket, replay, 1)
        replays = min(REPLAYS, max(2, int(REPLAY_SECONDS / about)))
        return min(self._measure(point, bucket, replay, replays) for _ in range(TURNS))

    def _measure(
        self, point: _Point, bucket: Bucket, replay: Callable[[Bucket], object], replays: int
    ) -> float:
        plan = self._plan[: point.num_reqs]
        for entry in plan:
            entry.state.placed = False  # back to where it began
        self._runner.upload_state(plan)
        slots = self._runner.slots(plan, bucket.num_reqs)
        limits = [point.num_drafts] * len(plan)
        budget = point.num_tokens - point.num_reqs
        self._runner.control(self._runner.parts.controls.write(slots, limits, budget=budget))
        replay(bucket)
        began = self._now()
        for _ in range(replays):
            replay(bucket)
        return (self._now() - began) / replays

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize(self._runner.parts.rows.device)
        return time.perf_counter()


def _entry(slot: int, pages: list[int], context: int, room: int, drafts: int) -> ScheduledRequest:
    """A request whose last token has no KV yet."""
    tokens = [1] * (context + 1)
    state = RequestState(
        request=Request(f"profile-{slot}", tuple(tokens), SamplingParams()),
        text=None,
        seed=slot,
        length_limit=room,
        stop_ids=frozenset(),
        token_ids=tokens,
        serial=slot,
        num_computed=context,
        pages=pages,
        slot=slot,
    )
    return ScheduledRequest(state, 1, drafts, 1, samples=True, decodes=True)
