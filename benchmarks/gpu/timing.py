"""How long an op takes on a GPU: replays of a captured graph between two events.

Owns the clock, the copies of the inputs that keep a cache from answering for the memory, and the
floor that a time is compared with. Must not know any op.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

COLD_BYTES = 200e6  # copies of the inputs together: four times an H200's L2 cache
MOST_COPIES = 64
COPIED_BYTES = 4 * 2**30  # of a measurement of the bandwidth
REPLAYS = 20  # between two events


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size.

    `run` and `plain` take the number of a copy of the inputs, in [0, copies), and may be captured
    in a graph: no look at a value on the host.
    """

    op: str
    size: str  # for the table: "8 x 576"
    run: Callable[[int], object]
    plain: Callable[[int], object] | None  # the plain reference, or None where it cannot run here
    copies: int
    num_bytes: float  # least bytes that the op reads and writes
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call, medians."""

    op: str
    size: str
    us: float
    plain_us: float | None
    floor_us: float  # bytes over the bandwidth, or operations over the rate: the longer


def copies_of(num_bytes: float) -> int:
    """Copies of inputs of so many bytes that do not fit a cache together; at most 64."""
    return max(1, min(MOST_COPIES, -int(-COLD_BYTES // max(num_bytes, 1.0))))


def measure(case: Case, bandwidth: float, rate: float, repeats: int) -> Timing:
    """Time a case.

    Args:
        case: what to run.
        bandwidth: of the memory, bytes a second.
        rate: floating-point operations a second.
        repeats: measurements to take the median of.
    """
    plain = None if case.plain is None else seconds(case.plain, case.copies, repeats) * 1e6
    floor = max(case.num_bytes / bandwidth, case.flops / rate) * 1e6
    taken = seconds(case.run, case.copies, repeats) * 1e6
    return Timing(case.op, case.size, taken, plain, floor)


def seconds(run: Callable[[int], object], copies: int, repeats: int) -> float:
    """Seconds a call of `run`, median of `repeats`, as part of a replayed graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and finds workspaces, outside the graph
        for index in range(copies):
            run(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            run(index)
    for _ in range(3):
        graph.replay()
    return statistics.median(_replays(graph) for _ in range(repeats)) / copies


def _replays(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS / 1e3


def copy_bandwidth(repeats: int) -> float:
    """Bytes a second, read and written, of copying 4 GiB: the better of two ways, median times.

    By a kernel, which is what ops are compared with, and by the driver's copy. Not in a graph:
    there a copy of one device may run on an engine that is slower than the memory.
    """
    source = torch.zeros(COPIED_BYTES // 8, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    ways: tuple[Callable[[], object], ...] = (
        lambda: torch.bitwise_not(source, out=target),
        lambda: target.copy_(source),
    )
    least = min(_median_seconds(way, repeats) for way in ways)
    return 2 * COPIED_BYTES / least


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Seconds a call, between events: the first calls are not counted."""
    taken = []
    for turn in range(2 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if turn >= 2:
            taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def multiply_rate(repeats: int) -> float:
    """Operations a second of an 8192 x 8192 x 8192 product in bfloat16."""
    size = 8192
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)
    return 2 * size**3 / seconds(lambda _: torch.mm(left, right, out=out), 1, repeats)


def launch_seconds(repeats: int) -> float:
    """Seconds that the smallest kernel adds to a graph: what no op of one launch goes below."""
    cell = torch.zeros(1, device="cuda")
    return seconds(lambda _: cell.add_(1), MOST_COPIES, repeats)
