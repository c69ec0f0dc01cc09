"""Runs steps on the device without waiting for them: launched now, read one step later.

Owns the device's copy of the requests' state as the host sees it, and what is copied to and fro.
Anchors, lengths and pages stay on the device, where each step moves them on; the host uploads what
it alone knows (new requests, new pages, who runs) and reads what was emitted. Must not know how a
step computes (`device_step`), nor when requests end (`engine`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.batch import StepShape
from emberline.config import EngineConfig
from emberline.drafters.base import Capturable, Drafter
from emberline.engine.device_step import (
    Bucket,
    Controls,
    DeviceParts,
    DeviceResult,
    HostResult,
    run_device_step,
    unpack,
)
from emberline.engine.outcome import BROKEN_ERROR, Outcome
from emberline.engine.request_state import RequestState
from emberline.engine.scheduler import ScheduledRequest
from emberline.engine.step_graph import GraphCache, Sizes, fit
from emberline.models.target import Target
from emberline.ops.triton.slots import COLUMNS
from emberline.sampling.processors import changes_logits
from emberline.types import SamplingParams, TokenLogprobs
from emberline.verify.planner import DevicePlan, DevicePlanner

TOP_SIZES = (0, 1, 5, 20)  # alternatives that a step scores for those who ask


def runs_on_device(params: SamplingParams) -> bool:
    """Whether a request's options need nothing but the target's own logits and its keys."""
    raw = params.logprobs_mode == "raw" or (params.greedy and params.logprobs_mode == "processed")
    few = params.logprobs is None or (raw and 0 <= params.logprobs <= TOP_SIZES[-1])
    return few and not (changes_logits(params) or params.annotations or params.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class _Group:
    """Entries of a plan that run as one step on the device."""

    bucket: Bucket
    places: Sequence[int]  # of its requests in the plan
    ints: Tensor  # on the host, once the device has got there
    floats: Tensor
    shape: StepShape | None  # of a step whose confidences the planner waits for


@dataclass(frozen=True, slots=True)
class DeviceFlight:
    """A launched step: its groups run one after the other."""

    plan: Sequence[ScheduledRequest]
    groups: list[_Group]
    done: torch.cuda.Event | None  # None: where nothing runs behind the host
    planner: DevicePlanner

    def read(self) -> Outcome:
        """Wait for the device, and say what it did."""
        if self.done is not None:
            self.done.synchronize()
        count = len(self.plan)
        outcome = Outcome(
            emitted=[[] for _ in range(count)],
            num_drafted=[0] * count,
            num_admitted=[0] * count,
            num_accepted=[0] * count,
            records=[None] * count,
            broken={},
            predicted=[False] * count,
        )
        for group in self.groups:
            result = unpack(group.bucket, group.ints, group.floats)
            if group.shape is not None:
                live = len(group.places)
                sure = result.confidence
                self.planner.learn(
                    group.shape,
                    None if sure is None else torch.from_numpy(sure[:live]),
                    torch.from_numpy(result.num_drafted[:live]),
                )
            self._spread(group, result, outcome)
        return outcome

    def _spread(self, group: _Group, result: HostResult, outcome: Outcome) -> None:
        """Enter a group's results where its requests stand in the plan."""
        bounds, drafted = result.emitted_start_loc, result.num_drafted.tolist()
        for at, place in enumerate(group.places):
            run = result.token_ids[bounds[at] : bounds[at + 1]]
            if run and run[-1] < 0:
                outcome.broken[place] = BROKEN_ERROR
                continue
            outcome.emitted[place] = run
            outcome.num_accepted[place] = result.num_accepted[at]
            outcome.num_drafted[place] = drafted[at]
            outcome.num_admitted[place] = result.num_admitted[at]
            width = self.plan[place].state.params.logprobs
            if width is not None:
                outcome.records[place] = _records(result, bounds[at], bounds[at + 1], width)


def _records(result: HostResult, begin: int, end: int, width: int) -> tuple[TokenLogprobs, ...]:
    """Those of emitted tokens `begin` .. `end`."""
    tops = zip(result.top_ids[begin:end], result.top_logprobs[begin:end], strict=True)
    return tuple(
        TokenLogprobs(token_id, logprob, rank, tuple(ids[:width]), tuple(values[:width]))
        for token_id, logprob, rank, (ids, values) in zip(
            result.token_ids[begin:end],
            result.logprobs[begin:end],
            result.ranks[begin:end],
            tops,
            strict=True,
        )
    )


class DeviceRunner:
    """Runs decode and prefill steps without waiting. Implements `outcome.Runner`.

    Args:
        parts: of the step; rows and controls have room for what the sizes allow.
        planner: says how deep blocks are drawn and how many drafts are verified; another may take
            its place between steps.
        sizes: that steps are rounded up to.
        capture: as CUDA graphs; False: kernel by kernel, on whatever device the rows are.
    """

    def __init__(
        self, parts: DeviceParts, planner: DevicePlanner, sizes: Sizes, *, capture: bool
    ) -> None:
        self.parts = parts
        self.planner = planner  # to be changed while nothing is in flight
        self.sizes = sizes
        self._nobody = len(parts.rows) - 1
        self._pages: dict[int, list[int]] = {}  # by slot, as the device knows them
        self._graphs: GraphCache[Bucket, DeviceResult] | None = None
        if capture:
            self._graphs = GraphCache(lambda bucket: run_device_step(parts, bucket), self.be_idle)

    def takes(self, state: RequestState) -> bool:
        """Whether the request's options are ones that a step on the device knows."""
        bound = state.matcher is not None or state.prediction is not None
        return not bound and runs_on_device(state.params)

    def launch(self, plan: Sequence[ScheduledRequest]) -> DeviceFlight:
        """Upload what changed, start the decode step and the chunk step; see `Runner.launch`."""
        decoding = [i for i, entry in enumerate(plan) if entry.decodes]
        chunks = [i for i, entry in enumerate(plan) if not entry.decodes]
        steps = []
        if decoding:
            steps.append((decoding, *self._decode([plan[i] for i in decoding])))
        if chunks:
            steps.append((chunks, *self._prefill([plan[i] for i in chunks])))
        for _, bucket, _, _ in steps:
            self.prepare(bucket)
        self.upload_state(plan)
        groups = [
            _Group(bucket, places, *self.start(bucket, numbers), shape)
            for places, bucket, numbers, shape in steps
        ]
        done = None
        if self.parts.rows.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return DeviceFlight(plan, groups, done, self.planner)

    def padding(self, num_reqs: int, depth: int) -> Sequence[int]:  # noqa: ARG002
        """Token counts that decode steps run at: what planners know as their `Padding`."""
        return self.sizes.verify

    def prepare(self, bucket: Bucket) -> None:
        """Capture a bucket's step, if steps are captured and this one is not yet."""
        if self._graphs is not None:
            self._graphs.prepare(bucket)

    def start(self, bucket: Bucket, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Start a step; its results on the host, once they are there."""
        self.control(numbers)
        result = self.replay(bucket)
        return self._download(result.ints), self._download(result.floats)

    def control(self, numbers: NDArray[np.int64]) -> None:
        """Say what the next step is: the leading numbers of the controls."""
        self.parts.controls.numbers[: len(numbers)].copy_(self._pinned(numbers), non_blocking=True)

    def replay(self, bucket: Bucket) -> DeviceResult:
        """Run a prepared step by what the controls say."""
        if self._graphs is not None:
            return self._graphs.replay(bucket)
        return run_device_step(self.parts, bucket)

    def _decode(
        self, entries: list[ScheduledRequest]
    ) -> tuple[Bucket, NDArray[np.int64], StepShape | None]:
        shape = StepShape(
            num_known=len(entries),
            num_emitting=len(entries),
            serials=tuple(entry.state.serial for entry in entries),
            draft_limits=tuple(entry.draft_limit for entry in entries),
        )
        shape, admits = self._plan(shape)
        deepest = max(shape.draft_limits)
        num_reqs = fit(len(entries), self.sizes.reqs)
        num_drafts = fit(deepest, self.sizes.drafts) if deepest else 0
        bucket = Bucket(
            num_reqs=num_reqs,
            num_tokens=fit(len(entries) + admits.budget, self.sizes.verify),
            num_pages=self._num_pages(entries),
            num_drafts=num_drafts,
            coins=_tosses_coins(entries),
            num_top=_num_top(entries),
        )
        numbers = self.parts.controls.write(
            self.slots(entries, num_reqs),
            shape.draft_limits,
            budget=admits.budget,
            threshold=admits.threshold,
        )
        return bucket, numbers, shape if num_drafts else None

    def _plan(self, shape: StepShape) -> tuple[StepShape, DevicePlan]:
        """The shape with the depths that the planner wants, and what the device verifies."""
        if self.parts.drafter is None:
            return shape, DevicePlan(0)
        shape = replace(shape, draft_limits=self.planner.depths(shape))
        if not any(shape.draft_limits):
            return shape, DevicePlan(0)
        return shape, self.planner.device_plan(shape)

    def _prefill(
        self, entries: list[ScheduledRequest]
    ) -> tuple[Bucket, NDArray[np.int64], StepShape | None]:
        known: list[int] = []
        for entry in entries:
            start = entry.state.num_computed
            known += entry.state.token_ids[start : start + entry.num_known]
        num_reqs = fit(len(entries), self.sizes.reqs)
        bucket = Bucket(
            num_reqs=num_reqs,
            num_tokens=fit(len(known), self.sizes.tokens),
            num_pages=self._num_pages(entries),
            chunk=fit(max(entry.num_known for entry in entries), self.sizes.chunks),
            coins=_tosses_coins(entries),
            num_top=_num_top(entries),
        )
        numbers = self.parts.controls.write(
            self.slots(entries, num_reqs),
            (),
            [entry.num_known for entry in entries],
            [entry.samples for entry in entries],
            known_ids=known,
        )
        return bucket, numbers, None

    def slots(self, entries: Sequence[ScheduledRequest], count: int) -> list[int]:
        """Rows of a bucket's requests; nobody's behind the last one."""
        slots = [entry.state.slot for entry in entries]
        return slots + [self._nobody] * (count - len(slots))

    def _num_pages(self, entries: list[ScheduledRequest]) -> int:
        return fit(max(len(entry.state.pages) for entry in entries), self.sizes.pages)

    def be_idle(self) -> None:
        """Make the next step one of nobody."""
        self.control(self.parts.controls.write([self._nobody] * self.parts.controls.max_reqs))

    def upload_state(self, plan: Sequence[ScheduledRequest]) -> None:
        """Rows of requests that the device does not know, and pages that the others have got."""
        width = self.parts.rows.shape[1]
        places: list[int] = []
        numbers: list[int] = []
        for entry in plan:
            state = entry.state
            start = state.slot * width
            if not state.placed:
                row = _row(state)
                places += range(start, start + len(row))
                numbers += row
                self._pages[state.slot] = []
            known, pages = self._pages[state.slot], state.pages
            if known != pages:
                first = _agreement(known, pages)
                begin = start + COLUMNS.value
                places += range(begin + first, begin + len(pages))
                numbers += pages[first:]
                self._pages[state.slot] = list(pages)
        if places:
            pairs = self._pinned(np.array([places, numbers], dtype=np.int64))
            pairs = pairs.to(self.parts.rows.device, non_blocking=True)
            self.parts.rows.view(-1).index_copy_(0, pairs[0], pairs[1])

    def _pinned(self, numbers: NDArray[np.int64]) -> Tensor:
        """Host memory that a copy to the device reads while the host goes on."""
        host = torch.from_numpy(numbers)
        return host.pin_memory() if self.parts.rows.is_cuda else host

    def _download(self, numbers: Tensor) -> Tensor:
        """On the host, once the device has got there: graphs overwrite their results."""
        if not numbers.is_cuda:
            return numbers
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        return host.copy_(numbers, non_blocking=True)


def _row(state: RequestState) -> list[int]:
    """The columns of a request that no step is in flight of: `ops.triton.slots`."""
    params = state.params
    [temperature] = struct.unpack("<i", struct.pack("<f", params.temperature))
    return [
        state.token_ids[-1],
        state.num_computed,
        state.length_limit,
        state.seed,
        temperature,
        int(params.coupled),
        int(params.logprobs is not None),
    ]


def _agreement(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading entries are the same."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _tosses_coins(entries: Sequence[ScheduledRequest]) -> bool:
    params = (entry.state.params for entry in entries)
    return any(not (p.greedy or p.coupled) for p in params)


def _num_top(entries: Sequence[ScheduledRequest]) -> int | None:
    """Alternatives to score; None: nobody asks for scores at all."""
    wanted = [entry.state.params.logprobs for entry in entries]
    asked = [width for width in wanted if width is not None]
    return fit(max(asked), TOP_SIZES) if asked else None


def make_runner(
    target: Target,
    drafter: Drafter | None,
    planner: DevicePlanner,
    config: EngineConfig,
    *,
    device: str,
    capture: bool,
) -> DeviceRunner:
    """A runner for a target and a drafter that run with kernels, in the sizes of the settings.

    Raises:
        ValueError: the drafter is none that a step on the device can run.
    """
    if drafter is not None and not isinstance(drafter, Capturable):
        raise ValueError(f"{type(drafter).__name__} drafts on the host: it needs the plain step")
    limits, page_size = config.scheduler, config.cache.page_size
    pages = -(-target.max_model_len // page_size)
    rows = torch.zeros(
        limits.max_num_reqs + 1, COLUMNS.value + pages, dtype=torch.int64, device=device
    )
    tokens = max(limits.max_num_tokens, limits.max_num_reqs)
    parts = DeviceParts(
        target=target,
        drafter=drafter,
        rows=rows,
        controls=Controls.allocate(limits.max_num_reqs, tokens, device),
        page_size=page_size,
        layout=config.speculation.layout,
    )
    sizes = Sizes.up_to(
        reqs=limits.max_num_reqs,
        pages=pages,
        chunk=min(limits.prefill_chunk, tokens),
        tokens=tokens,
        drafts=drafter.max_draft_tokens if drafter is not None else 0,
    )
    return DeviceRunner(parts, planner, sizes, capture=capture)
