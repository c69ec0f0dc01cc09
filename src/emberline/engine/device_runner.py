"""Runs steps on the device without waiting for them: launched now, read one step later.

Owns the device's copy of the requests' state as the host sees it, and what is copied to and fro.
Anchors, lengths and pages stay on the device, where each step moves them on; the host uploads what
it alone knows (new requests, new pages, who runs) and reads what was emitted. Must not know how a
step computes (`device_step`), nor when requests end (`engine`).
"""

from __future__ import annotations

import itertools
import struct
import time
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
from emberline.engine.device_buckets import BucketChoice, Sizes, first_buckets, fit, likely_buckets
from emberline.engine.device_flight import DeviceFlight, Group, Landing, Landings
from emberline.engine.device_step import (
    Bucket,
    Controls,
    DeviceParts,
    run_device_step,
)
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.step_graph import GraphCache
from emberline.models.target import Target
from emberline.ops.triton.slots import COLUMNS
from emberline.sampling.processors import changes_logits
from emberline.types import SamplingParams
from emberline.verify.planner import DevicePlan, DevicePlanner

TOP_SIZES = (0, 5, 20)  # alternatives that a step scores for those who ask


def runs_on_device(params: SamplingParams) -> bool:
    """Whether a request's options need nothing but the target's own logits and its keys."""
    raw = params.logprobs_mode == "raw" or (params.greedy and params.logprobs_mode == "processed")
    few = params.logprobs is None or (raw and 0 <= params.logprobs <= TOP_SIZES[-1])
    return few and not (changes_logits(params) or params.annotations or params.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class _Decoders:
    """Those of a plan that decode: all that stays the same for as long as the plan does."""

    places: Sequence[int]  # in the plan
    shape: StepShape  # with the drafts that there is room for
    slots: list[int]
    num_pages: int
    coins: bool
    num_top: int | None


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
        self._plan: Sequence[ScheduledRequest] = []  # the last one, and what follows from it:
        self._decoders: _Decoders | None = None
        self._asked: tuple[object, ...] = ()  # what it is to do, and the bucket that fits that
        self._wanted = Bucket(1, 1, 1)
        self._held: Bucket | None = None  # what these controls say it in; None: not written yet
        self._numbers = np.zeros(0, dtype=np.int64)
        self._controlled: NDArray[np.int64] | None = None  # the controls on the device
        self._choice = BucketChoice(sizes)
        self._landings = Landings(is_cuda=parts.rows.is_cuda)
        self._is_full = False  # whether there was no memory for one more captured step
        self._graphs: GraphCache[Bucket, Tensor] | None = None
        if capture:
            self._graphs = GraphCache(lambda bucket: run_device_step(parts, bucket), self.be_idle)

    def takes(self, state: RequestState) -> bool:
        """Whether the request's options are ones that a step on the device knows."""
        bound = state.matcher is not None or state.prediction is not None
        return not bound and runs_on_device(state.params)

    def launch(self, plan: Sequence[ScheduledRequest]) -> DeviceFlight:
        """Upload what changed, start the decode step and the chunk step; see `Runner.launch`.

        A plan that is the one before, the same object, is of the same requests in the same pages.
        """
        if self.parts.rows.is_cuda:
            pace = self._landings.pace
            pace.begin(time.perf_counter())
            self.planner.step_takes_at_least(pace.seconds)
        steps: list[tuple[Sequence[int], Bucket, NDArray[np.int64], StepShape | None]] = []
        is_new = plan is not self._plan
        if is_new:
            self._landings.follow()
            self._decoders = self._look_at(plan)
            self._plan = plan
        if self._decoders is not None:
            steps.append((self._decoders.places, *self._decode(self._decoders)))
        if is_new:
            chunks = [i for i, entry in enumerate(plan) if not entry.decodes]
            if chunks:
                self._plan = []  # the next chunks are others
                steps.append((chunks, *self._prefill([plan[i] for i in chunks])))
        if is_new:
            self.upload_state(plan)
        groups = [
            Group(bucket, places, self.start(bucket, numbers), shape)
            for places, bucket, numbers, shape in steps
        ]
        return DeviceFlight(plan, groups, *self._landings.mark(), self.planner, self._landings)

    def padding(self, num_reqs: int, depth: int) -> Sequence[int]:
        """Token counts that decode steps run at: what planners know as their `Padding`."""
        return self.sizes.verify(num_reqs, depth)

    @property
    def num_captured(self) -> int:
        """Steps that have been captured so far."""
        return 0 if self._graphs is None else len(self._graphs.shapes)

    def capture_ahead(self, seconds: float) -> None:
        """Capture the likeliest steps for about so long, while nothing runs.

        Those that somebody would wait for in any case.
        """
        ends = time.monotonic() + seconds
        for bucket in first_buckets(self.sizes):
            self.prepare(bucket)
        while time.monotonic() < ends and self.get_ready():
            pass

    def get_ready(self) -> bool:
        """Capture one step, while nothing runs; False: none is missing, or has room."""
        if self._graphs is None or self._is_full:
            return False
        captured = self._graphs.shapes
        shapes = itertools.chain(self._choice.missed(captured), likely_buckets(self.sizes))
        bucket = next((bucket for bucket in shapes if bucket not in captured), None)
        if bucket is None:
            return False
        try:
            self._graphs.prepare(bucket)
        except torch.OutOfMemoryError:  # nobody asked for it
            self._is_full = True
            return False
        return True

    def _choose(self, wanted: Bucket) -> Bucket:
        """A captured bucket that a step fits; else the one it would fit best, captured by now."""
        if self._graphs is None:
            return wanted
        bucket = self._choice.choose(wanted, self._graphs.shapes)
        self._graphs.prepare(bucket)
        return bucket

    def prepare(self, bucket: Bucket) -> None:
        """Capture a bucket's step, if steps are captured and this one is not yet."""
        if self._graphs is not None:
            self._graphs.prepare(bucket)

    def start(self, bucket: Bucket, numbers: NDArray[np.int64]) -> Landing:
        """Start a step; where its results will be."""
        self.control(numbers)
        return self._landings.bring(self.replay(bucket))

    def control(self, numbers: NDArray[np.int64]) -> None:
        """Say what the next step is: the leading numbers of the controls, not changed any more."""
        if numbers is not self._controlled:
            place = self.parts.controls.numbers[: len(numbers)]
            place.copy_(self._landings.send(numbers), non_blocking=True)
            self._controlled = numbers

    def replay(self, bucket: Bucket) -> Tensor:
        """Run a prepared step by what the controls say."""
        if self._graphs is not None:
            return self._graphs.replay(bucket)
        return run_device_step(self.parts, bucket)

    def _look_at(self, plan: Sequence[ScheduledRequest]) -> _Decoders | None:
        """Those of a plan that decode; None: nobody."""
        places = [i for i, entry in enumerate(plan) if entry.decodes]
        if not places:
            return None
        entries = plan if len(places) == len(plan) else [plan[i] for i in places]
        return _Decoders(
            places=places,
            shape=StepShape(
                num_known=len(entries),
                num_emitting=len(entries),
                serials=tuple([entry.state.serial for entry in entries]),
                draft_limits=tuple([entry.draft_limit for entry in entries]),
            ),
            slots=[entry.state.slot for entry in entries],
            num_pages=self._num_pages(entries),
            coins=_tosses_coins(entries),
            num_top=_num_top(entries),
        )

    def _decode(self, decoders: _Decoders) -> tuple[Bucket, NDArray[np.int64], StepShape | None]:
        shape, admits = self._plan_drafts(decoders.shape)
        asked = decoders, shape.draft_limits, admits
        if asked != self._asked:
            self._asked, self._held = asked, None
            self._wanted = self._bucket(decoders, max(shape.draft_limits), admits.budget)
        if self._held is not self._wanted:
            bucket = self._choose(self._wanted)
            if bucket != self._held:
                self._held = bucket
                # Whatever the step has room for anyway is verified as well.
                room = bucket.num_tokens - len(decoders.slots)
                self._numbers = self.parts.controls.write(
                    self._filled(decoders.slots, bucket.num_reqs),
                    shape.draft_limits,
                    budget=min(sum(shape.draft_limits), room),
                    threshold=admits.threshold,
                )
        assert self._held is not None
        return self._held, self._numbers, shape if self._wanted.num_drafts else None

    def _bucket(self, decoders: _Decoders, depth: int, budget: int) -> Bucket:
        """What a decode step of so many drafts would best run in."""
        count = len(decoders.slots)
        return Bucket(
            num_reqs=fit(count, self.sizes.reqs),
            num_tokens=fit(count + budget, self.sizes.verify(count, depth)),
            num_pages=decoders.num_pages,
            num_drafts=fit(depth, self.sizes.drafts) if depth else 0,
            coins=decoders.coins,
            num_top=decoders.num_top,
        )

    def _plan_drafts(self, shape: StepShape) -> tuple[StepShape, DevicePlan]:
        """The shape with the depths that the planner wants, and what the device verifies."""
        if self.parts.drafter is None:
            return shape, DevicePlan(0)
        depths = self.planner.depths(shape)
        if depths != shape.draft_limits:
            shape = replace(shape, draft_limits=depths)
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
        bucket = self._choose(
            Bucket(
                num_reqs=fit(len(entries), self.sizes.prompts),
                num_tokens=fit(len(known), self.sizes.tokens),
                num_pages=self._num_pages(entries),
                chunk=fit(max(entry.num_known for entry in entries), self.sizes.chunks),
                coins=True,  # whether somebody does or not: one shape for both
                num_top=_num_top(entries),
            )
        )
        numbers = self.parts.controls.write(
            self.slots(entries, bucket.num_reqs),
            (),
            [entry.num_known for entry in entries],
            [entry.samples for entry in entries],
            known_ids=known,
        )
        return bucket, numbers, None

    def slots(self, entries: Sequence[ScheduledRequest], count: int) -> list[int]:
        """Rows of a bucket's requests; nobody's behind the last one."""
        return self._filled([entry.state.slot for entry in entries], count)

    def _filled(self, slots: list[int], count: int) -> list[int]:
        return slots + [self._nobody] * (count - len(slots))

    def _num_pages(self, entries: Sequence[ScheduledRequest]) -> int:
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
            pairs = self._landings.send(np.array([places, numbers], dtype=np.int64))
            pairs = pairs.to(self.parts.rows.device, non_blocking=True)
            self.parts.rows.view(-1).index_copy_(0, pairs[0], pairs[1])


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
    params = [entry.state.request.params for entry in entries]
    return not all(p.greedy or p.coupled for p in params)


def _num_top(entries: Sequence[ScheduledRequest]) -> int | None:
    """Alternatives to score; None: nobody asks for scores at all."""
    wanted = [entry.state.request.params.logprobs for entry in entries]
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
