"""Linear maps with frozen weights, packed once for the kernel that runs them.

Beside them the maps of a decoder layer with what stands round them, so that a GPU can take it
along: the norm before, the gate or the residual sum after. The residual stream is a pair there:
x [N, D], and an update [N, D] that is still to be added to it, or None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.ops.gated import Activation, gated
from emberline.ops.norm import add_rms_norm

_GRANULE = 8  # rows; fewer are never faster
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
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        count = x.shape[0]
        rows = _granted(count)
        if rows > count:
            x = F.pad(x, (0, 0, 0, rows - count))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y[:count]


def linear(x: Tensor, weights: Linear) -> Tensor:
    """[N, in] to [N, out]."""
    return weights(x)


def norm_linear(
    x: Tensor, update: Tensor | None, norm: Tensor, eps: float, weights: Linear
) -> tuple[Tensor, Tensor]:
    """The residual stream after an update, and a linear map of its norm.

    Args:
        x, update: the residual stream, [N, D].
        norm: [D], weights of the RMS norm.
        eps: of the norm.
        weights: D -> O.

    Returns:
        x + update [N, D], rounded to its dtype (`x` itself without an update), and [N, O].
    """
    x, normed = add_rms_norm(x, update, norm, eps)
    return x, weights(normed)


def norm_gated(
    x: Tensor,
    update: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Linear,
    activation: Activation = "silu",
) -> tuple[Tensor, Tensor]:
    """`norm_linear` to [N, 2 I], a gate, then what it gates, and `gated` of that: [N, I]."""
    x, gate_up = norm_linear(x, update, norm, eps, weights)
    return x, gated(gate_up, activation)


def linear_add(y: Tensor, weights: Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Update the residual stream by a linear map of `y` [N, in].

    Returns:
        The stream: `x` and the update, or their sum and None. Either way the update is rounded to
        its dtype before the sum is.
    """
    return x, weights(y)


def _granted(count: int) -> int:
    """Rows to run for `count`: one of a few sizes, at most a sixteenth too many from 128 on.

    oneDNN makes and keeps a kernel for every row count that it meets: half a megabyte and a
    millisecond each, for thousands of counts that chunks beside blocks can add up to.
    """
    granule = _GRANULE
    while count > 32 * granule:
        granule *= 2
    return -(-count // granule) * granule


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
