"""Rows of a table by their numbers on a GPU: embeddings, and RoPE's factors by position.

A few rows are all that a decode step asks for: torch's own kernels take four times a launch for
them, and do not start early. Must not know what a row is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.triton.gpu import await_inputs, early_start

LANES = 1024  # numbers that a program copies


@triton.jit
def _look_up(table, index, out, width, LANES: tl.constexpr, EARLY: tl.constexpr):
    """Program (n, i) copies part i of row n."""
    await_inputs(EARLY)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(index + n)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    numbers = tl.load(table + row * width + lane, mask=lane < width, other=0.0)
    tl.store(out + n * width + lane, numbers, mask=lane < width)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """`ops.look_up.look_up`.

    Raises:
        ValueError: the table is not contiguous.
    """
    if not table.is_contiguous():
        raise ValueError(f"table must be contiguous, got strides {tuple(table.stride())}")
    index = index.contiguous()
    shape, width = table.shape[1:], table[0].numel()
    out = torch.empty(*index.shape, *shape, dtype=table.dtype, device=table.device)
    if out.numel():
        _look_up[(index.numel(), triton.cdiv(width, LANES))](
            table, index, out, width, LANES=LANES, **early_start(table.device)
        )
    return out
