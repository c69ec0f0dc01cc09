"""Keyed randomness inside kernels: the numbers of `sampling.keys`."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.batch import DrawKeys, Purpose
from emberline.ops.triton import noise
from emberline.sampling import keys as plain

from support.triton_kernels import DEVICE


@triton.jit
def _noise_of_rows(seeds, positions, purposes, points, out, V: tl.constexpr):
    row = tl.program_id(0)
    word = noise.hash_key(tl.load(seeds + row), tl.load(positions + row), tl.load(purposes + row))
    tl.store(points + row, noise.uniform(word))
    column = tl.arange(0, V)
    tl.store(out + row * V + column, noise.gumbel(word, column))


@triton.jit
def _best_of_rows(x, out, V: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, V)
    rank = noise.rank_of(tl.load(x + row * V + column))
    best = tl.max(noise.candidate(rank, column), 0)
    tl.store(out + row, noise.column_of(best))


@triton.jit
def _locate_rows(weights, points, index, inside, V: tl.constexpr):
    row = tl.program_id(0)
    found, rest = noise.locate(
        tl.load(weights + row * V + tl.arange(0, V)), tl.load(points + row), V
    )
    tl.store(index + row, found)
    tl.store(inside + row, rest)


def odd_keys() -> DrawKeys:
    generator = torch.Generator().manual_seed(0)
    ends = [-(1 << 63), (1 << 63) - 1, 0, -1]
    seeds = torch.randint(-(1 << 62), 1 << 62, (12,), generator=generator)
    seeds[:4] = torch.tensor(ends)
    positions = torch.randint(0, 1 << 20, (12,), generator=generator)
    purposes = torch.randint(0, 1 << 22, (12,), generator=generator)
    purposes[4:9] = torch.tensor(list(Purpose))
    return DrawKeys(seeds.to(DEVICE), positions.to(DEVICE), purposes.to(DEVICE))


def test_the_numbers_are_those_of_the_plain_keys() -> None:
    keys, vocab = odd_keys(), 4096
    points = torch.empty(12, dtype=torch.float64, device=DEVICE)
    found = torch.empty(12, vocab, device=DEVICE)
    _noise_of_rows[(12,)](keys.seeds, keys.positions, keys.purposes, points, found, V=vocab)
    assert torch.equal(points, plain.uniforms(keys))
    wanted = plain.gumbel_noise(keys, vocab, torch.float32)
    if DEVICE == "cuda":
        assert torch.equal(found, wanted)
    else:  # the interpreter's logarithms are numpy's
        # An error of E's last bit is one of 2^-24 in log(E), whatever the size of that.
        assert (found - wanted).abs().max() < 6e-7
        assert (found == wanted).float().mean() > 0.7


def test_purposes_are_the_plain_ones() -> None:
    ours = {name: getattr(noise, name).value for name in ("TARGET", "ACCEPT", "RECOVER", "BONUS")}
    assert ours == {name: int(Purpose[name]) for name in ours}


def test_the_best_candidate_is_the_first_of_the_largest() -> None:
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    rows[0] = -torch.inf
    rows[1] = 0.0
    rows[1, :5] = -0.0
    rows[2] = -rows[2].abs() - 1
    rows[3, [7, 50]] = 9.0
    rows[4, [3, 40]] = torch.inf
    rows[5, 33] = torch.nan
    rows[6, :] = -torch.inf
    rows[6, 20] = -1e38
    found = torch.empty(8, dtype=torch.int64, device=DEVICE)
    _best_of_rows[(8,)](rows.to(DEVICE), found, V=64)
    assert found.tolist() == [0, 0, int(rows[2].argmax()), 7, 3, 33, 20, int(rows[7].argmax())]


def located(weights: Tensor, points: list[float]) -> tuple[list[int], list[float]]:
    index = torch.empty(len(points), dtype=torch.int32, device=DEVICE)
    inside = torch.empty(len(points), dtype=torch.float64, device=DEVICE)
    rows = weights.expand(len(points), -1).contiguous().to(DEVICE)
    where = torch.tensor(points, dtype=torch.float64, device=DEVICE)
    _locate_rows[(len(points),)](rows, where, index, inside, V=weights.shape[-1])
    return index.tolist(), inside.tolist()


def test_a_point_is_located_among_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, torch.nan, 0.0, 0.0])
    last = math.nextafter(1.0, 0.0)
    index, inside = located(weights, [0.0, 0.125, 0.25, 0.5, 0.75, last])
    assert index == [1, 1, 2, 2, 4, 4]
    assert inside[:5] == [0.0, 0.5, 0.0, 0.5, 0.0]
    assert 0.999 < inside[5] < 1
    assert located(torch.zeros(8), [0.5])[0] == [0]


@pytest.mark.parametrize("power", [-60, 0, 60])
def test_a_point_is_located_as_by_the_plain_search(power: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(256, generator=generator) * 2.0**power
    weights[torch.rand(256, generator=generator) < 0.5] = 0
    points = torch.rand(20, generator=generator, dtype=torch.float64)
    index, inside = located(weights, points.tolist())
    wanted, rest = plain._locate(weights.expand(20, -1), points)
    assert index == wanted.tolist()
    assert inside == pytest.approx(rest.tolist(), abs=1e-9)
