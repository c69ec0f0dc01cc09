"""Matrices as int8 with one scale for every run of 64 input columns of a row.

Owns the arithmetic of the compact form: NAME [m, n] int8 beside NAME_scale [m, ceil(n / 64)]
bfloat16. It must not know which tensors of a model are stored so. Rows with a single scale,
[m, 1] or [m] in any float dtype, are read as well.

Columns of one matrix may differ in size a hundredfold (a folded input scale does that), and then
one step for a whole row rounds the small columns away.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.models.weights import ModelError

__all__ = ["GROUP", "SCALE", "dequantise", "expand", "quantise"]

GROUP = 64  # input columns that share a scale
SCALE = "_scale"  # suffix of a scale's name
LARGEST = 127


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8. [m, n] float -> int8 [m, n], scale [m, ceil(n / 64)] bfloat16.

    Each value is off by at most half its scale: the scale is rounded up, so nothing is clipped,
    and the values are rounded to steps of the scale as it is stored.
    """
    rows, columns = matrix.shape
    grouped = F.pad(matrix.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    exact = grouped.abs().amax(dim=-1).clamp(min=1e-12) / LARGEST
    scale = exact.to(torch.bfloat16)
    scale = torch.where(scale.float() < exact, torch.nextafter(scale, scale * 2), scale)
    steps = (grouped / scale.float()[..., None]).round().clamp(-LARGEST, LARGEST)
    return steps.to(torch.int8).view(rows, -1)[:, :columns].contiguous(), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """Undo `quantise`: float32 [m, n].

    Raises:
        ValueError: the scales are neither one a row nor one for every 64 columns of a row.
    """
    rows, columns = values.shape
    grouped = scale.float().view(rows, -1) if scale.shape[:1] == (rows,) else scale
    count = -(-columns // GROUP)
    if grouped.dim() != 2 or tuple(grouped.shape) not in ((rows, 1), (rows, count)):
        raise ValueError(
            f"scales of shape {list(scale.shape)} for int8 values of shape {[rows, columns]}: "
            f"expected {[rows, 1]} or {[rows, count]}"
        )
    width = columns if grouped.shape[1] == 1 else GROUP
    return values.float() * grouped.repeat_interleave(width, dim=1)[:, :columns]


def expand(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """A checkpoint with its int8 matrices as float32, their scales gone; the rest as it is.

    Raises:
        ModelError: an int8 matrix has no scale, or one of another shape.
    """
    packed = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    result = {n: t for n, t in tensors.items() if n.removesuffix(SCALE) not in packed}
    for name in packed:
        if name + SCALE not in tensors:
            raise ModelError(f"{source}: int8 {name!r} needs its scales, {name}{SCALE}")
        try:
            result[name] = dequantise(tensors[name], tensors[name + SCALE])
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"{source}: {name!r}: {error}") from error
    return result
