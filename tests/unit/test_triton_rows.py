"""Ops that take rows one by one, the residual norm and the gate, against their plain forms."""

from __future__ import annotations

import pytest
import torch

from emberline.ops import gated as plain_gate
from emberline.ops import norm as plain_norm
from emberline.ops.triton import gated as fast_gate
from emberline.ops.triton import norm as fast_norm

from support.triton_kernels import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS = [(0, 64), (3, 576), (1, 5000)]


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width + 16).to(DEVICE, dtype)[:, :width]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("count", "width"), ROWS)
def test_add_rms_norm(count, width, adds, dtype) -> None:
    torch.manual_seed(0)
    x, update = rows(count, width, dtype), rows(count, width, dtype) if adds else None
    weight = torch.rand(width).to(DEVICE, dtype)
    before = x.clone()
    got = fast_norm.add_rms_norm(x, update, weight, 1e-5)
    want = plain_norm.add_rms_norm(x, update, weight, 1e-5)
    for ours, plain in zip(got, want, strict=True):
        torch.testing.assert_close(ours, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(x, before)


def test_the_norm_is_of_the_rounded_sum() -> None:
    """What the next layer adds to is what was normalised, not a wider number."""
    x = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16, device=DEVICE)
    update = torch.tensor([[0.5, 0.0]], dtype=torch.bfloat16, device=DEVICE)  # lost to rounding
    weight = torch.ones(2, dtype=torch.bfloat16, device=DEVICE)
    total, normed = fast_norm.add_rms_norm(x, update, weight, 0.0)
    assert torch.equal(total, x)
    assert torch.equal(normed, fast_norm.add_rms_norm(x, None, weight, 0.0)[1])


@pytest.mark.filterwarnings("ignore:overflow")  # an interpreter warns where a GPU has infinity
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("count", "width"), ROWS)
def test_gate(count, width, activation, dtype) -> None:
    torch.manual_seed(0)
    gate_up = 3 * rows(count, 2 * width, dtype)
    got = fast_gate.gated(gate_up, activation)
    want = plain_gate.gated(gate_up, activation)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
