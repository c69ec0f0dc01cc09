"""Rows of a table by their numbers, in plain torch: the reference of `ops/triton/look_up.py`."""

from __future__ import annotations

from torch import Tensor


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Pick rows.

    Args:
        table: [L, ...], contiguous.
        index: [...] int64, each in 0 .. L - 1.

    Returns:
        Shape of `index`, then that of a row.
    """
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])
