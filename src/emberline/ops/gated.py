"""The gate of an MLP over packed rows."""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """act(gate) * up of rows [N, 2 I] that hold the gate, then up: [N, I] (Shazeer 2020).

    The activation is rounded to the rows' dtype before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up
