"""Steps on the device as CUDA graphs, one a shape.

Owns capture. Must not know requests, what a step computes, or which shapes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import torch

Shape = TypeVar("Shape")
Result = TypeVar("Result")

WARM_UP_RUNS = 1
"""It compiles kernels and picks the libraries' ways, neither of which can be captured."""


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

    @property
    def shapes(self) -> Collection[Shape]:
        """Those that are captured."""
        return self._captured.keys()

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
        graph.replay()  # the first one brings the graph to the device, which takes the host long
        self._captured[shape] = graph, result

    def replay(self, shape: Shape) -> Result:
        """Run a prepared step on the current stream."""
        graph, result = self._captured[shape]
        graph.replay()
        return result
