"""Linear maps with frozen weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] to [N, out]."""
        return F.linear(x, self.weight, self.bias)
