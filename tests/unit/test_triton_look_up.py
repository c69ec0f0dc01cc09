"""Rows of a table by the kernel against the plain ones."""

from __future__ import annotations

import pytest
import torch

from emberline.ops import look_up as plain
from emberline.ops.triton.look_up import look_up

from support.triton_kernels import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [(5,), (2, 64), (1500,)])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (0,)])
def test_rows_are_those_of_the_table(
    shape: tuple[int, ...], row: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(9, *row, generator=generator).to(DEVICE, dtype)
    index = torch.randint(9, shape, generator=generator).to(DEVICE)
    assert torch.equal(look_up(table, index), plain.look_up(table, index))
    assert torch.equal(look_up(table, index), table[index])


def test_a_table_of_strides_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        look_up(
            torch.zeros(4, 6, device=DEVICE).t(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        )
