"""Linear maps with frozen weights, packed once for the kernel that runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
