"""Draws: a function of their key alone, uniform, independent of each other, exact in the tail."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from emberline.batch import DrawKeys, Purpose
from emberline.sampling import keys as keys_module
from emberline.sampling.keys import (
    KeyedDraws,
    draw,
    first_argmax,
    gumbel_noise,
    request_seed,
    uniforms,
)

from support.statistics import assert_fits

DRAWS = KeyedDraws()
MASK64 = (1 << 64) - 1


def make_keys(seeds: object, positions: object, purposes: object) -> DrawKeys:
    tensors = [torch.as_tensor(x, dtype=torch.int64) for x in (seeds, positions, purposes)]
    return DrawKeys(*(x.contiguous() for x in torch.broadcast_tensors(*tensors)))


def select(keys: DrawKeys, rows: Tensor) -> DrawKeys:
    return DrawKeys(keys.seeds[rows], keys.positions[rows], keys.purposes[rows])


class NoDraws:
    def categorical(self, logits: Tensor, keys: DrawKeys) -> Tensor:
        raise AssertionError("noise was asked for")

    def proportional(self, weights: Tensor, keys: DrawKeys) -> Tensor:
        raise AssertionError("noise was asked for")

    def coin(self, probs: Tensor, keys: DrawKeys) -> Tensor:
        raise AssertionError("noise was asked for")


# draw


def test_an_all_greedy_draw_asks_no_noise_and_copies_nothing() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])
    ids, drawn = draw(logits, torch.zeros(2), make_keys([1, 2], 0, Purpose.DRAFT), NoDraws())
    assert ids.tolist() == [1, 0]
    assert drawn is logits


def test_drawn_logits_are_what_the_id_was_drawn_from() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.5, 0.0, 2.0])
    keys = make_keys([4, 5, 6], [7, 8, 9], Purpose.DRAFT)
    ids, drawn = draw(logits, temperatures, keys, DRAWS)
    assert torch.equal(drawn[0], logits[0] / 0.5)
    assert torch.equal(drawn[1], logits[1])
    assert torch.equal(drawn[2], logits[2] / 2.0)
    assert ids[1] == logits[1].argmax()
    assert torch.equal(ids[[0, 2]], DRAWS.categorical(drawn, keys)[[0, 2]])


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_draw_computes_in_single_precision_unless_given_double(
    given: torch.dtype, computed: torch.dtype
) -> None:
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).to(given)
    for temperature in (0.0, 0.7):
        _, drawn = draw(logits, torch.tensor([temperature]), make_keys([0], 0, 1), DRAWS)
        assert drawn.dtype == computed


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 511, 512, 513, 1000, 4099])
def test_argmax_takes_the_first_of_equal_maxima(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randint(0, max(2, vocab // 8), (64, vocab), generator=generator).float()
    expected = [row.index(max(row)) for row in x.tolist()]
    assert first_argmax(x).tolist() == expected


# The hash, against the same formulas in unbounded integers.


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def key_hash(seed: int, position: int, purpose: int) -> int:
    golden = 0x9E3779B97F4A7C15
    x = mix64((seed + golden) & MASK64)
    x = mix64((x + position * golden) & MASK64)
    return mix64((x + (purpose + 1) * golden) & MASK64)


def index_hash(index: int, first: int, second: int) -> int:
    mask = (1 << 32) - 1
    x = (index + first) & mask
    x = (x ^ (x >> 17)) * 0xED5AD4BB & mask
    x = (x ^ (x >> 11) ^ second) * 0xAC4C1B51 & mask
    x = (x ^ (x >> 15)) * 0x31848BAB & mask
    return x ^ (x >> 14)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize(("position", "purpose"), [(0, 0), (1, 1), (40_000, 3)])
def test_noise_follows_its_formula(seed: int, position: int, purpose: int) -> None:
    keys = make_keys([seed], [position], [purpose])
    word = key_hash(seed, position, purpose)
    assert uniforms(keys).item() == (word & ((1 << 53) - 1)) / 2**53
    first, second = word & 0xFFFFFFFF, word >> 32
    for index, got in enumerate(gumbel_noise(keys, 9, torch.float64)[0].tolist()):
        coarse = index_hash(index, first, second)
        fine = index_hash(coarse, second, first) & 0x7FFFFFFF
        v = ((coarse & 0x7FFFFFFF) + (fine + 0.5) / 2**31) / 2**31
        assert got == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-12)


def test_single_and_double_precision_noise_agree() -> None:
    keys = make_keys(range(100), 3, Purpose.TARGET)
    single = gumbel_noise(keys, 50, torch.float32).double()
    double = gumbel_noise(keys, 50, torch.float64)
    assert (single - double).abs().max() < 1e-4


def test_noise_is_finite_at_both_ends() -> None:
    def words(*values: int) -> Tensor:
        return torch.tensor([values], dtype=torch.int32)

    ends = (0, -1, 2**31 - 1, -(2**31))
    single = keys_module._gumbel(words(*ends), None)
    assert single.isfinite().all()
    assert single.max().item() == pytest.approx(math.log(2**32), abs=1e-3)
    assert single.min().item() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-3)
    double = keys_module._gumbel(words(*ends), words(*ends))
    assert double.isfinite().all()
    assert double.max().item() > 43


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [3, 257, 70_000])
def test_a_draw_does_not_depend_on_the_batch(vocab: int, dtype: torch.dtype) -> None:
    count = 5
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(count, vocab, generator=generator, dtype=dtype)
    keys = make_keys(range(count), [9, 2, 7, 7, 0], [0, 1, 2, 3, 0])
    noise = gumbel_noise(keys, vocab, dtype)
    ids = DRAWS.categorical(logits, keys)
    for rows in ([3], [4, 1], [2, 2, 0]):
        picked = select(keys, torch.tensor(rows))
        assert torch.equal(gumbel_noise(picked, vocab, dtype), noise[rows])
        assert torch.equal(DRAWS.categorical(logits[rows], picked), ids[rows])
        assert torch.equal(uniforms(picked), uniforms(keys)[rows])


def test_an_empty_draw_is_empty() -> None:
    assert DRAWS.categorical(torch.zeros(0, 7), make_keys([], [], [])).shape == (0,)


@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.DRAFT])
@pytest.mark.parametrize(("vocab", "only"), [(40, 17), (1024, 255), (1024, 1023), (1025, 1024)])
def test_masked_ids_are_never_drawn(purpose: Purpose, vocab: int, only: int) -> None:
    logits = torch.full((1000, vocab), -torch.inf)
    logits[:, only] = -300.0
    assert (DRAWS.categorical(logits, make_keys(range(1000), 0, purpose)) == only).all()


@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.DRAFT])
def test_a_row_without_a_possible_id_gives_the_first(purpose: Purpose) -> None:
    logits = torch.full((3, 700), -torch.inf)
    logits[1, 600] = 0.0
    assert DRAWS.categorical(logits, make_keys(range(3), 0, purpose)).tolist() == [0, 600, 0]


@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.RECOVER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_their_law_over_a_wide_vocabulary(purpose: Purpose, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1000, generator=generator, dtype=dtype).mul_(0.5)
    logits[300:560] = -torch.inf  # a whole block of nothing, and parts of two
    counts = torch.zeros(1000, dtype=torch.int64)
    for start in range(0, 200_000, 20_000):
        keys = make_keys(1, torch.arange(start, start + 20_000), purpose)
        counts += DRAWS.categorical(logits.expand(20_000, -1), keys).bincount(minlength=1000)
    assert_fits(counts, logits.softmax(-1))


# Statistics. Seeds are fixed, so these either always pass or never.

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("varying", ["seed", "position"])
def test_draws_have_the_law_of_their_logits(purpose: Purpose, varying: str) -> None:
    count = torch.arange(200_000)
    keys = make_keys(*((count, 12) if varying == "seed" else (34, count)), purpose)
    ids = DRAWS.categorical(PROBS.log().expand(len(count), -1), keys)
    assert_fits(ids.bincount(minlength=5), PROBS)


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("varying", ["seed", "position"])
def test_uniforms_are_uniform_in_high_and_low_bits(purpose: Purpose, varying: str) -> None:
    count = torch.arange(200_000)
    keys = make_keys(*((count, 12) if varying == "seed" else (34, count)), purpose)
    u = uniforms(keys)
    assert_fits((u * 64).long().bincount(minlength=64), torch.ones(64))
    assert_fits((u * 2**53).long().remainder(64).bincount(minlength=64), torch.ones(64))
    runs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()  # neighbouring keys, jointly
    assert_fits(runs.bincount(minlength=64), torch.ones(64))


def ranks(noise: Tensor, cells: int = 8) -> Tensor:
    """Gumbel noise to equally likely cells."""
    return ((-(-noise.double()).exp()).exp() * cells).long()


def joint_fits(a: Tensor, b: Tensor) -> None:
    assert_fits((ranks(a) * 8 + ranks(b)).flatten().bincount(minlength=64), torch.ones(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_different_keys_and_ids_is_independent(dtype: torch.dtype) -> None:
    def noise(seed: int, position: int, purpose: int, vocab: int = 100_001) -> Tensor:
        return gumbel_noise(make_keys([seed], [position], [purpose]), vocab, dtype)[0]

    base = noise(5, 6, 0)
    for other in (noise(6, 6, 0), noise(5, 7, 0), noise(5, 6, 1), noise(6, 5, 0)):
        joint_fits(base, other)
        joint_fits(base[1:], other[:-1])
    for stride in (1, 2, 256, 4096):
        joint_fits(base[stride:], base[:-stride])
    grid = gumbel_noise(make_keys(0, torch.arange(200_000), 0), 8, dtype)
    for column in range(1, 8):
        joint_fits(grid[:, 0], grid[:, column])
    uniform = uniforms(make_keys(0, torch.arange(200_000), 0))
    cells = (uniform * 8).long() * 8 + ranks(grid[:, 0])
    assert_fits(cells.bincount(minlength=64), torch.ones(64))


def test_noise_has_gumbel_moments() -> None:
    noise = gumbel_noise(make_keys(range(8), 0, 0), 150_000, torch.float32).double()
    error = noise.numel() ** -0.5
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=5 * 1.2825 * error)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=5 * 4.5 * error)
    rows = noise.exp().reciprocal()  # exponentials; rows must not be correlated
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 5 * 150_000**-0.5


@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.DRAFT])
def test_rare_ids_are_drawn_as_often_as_they_should(purpose: Purpose) -> None:
    rare, count = 2e-5, 3_000_000
    logits = torch.tensor([1 - 2 * rare, rare, rare]).log()
    hits = torch.zeros(3, dtype=torch.int64)
    for start in range(0, count, 500_000):
        keys = make_keys(1, torch.arange(start, start + 500_000), purpose)
        hits += DRAWS.categorical(logits.expand(500_000, -1), keys).bincount(minlength=3)
    assert_fits(hits, logits.exp())


@pytest.mark.parametrize("prob", [0.001, 0.3, 0.97])
def test_coins_have_their_probability(prob: float) -> None:
    count = 200_000
    keys = make_keys(range(count), 3, Purpose.ACCEPT)
    heads = DRAWS.coin(torch.full((count,), prob), keys).sum()
    assert_fits(torch.stack([heads, count - heads]), torch.tensor([prob, 1 - prob]))


def test_coins_are_certain_at_both_ends() -> None:
    keys = make_keys(range(10_000), 3, Purpose.ACCEPT)
    assert not DRAWS.coin(torch.zeros(10_000), keys).any()
    assert DRAWS.coin(torch.ones(10_000), keys).all()


# request_seed


def test_choices_and_seeds_are_told_apart() -> None:
    seeds = {request_seed(seed, choice, 99) for seed in range(-50, 50) for choice in range(128)}
    assert len(seeds) == 100 * 128
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_a_seed_decides_alone_and_entropy_only_without_one() -> None:
    assert request_seed(7, 0, 1) == request_seed(7, 0, 2)
    assert request_seed(None, 0, 1) != request_seed(None, 0, 2)
    assert request_seed(None, 0, 7) != request_seed(7, 0, 7)
    assert request_seed(2**64 - 1, 3, 0) == request_seed(-1, 3, 0)


def test_choices_that_share_a_seed_draw_independently() -> None:
    seeds = torch.tensor([request_seed(123, choice, 0) for choice in range(2)])
    noise = gumbel_noise(make_keys(seeds, 0, 0), 100_000, torch.float32)
    joint_fits(noise[0], noise[1])
