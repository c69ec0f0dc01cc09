"""The keyed randomness of `sampling/keys.py` inside kernels, and how a kernel picks an id with it.

Owns device functions only: the hash, the uniform, the Gumbel noise, the order of candidates and
the search of a running sum. They give the numbers of `sampling.keys` on the same device, bit for
bit: the integers by construction, the two logarithms because they are the library's that torch
calls. (Triton's interpreter has no such library: there they may differ in the last bit.)

Must not know what a draw is for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# The numbers of `sampling.keys`; a test compares them. Layers forbid importing them from there.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_TRIPLE_A = tl.constexpr(0xED5AD4BB)
_TRIPLE_B = tl.constexpr(0xAC4C1B51)
_TRIPLE_C = tl.constexpr(0x31848BAB)
_LOW53 = tl.constexpr((1 << 53) - 1)
_LOW31 = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(0x7F800000)  # bits of a float32; every NaN of its sign is over it
_NAN = tl.constexpr(0x7FC00000)

TARGET = tl.constexpr(0)  # `batch.Purpose`: the draws that share Gumbel noise
ACCEPT = tl.constexpr(2)
RECOVER = tl.constexpr(3)
BONUS = tl.constexpr(4)

NO_CANDIDATE = tl.constexpr(-(1 << 63))  # under every `candidate`
NO_RANK = tl.constexpr(-(1 << 31))  # under every `rank_of`


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * tl.full((), _MIX_A, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_B, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def hash_key(seed, position, purpose):
    """The 64 random bits of a key. int64 each, of one shape -> uint64."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    x = _mix64(seed.to(tl.uint64, bitcast=True) + golden)
    x = _mix64(x + position.to(tl.uint64, bitcast=True) * golden)
    return _mix64(x + (purpose + 1).to(tl.uint64, bitcast=True) * golden)


@triton.jit
def uniform(word):
    """A key's uniform, a multiple of 2^-53 in [0, 1). uint64 -> float64."""
    return (word & _LOW53).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _negative_log1m(v):
    """-log(1 - v), exact for the smallest v too, since those name the winners."""
    if INTERPRETED:
        wide = v.to(tl.float64)
        rest = 1.0 - wide
        # log(1 - v) loses what 1 - v rounded away; the quotient puts it back (Goldberg 1991).
        lost = tl.where(rest == 1.0, 1.0, wide / tl.where(rest == 1.0, 1.0, 1.0 - rest))
        log = tl.where(rest == 1.0, -wide, tl.log(rest) * lost)
        return -log.to(tl.float32)
    else:
        return -libdevice.log1p(-v)


@triton.jit
def gumbel(word, column):
    """Standard Gumbel noise of keys at vocabulary indices, float32.

    Args:
        word: uint64, `hash_key`.
        column: int32; both broadcast to the shape of the result.
    """
    first = (word & 0xFFFFFFFF).to(tl.uint32)
    second = (word >> 32).to(tl.uint32)
    x = column.to(tl.uint32) + first
    x ^= x >> 17
    x *= tl.full((), _TRIPLE_A, tl.uint32)
    x ^= x >> 11
    x ^= second
    x *= tl.full((), _TRIPLE_B, tl.uint32)
    x ^= x >> 15
    x *= tl.full((), _TRIPLE_C, tl.uint32)
    x ^= x >> 14
    v = ((x & _LOW31).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 31))
    exponential = _negative_log1m(tl.minimum(v, 1.0 - 1.0 / (1 << 24)))
    if INTERPRETED:
        return -tl.log(exponential)
    else:
        return -libdevice.log(exponential)


@triton.jit
def tempered(x, temperature):
    """x / temperature, rounded as torch does it; x where the temperature is 0."""
    return tl.where(temperature > 0, tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)), x)


@triton.jit
def finite(peak):
    """What to subtract from numbers whose largest is `peak`: of nothing but -inf, nothing."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def rank_of(x):
    """An int32 that orders float32 as an argmax does: equal for equal ones, a NaN over all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # 0.0 and -0.0 are equal
    bits = tl.where(x == x, bits, _NAN)  # a NaN may have a sign
    return bits ^ ((bits >> 31) & _LOW31)


@triton.jit
def ranked_value(rank):
    """The float32 behind a `rank_of`, 0.0 for -0.0 and one NaN for all."""
    return (rank ^ ((rank >> 31) & _LOW31)).to(tl.float32, bitcast=True)


@triton.jit
def candidate(rank, column):
    """A number that orders ids as an argmax does: by value, equal ones by the lower column.

    The maximum over many programs is then a plain maximum of int64. Over the many columns of one,
    the highest rank and then its first column take half as many instructions.

    Args:
        rank: int32, `rank_of` the value: a NaN is over everything, as for torch.
        column: int32, of the same shape.
    """
    return (rank.to(tl.int64) << 32) | (column ^ _LOW31).to(tl.int64)  # falls as columns rise


@triton.jit
def column_of(best):
    """The column of a `candidate`. int64 -> int64."""
    return (best & _LOW31) ^ _LOW31


@triton.jit
def is_finite_candidate(best):
    """Whether the number behind a `candidate` is neither a NaN nor infinite. int64 -> bool."""
    order = best >> 32
    return (order < _INFINITY) & (order >= -_INFINITY)


@triton.jit
def locate(weights, point, COUNT: tl.constexpr):
    """Where a point of [0, 1) falls among weights laid end to end, and where inside that one.

    Args:
        weights: [COUNT] float32. A weight that is 0 is never hit; a NaN counts as 0.
        point: float64.

    Returns:
        The index, int32 (0 if no weight is over 0), and float64 in [0, 1).
    """
    index = tl.arange(0, COUNT)
    there = weights > 0
    size = tl.where(there, weights, 0.0).to(tl.float64)
    ends = tl.cumsum(size, 0)
    at = point * tl.sum(size, 0)
    first = tl.min(tl.where(there & (ends > at), index, COUNT), 0)
    # The product can round up to the end, where nothing lies.
    last = tl.max(tl.where(there, index, 0), 0)
    found = tl.where(first < COUNT, first, last)
    end = tl.sum(tl.where(index == found, ends, 0.0), 0)
    width = tl.sum(tl.where(index == found, size, 0.0), 0)
    inside = 1.0 - (end - at) / tl.where(width > 0, width, 1.0)
    return found, tl.minimum(tl.maximum(inside, 0.0), 1.0 - 1.0 / (1 << 53))
