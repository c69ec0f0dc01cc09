"""The gate of an MLP in one pass over its packed rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.gated import Activation
from emberline.ops.triton.gpu import await_inputs, early_start

COLUMNS = 512  # of a row that a program takes


@triton.jit
def _gate(
    gate_up, out, stride, width, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """A piece of one row a program."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    if SILU:
        active = x * tl.sigmoid(x)
    else:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x * tl.sigmoid(2.0 * z)
    product = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + column, product.to(gate.dtype), mask=inside)


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`ops.gated.gated` in one launch. Rows may lie apart; their elements may not."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    if count:
        _gate[(count, triton.cdiv(width, COLUMNS))](
            gate_up, out, gate_up.stride(0), width,
            SILU=activation == "silu", BLOCK=COLUMNS, num_warps=2, **early_start(out.device),
        )  # fmt: skip
    return out
