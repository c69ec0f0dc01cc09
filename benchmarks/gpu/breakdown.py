"""Where a step's time goes on a GPU: launches, bytes, the host's share, and how long nothing ran.

Decode steps of a running engine, seen from outside. One pass warms up (graphs are captured when a
shape is first met), one is timed as it is, one call by call, and one is profiled, once everything
else has been timed; each begins with fresh requests, greedy ones, so that all meet the same shapes.
Owns the passes and what is read off them. The command line is `step_breakdown.py --device cuda`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch

from emberline.cache.kv_pool import KVPool
from emberline.engine.engine import Engine
from emberline.types import Request, SamplingParams

from gpu.host_parts import HostParts
from gpu.workload import stand_by

WAITS = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
"""Where a host waits for a GPU."""
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset")
SHOWN = 8  # kernels of a table


@dataclass(slots=True)
class Waits:
    """Seconds that the host has waited for the GPU."""

    seconds: float = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return run

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while this lasts."""
        with ExitStack() as stack:
            for owner, name in WAITS:
                timed = self.timed(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield


def answer_length(num_steps: int, num_drafts: int) -> int:
    """Tokens of an answer that so many steps do not end, whatever they accept."""
    return (num_steps + 2) * (1 + num_drafts) + 8


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps as the host saw them."""

    walls: tuple[float, ...]  # seconds each
    hosts: tuple[float, ...]  # of those, not spent waiting
    emitted: int
    context: float  # mean tokens of a request in KV

    def row(self) -> dict[str, object]:
        """Milliseconds and microseconds, for a table."""
        ranked = sorted(self.walls)
        p99 = ranked[min(len(ranked) - 1, math.ceil(0.99 * len(ranked)) - 1)]
        return {
            "step_ms": round(1e3 * statistics.fmean(self.walls), 4),
            "p50_ms": round(1e3 * statistics.median(self.walls), 4),
            "p99_ms": round(1e3 * p99, 4),
            "host_us": round(1e6 * statistics.median(self.hosts), 1),
            "host_mean_us": round(1e6 * statistics.fmean(self.hosts), 1),
            "tokens_per_step": round(self.emitted / len(self.walls), 3),
        }


@dataclass(frozen=True, slots=True)
class Activity:
    """What a GPU did over some steps."""

    launches: float  # kernels and copies a step, inside graphs as well
    calls: dict[str, float]  # launching calls of the host a step
    busy: float  # seconds a step in which something ran
    idle: float  # share of the time from the first kernel to the last in which nothing ran
    waits: float  # share of it in which nothing that was launched was left to run: the host's doing
    by_name: list[tuple[str, float, float]]  # name, launches a step, microseconds a step
    num_layers: int = field(default=1)

    @property
    def layer_launches(self) -> float:
        """Launches of kernels that run once or more a layer, a layer."""
        return sum(count // self.num_layers for _, count, _ in self.by_name)


def run_steps(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    num_steps: int,
    around: Callable[[Callable[[], None]], None] = lambda run: run(),
) -> Steps:
    """Decode steps of these requests, none of which ends in them. `around` runs the steps."""
    for index, ids in enumerate(prompts):
        engine.add(Request(f"{index}", ids, params))
    counts = [0] * len(prompts)

    def step() -> int:
        emitted = 0
        for output in engine.step():
            counts[int(output.request_id)] += len(output.token_ids)
            emitted += len(output.token_ids)
        return emitted

    waits, walls, hosts, emitted = Waits(), [], [], []

    def run() -> None:
        for _ in range(num_steps):
            waited, began = waits.seconds, time.perf_counter()
            emitted.append(step())
            walls.append(time.perf_counter() - began)
            hosts.append(walls[-1] - (waits.seconds - waited))

    try:
        while not all(counts):
            step()
        before = sum(counts)
        with waits.counting():
            around(run)
        if engine.num_requests < len(prompts):
            raise RuntimeError("a request ended: fewer steps")
    finally:  # whatever went wrong, the next steps are of other requests
        for index in range(len(prompts)):
            engine.abort(f"{index}")
        while engine.has_work:
            engine.step()
    context = sum(len(ids) for ids in prompts) + (before + sum(counts)) / 2
    return Steps(tuple(walls), tuple(hosts), sum(emitted), context / len(prompts))


def profiled(
    run: Callable[[Callable[[Callable[[], None]], None]], object], num_steps: int, num_layers: int
) -> Activity:
    """Activity of the steps that `run` takes; it is given what to run them in."""
    found: list[Any] = []

    def around(steps: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            steps()
            torch.cuda.synchronize()
        found.extend(profile.events() or ())

    run(around)
    spans, calls = [], Counter[str]()
    for event in found:
        name = str(event.name)
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range
            spans.append(Span(name, span.start / 1e6, span.end / 1e6, int(event.id)))
        elif name.startswith(LAUNCHES):
            calls[name] += 1
    return activity(spans, calls, num_steps, num_layers)


class Span(NamedTuple):
    """Something that ran on a device."""

    name: str
    start: float  # seconds
    end: float
    launch: int  # the host's call that it came from: a graph's kernels have one


def activity(
    spans: Sequence[Span], calls: Counter[str], num_steps: int, num_layers: int
) -> Activity:
    """Summarise what ran on a device over some steps."""
    if not spans:
        raise RuntimeError("the profiler saw nothing run on the GPU")
    counts, times = Counter[str](), Counter[str]()
    for span in spans:
        counts[span.name] += 1
        times[span.name] += span.end - span.start
    busy = busy_seconds([(span.start, span.end) for span in spans])
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    waits = waiting_seconds(spans)
    return Activity(
        launches=len(spans) / num_steps,
        calls={name: count / num_steps for name, count in sorted(calls.items())},
        busy=busy / num_steps,
        idle=1 - busy / whole if whole else 0.0,
        waits=waits / whole if whole else 0.0,
        by_name=[
            (name, counts[name] / num_steps, 1e6 * seconds / num_steps)
            for name, seconds in times.most_common()
        ],
        num_layers=num_layers,
    )


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def waiting_seconds(spans: Sequence[Span]) -> float:
    """Time between the last kernel of a launch and the first of the next one.

    Within a launched graph kernels follow each other without the host: what lies between those is
    the graph's own.
    """
    total, last = 0.0, min(spans, key=lambda span: span.start)
    for span in sorted(spans, key=lambda span: span.start):
        if span.launch != last.launch:
            total += max(0.0, span.start - last.end)
        if span.end > last.end or span.launch != last.launch:
            last = span
    return total


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a step has to read: weights as often as they are used, and the keys and values."""

    target: float  # weights of the target's step
    draft: float  # of a block, the head it shares with the target among them
    kv_token: float  # a token of a request's context
    draft_kv_token: float

    @classmethod
    def of(cls, engine: Engine, target_numbers: int, draft_numbers: int) -> Needs:
        """Of an engine whose models' steps read so many numbers."""
        parts = engine.parts
        itemsize = parts.target.kv_pools[0].keys.element_size()
        own = [_token_bytes(pool) for pool in parts.target.kv_pools]
        every = [_token_bytes(pool) for pool in parts.kv_pools]
        return cls(
            target_numbers * itemsize, draft_numbers * itemsize, sum(own), sum(every) - sum(own)
        )

    def step(self, num_reqs: int, context: float, *, drafts: bool) -> float:
        """Bytes of a step of so many requests."""
        total = self.target + num_reqs * context * self.kv_token
        if drafts:
            total += self.draft + num_reqs * context * self.draft_kv_token
        return total


def _token_bytes(pool: KVPool) -> float:
    """Bytes of keys and values that a token has in a pool, all layers."""
    slots = pool.keys.shape[1]
    numbers = (pool.keys.numel() + pool.values.numel()) / slots
    return numbers * pool.keys.element_size()


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of some requests, drafted for or not."""

    prompts: Sequence[tuple[int, ...]]
    speculate: bool
    num_steps: int

    def run(
        self, engine: Engine, around: Callable[[Callable[[], None]], None] = lambda run: run()
    ) -> Steps:
        """The steps, of fresh requests; see `run_steps`."""
        params = SamplingParams(
            temperature=0,
            max_tokens=answer_length(self.num_steps, engine.max_draft_tokens),
            ignore_eos=True,
            speculate=self.speculate,
        )
        return run_steps(engine, self.prompts, params, self.num_steps, around)


def timed(engine: Engine, case: Case) -> tuple[Steps, HostParts]:
    """A case's steps once it is warm, and what the host spends them on.

    Before anything is profiled in this process: a profiler that has run once makes every later
    launch of a graph cost the host several times as much.
    """
    case.run(engine)
    stand_by(engine)
    steps, parts = case.run(engine), HostParts()

    def counted(run: Callable[[], None]) -> None:
        with parts.counting():
            run()

    case.run(engine, counted)
    return steps, parts


def row(
    case: Case,
    steps: Steps,
    parts: HostParts,
    seen: Activity,
    needs: Needs,
    bandwidth: float,
) -> dict[str, object]:
    """What is told of a case. `bandwidth`: bytes a second."""
    num_bytes = needs.step(len(case.prompts), steps.context, drafts=case.speculate)
    told: dict[str, object] = {
        "requests": len(case.prompts),
        "draft": case.speculate,
        **steps.row(),
        "host_parts_us": parts.row(),
        "launches": round(seen.launches, 1),
        "layer_launches": seen.layer_launches,
        "host_calls": {name: round(count, 2) for name, count in seen.calls.items()},
        "busy_ms": round(1e3 * seen.busy, 4),
        "busy_of_step": round(seen.busy / statistics.fmean(steps.walls), 4),
        "idle_share": round(seen.idle, 4),
        "waiting_share": round(seen.waits, 4),
        "needed_mb": round(num_bytes / 1e6, 2),
        "needed_ms": round(1e3 * num_bytes / bandwidth, 4),
        "busy_over_needed": round(seen.busy * bandwidth / num_bytes, 2),
        "kernels": [[name, round(n, 2), round(us, 2)] for name, n, us in seen.by_name],
    }
    short = {key: value for key, value in told.items() if key != "kernels"}
    print(json.dumps(short), flush=True)
    for name, count, us in seen.by_name[:SHOWN]:
        print(f"    {us:9.1f} us {count:7.1f} x {name[:80]}", flush=True)
    return told


def run_counted(engine: Engine, prompts: Sequence[tuple[int, ...]], num_steps: int) -> None:
    """Steps for a counter of bytes from outside: warmed up, then marked as the part to profile.

    Run it under `ncu --profile-from-start off --metrics dram__bytes.sum`.
    """
    case = Case(prompts, speculate=True, num_steps=num_steps)

    def around(run: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    case.run(engine)
    case.run(engine, around)
    print(f"{num_steps} steps of {len(prompts)} requests were marked", flush=True)
