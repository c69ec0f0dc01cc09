"""A moving average of the weights: what is exported where `optim.ema` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """An exponential moving average of a module's parameters.

    Step n keeps min(decay, (1 + n) / (10 + n)) of it, so that the untrained weights are forgotten
    soon.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = list(module.parameters())
        self.average = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` updates."""
        keep = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [w.detach() for w in self.weights], 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module computes with the average until the end of the block."""
        own = [weight.detach().clone() for weight in self.weights]
        self._put(self.average)
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> list[Tensor]:
        """What `load` takes, in the order of the parameters."""
        return self.average

    def load(self, state: list[Any]) -> None:
        """Take over a saved average."""
        for mine, saved in zip(self.average, state, strict=True):
            mine.copy_(saved)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        # In place: compiled code and optimisers hold on to these very tensors.
        torch._foreach_copy_([weight.detach() for weight in self.weights], values)
