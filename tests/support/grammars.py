"""Grammars as explicit functions, behind the engine's `Matcher` protocol."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Allowed = Callable[[tuple[int, ...]], set[int]]
"""Which ids may come after an output."""


class RuleMatcher:
    """A matcher whose rule is a function of the whole output."""

    def __init__(self, allowed: Allowed, vocab_size: int, output: tuple[int, ...] = ()) -> None:
        self._allowed = allowed
        self._vocab_size = vocab_size
        self.output = list(output)

    def allowed(self) -> Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(self._allowed(tuple(self.output)))] = True
        return mask

    def consume(self, token_id: int) -> bool:
        if token_id not in self._allowed(tuple(self.output)):
            return False
        self.output.append(token_id)
        return True

    def copy(self) -> RuleMatcher:
        return RuleMatcher(self._allowed, self._vocab_size, tuple(self.output))
