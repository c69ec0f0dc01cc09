"""The shapes that steps on the device are rounded up to, and a CUDA graph for each.

Owns rounding and capture. Must not know requests, or what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Shape = TypeVar("Shape")
Result = TypeVar("Result")

LEAST_PAGES = 16
LEAST_TOKENS = 64
WARM_UP_RUNS = 2
"""The first compiles kernels and picks the libraries' ways, neither of which can be captured."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that a step's are rounded up to: few enough to capture, close enough to waste little.

    Each rises to the most that a step can have.
    """

    reqs: tuple[int, ...]
    verify: tuple[int, ...]  # anchors and drafts of a decode step
    pages: tuple[int, ...]  # of the longest request
    chunks: tuple[int, ...]  # known tokens of a request in one step
    tokens: tuple[int, ...]  # known tokens of a chunk step
    drafts: tuple[int, ...]  # of a block; empty: there is no drafter

    @classmethod
    def up_to(cls, reqs: int, pages: int, chunk: int, tokens: int, drafts: int) -> Sizes:
        """Sizes up to the largest of each."""
        quarters = [n * 2**power for power in range(12) for n in (8, 10, 12, 14)]
        halves = [n for power in range(3, 12) for n in (2**power, 3 * 2 ** (power - 1))]
        return cls(
            reqs=_capped([1, 2, 4, *halves], reqs),
            verify=_capped([*range(1, 8), *quarters], reqs * (1 + drafts)),
            pages=_capped([LEAST_PAGES * 4**i for i in range(8)], pages),
            chunks=_capped([LEAST_TOKENS * 4**i for i in range(8)], chunk),
            tokens=_capped([LEAST_TOKENS * 2**i for i in range(12)], tokens),
            drafts=_capped([1, 2, 4, 8, 16], drafts) if drafts else (),
        )


def _capped(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sorted(sizes) if size < most), most)


def fit(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count`.

    Raises:
        ValueError: none does.
    """
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} does not fit the largest size, {sizes[-1]}")


class GraphCache(Generic[Shape, Result]):
    """Captured steps by shape, each captured when it is first asked for.

    Args:
        step: runs a step of that shape and returns its outputs, which stay where they are: the
            next replay of any graph may overwrite them.
        idle: makes the inputs those of a step that changes nothing, so that it can be run for its
            own sake before it is captured.
    """

    def __init__(self, step: Callable[[Shape], Result], idle: Callable[[], None]) -> None:
        self._step = step
        self._idle = idle
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def prepare(self, shape: Shape) -> None:
        """Capture a shape unless that is done. Leaves the inputs idle if it was not."""
        if shape in self._captured:
            return
        self._idle()
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                self._step(shape)
            self._stream.synchronize()
            # Other threads may use the GPU meanwhile.
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                result = self._step(shape)
            finally:
                graph.capture_end()
        self._captured[shape] = graph, result

    def replay(self, shape: Shape) -> Result:
        """Run a prepared step on the current stream."""
        graph, result = self._captured[shape]
        graph.replay()
        return result
