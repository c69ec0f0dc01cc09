"""Linear maps with frozen weights, packed once for the kernel that runs them.

Beside them the maps of a decoder layer with what stands round them, so that a GPU can take it
along: the norm before, the gate or the residual sum after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.ops.gated import Activation, gated
from emberline.ops.norm import add_rms_norm

ROW_GRANULE = 4
"""Rows of a map on a CPU come in multiples of this (lab notes, CPU forward).

In fewer, or in counts between, plain float32 maps are summed in another order and both kinds are
slower or not faster.
"""
_MOST_FINE = 64  # rows; beyond, kernels for all of these counts would take more than they give
_PACK_ROWS = 16  # hint to the packer; measured: the layout it picks does not depend on it


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. Make one with `Linear.pack` or, for the plain reference, directly."""

    weight: Tensor  # [out, in]; opaque storage if packed
    bias: Tensor | None  # [out]
    packed: bool = False

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Bring `weight` into oneDNN's blocked order where oneDNN is what multiplies.

        Otherwise it would be reordered at every call, which for a few rows costs as much as the
        product. Drop the caller's `weight`: the packed copy replaces it.
        """
        if not _packable(weight):
            return cls(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return cls(packed, bias, packed=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] to [N, out]."""
        if x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        count = x.shape[0]
        rows = _granted(count)
        if rows > count:
            x = F.pad(x, (0, 0, 0, rows - count))
        if not self.packed:
            return F.linear(x, self.weight, self.bias)[:count]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y[:count]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows of a residual stream halfway through the norm that comes next."""

    rows: Tensor  # [N, D], the stream's times the norm's weights, rounded to its dtype
    squares: Tensor  # [P, N] float32; summed over P, the squares of a row of the stream


@dataclass(frozen=True, slots=True)
class Stream:
    """A residual stream between two maps."""

    x: Tensor  # [N, D]
    update: Tensor | None = None  # [N, D], still to be added; None: nothing is
    scaled: Scaled | None = None  # of x, for the norm that comes next; None: it is yet to begin


def linear(x: Tensor, weights: Linear) -> Tensor:
    """[N, in] to [N, out]."""
    return weights(x)


def norm_linear(stream: Stream, norm: Tensor, eps: float, weights: Linear) -> tuple[Tensor, Tensor]:
    """The residual stream after its update, and a linear map of its norm.

    Args:
        stream: of [N, D].
        norm: [D], weights of the RMS norm: those that the stream is scaled by, if it is.
        eps: of the norm.
        weights: D -> O.

    Returns:
        x + update [N, D], rounded to its dtype (`x` itself without an update), and [N, O].
    """
    x, normed = add_rms_norm(stream.x, stream.update, norm, eps)
    return x, weights(normed)


def norm_gated(
    stream: Stream, norm: Tensor, eps: float, weights: Linear, activation: Activation = "silu"
) -> tuple[Tensor, Tensor]:
    """`norm_linear` to [N, 2 I], a gate, then what it gates, and `gated` of that: [N, I]."""
    x, gate_up = norm_linear(stream, norm, eps, weights)
    return x, gated(gate_up, activation)


def linear_add(
    y: Tensor,
    weights: Linear,
    x: Tensor,
    norm: Tensor | None = None,  # noqa: ARG001
) -> Stream:
    """Update the residual stream `x` [N, D] by a linear map of `y` [N, in].

    Args:
        y: [N, in].
        weights: in -> D.
        x: [N, D].
        norm: [D], weights of the norm that comes next, which may be begun; None: none is.

    Returns:
        `x` and the update, or their sum. Either way the update is rounded to its dtype before the
        sum is.
    """
    return Stream(x, weights(y))


def _granted(count: int) -> int:
    """Rows to run for `count`: one of a few sizes, at most a sixteenth too many from 128 on.

    oneDNN makes and keeps a kernel for every row count that it meets: a megabyte and five
    milliseconds each, for thousands of counts that chunks beside blocks can add up to.
    """
    if count <= _MOST_FINE:
        return -(-count // ROW_GRANULE) * ROW_GRANULE
    granule = 2 * ROW_GRANULE
    while count > 32 * granule:
        granule *= 2
    return -(-count // granule) * granule


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
