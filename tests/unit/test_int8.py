"""Int8 by groups of columns: bounds, what it saves on uneven columns, which scales are read."""

from __future__ import annotations

import pytest
import torch

from emberline.models.int8 import GROUP, dequantise, expand, quantise
from emberline.models.weights import ModelError


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_values_are_within_half_a_step(columns: int, size: float) -> None:
    matrix = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)) * size
    values, scale = quantise(matrix)
    assert values.dtype == torch.int8
    assert values.shape == matrix.shape
    assert scale.shape == (7, -(-columns // GROUP))
    step = scale.float().repeat_interleave(GROUP, dim=1)[:, :columns]
    assert ((dequantise(values, scale) - matrix).abs() <= step / 2 * 1.0001).all()
    largest = matrix.abs().amax(dim=1) / 127
    assert (scale.float().amax(dim=1) <= largest * (1 + 2**-7)).all()


def test_zero_rows_stay_zero() -> None:
    values, scale = quantise(torch.zeros(2, 70))
    assert not dequantise(values, scale).any()


def test_uneven_columns_lose_less_than_with_a_scale_a_row() -> None:
    """Columns of 30 sizes in runs, each meeting inputs of the inverse size, as a folded scale."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(0, 1.5, 20).repeat_interleave(GROUP)
    matrix = torch.randn(64, len(size), generator=generator) * size
    inputs = torch.randn(256, len(size), generator=generator) / size
    exact = inputs @ matrix.T

    def error(approximate: torch.Tensor) -> float:
        return float((inputs @ approximate.T - exact).norm() / exact.norm())

    row = matrix.abs().amax(dim=1, keepdim=True) / 127
    assert error(dequantise(*quantise(matrix))) < 0.008
    assert error((matrix / row).round() * row) > 0.03


def test_one_scale_a_row_is_read_in_both_shapes() -> None:
    values = torch.tensor([[1, -2] * 40, [3, 4] * 40], dtype=torch.int8)
    scale = torch.tensor([0.5, 2.0])
    expected = values.float() * scale[:, None]
    assert torch.equal(dequantise(values, scale), expected)
    assert torch.equal(dequantise(values, scale[:, None]), expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2), ()])
def test_scales_of_another_shape_are_refused_with_both(shape: tuple[int, ...]) -> None:
    tensors = {"w": torch.zeros(2, 80, dtype=torch.int8), "w_scale": torch.ones(shape)}
    with pytest.raises(ModelError, match=r"'w'.*\[2, 80\].*expected \[2, 1\] or \[2, 2\]"):
        expand(tensors, "draft")


def test_missing_scales_are_named_and_floats_pass() -> None:
    floats = {"w": torch.ones(2, 2), "v_scale": torch.ones(1)}
    assert expand(floats, "draft").keys() == floats.keys()
    with pytest.raises(ModelError, match="w_scale"):
        expand({"w": torch.zeros(2, 2, dtype=torch.int8)}, "draft")
