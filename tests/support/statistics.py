"""Goodness of fit, for tests that draw with fixed seeds."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_P = 1e-4


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Probability of a fit at least this bad. Cells of probability 0 must be empty."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    probs = probs / probs.sum()
    assert counts[probs == 0].sum() == 0, "an impossible outcome occurred"
    counts, probs = counts[probs > 0], probs[probs > 0]
    expected = probs * counts.sum()
    assert expected.min() >= 5, "too few draws for a chi-square"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def assert_fits(counts: Tensor, probs: Tensor) -> None:
    p = chi_square_p(counts, probs)
    assert p > LEAST_P, f"chi-square p = {p:.2e}"
