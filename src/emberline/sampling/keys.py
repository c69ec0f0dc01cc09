"""Counter-based randomness: every draw is a pure function of (seed, position, purpose).

Owns the hash, the noise and `draw`, the one way by which drafters and the target pick a token.
Must not know about requests, layouts or acceptance.

A result depends neither on the batch round it nor on what was drawn before: there is no generator
state, only a hash of the key (and of the vocabulary index). The integers are the same on every
device; the two logarithms after them may differ in the last bit between devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import DrawKeys, Draws, Purpose

# Words hashed at a time on a CPU, so that the scratch stays in the core's own cache.
_CPU_WORDS = 1 << 16
_BLOCK = 256  # columns looked at together


def draw(
    logits: Tensor, temperatures: Tensor, keys: DrawKeys, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Pick one id a row, and hand over exactly what it was picked from.

    Args:
        logits: [B, V] float. float64 stays float64, everything else is computed in float32.
        temperatures: [B] float32; 0 = greedy: the most likely id, ties to the lowest.
        keys: [B] names of the draws.
        draws: the source of randomness; not asked when every row is greedy.

    Returns:
        ids [B] int64, and drawn_logits [B, V]: logits / temperature, greedy rows untouched. A
        sampled id is drawn from softmax(drawn_logits).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    sampled = temperatures > 0
    if not bool(sampled.any()):
        return first_argmax(logits), logits
    drawn = logits / torch.where(sampled, temperatures, 1.0).to(logits.dtype)[:, None]
    if bool(sampled.all()):
        return draws.categorical(drawn, keys), drawn
    ids = first_argmax(drawn)
    rows = sampled.nonzero().squeeze(-1)
    ids[rows] = draws.categorical(drawn[rows], select_keys(keys, rows))
    return ids, drawn


def block_purposes(coupled: Tensor, anchors: Tensor) -> Tensor:
    """What the draws of one block are for: a number that no other block of the request has.

    A position that one block drafts in vain is drafted again by the next. Drawn with the same
    noise, the new draft would be known beforehand to whoever remembers the old block's confidences,
    and a planner that looks at them would look at the draft that it admits. Coupled blocks share
    the target's noise at every position; there no length can do harm.

    Args:
        coupled: [B] bool.
        anchors: [B] int64, positions of the blocks' anchors.

    Returns:
        [B] int64.
    """
    own = int(Purpose.DRAFT) + len(Purpose) * (anchors + 1)
    return torch.where(coupled, int(Purpose.TARGET), own)


def first_argmax(x: Tensor) -> Tensor:
    """Index of the largest entry a row, ties to the lowest index. [N, V] -> [N] int64."""
    # torch.argmax returns the first of equal maxima, but is scalar code on a CPU while amax is
    # vectorised: find the block of columns first, then the column.
    num_blocks, width = x.shape[-1] // _BLOCK, _BLOCK
    if num_blocks < 2 or x.device.type != "cpu":
        return x.argmax(-1)
    cut = num_blocks * width
    body, tail = x[..., :cut], x[..., cut:]
    maxima = body.reshape(*x.shape[:-1], num_blocks, width).amax(-1)
    if tail.shape[-1]:
        maxima = torch.cat([maxima, tail.amax(-1, keepdim=True)], dim=-1)
    start = maxima.argmax(-1, keepdim=True) * width
    columns = (start + torch.arange(width)).clamp_(max=x.shape[-1] - 1)
    return start.squeeze(-1) + x.gather(-1, columns).argmax(-1)


def select_keys(keys: DrawKeys, rows: Tensor) -> DrawKeys:
    """The keys at `rows` [M] (indices)."""
    return DrawKeys(keys.seeds[rows], keys.positions[rows], keys.purposes[rows])


class KeyedDraws:
    """Draws by hashing the key: Gumbel noise or one uniform for categories, a uniform for coins.

    `Purpose.TARGET` names draws that two distributions share: the token that each of them picks
    with the same Gumbel noise is often the same one. argmax(logits + g) with g = -log(E),
    E = -log(1 - v) a standard exponential and v uniform, has law softmax(logits). What matters is a
    small E, the winner's, so v is built with its fine end at 0 (and `log1p` keeps it): 31 random
    bits for float32, 62 for float64. A float32 uniform near 1 would only have steps of 2^-24,
    enough to starve every token under about 1e-7. With 31 bits the coarsest effect is on tokens
    whose probability is under 2^-31 (5e-10): over a vocabulary of 250k at most about 1e-5 of mass
    can be misplaced, and only if all of it lies in such tokens. g is finite, within [-2.9, 22.2]
    ([-3.8, 43.7] in float64).

    Every other draw is nobody else's, and one uniform of 53 bits through the inverse of the
    cumulative distribution does: a fifth of the work.
    """

    def categorical(self, logits: Tensor, keys: DrawKeys) -> Tensor:
        """Draw one id a row from softmax(logits). [N, V] -> [N] int64.

        An id of logit -inf is never drawn, unless the whole row is -inf (then id 0).
        """
        shared = keys.purposes == int(Purpose.TARGET)
        if bool(shared.all()):
            return _by_noise(logits, keys)
        if not bool(shared.any()):
            return _by_inverse(logits, keys)
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for rows, pick in ((shared, _by_noise), (~shared, _by_inverse)):
            ids[rows] = pick(logits[rows], select_keys(keys, rows))
        return ids

    def proportional(self, weights: Tensor, keys: DrawKeys) -> Tensor:
        """Draw one id a row with chances in proportion to its weight. [N, V] -> [N] int64.

        Weights are at least 0; an id of weight 0 is never drawn, unless the whole row is 0 (then
        id 0).
        """
        return _locate_ids(weights, uniforms(keys))

    def coin(self, probs: Tensor, keys: DrawKeys) -> Tensor:
        """True with the given probability (never at 0, always from 1 on). [N] -> [N] bool."""
        return uniforms(keys) < probs.double()


def _by_noise(logits: Tensor, keys: DrawKeys) -> Tensor:
    """argmax(logits + Gumbel noise). [N, V] -> [N] int64."""
    num_rows, vocab = logits.shape
    step = max(1, _CPU_WORDS // vocab) if logits.device.type == "cpu" else max(1, num_rows)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for lo in range(0, num_rows, step):
        noise = gumbel_noise(_rows(keys, lo, lo + step), vocab, logits.dtype)
        ids[lo : lo + step] = first_argmax(noise.add_(logits[lo : lo + step]))
    return ids


def _by_inverse(logits: Tensor, keys: DrawKeys) -> Tensor:
    """The id at a uniform point of the cumulative distribution. [N, V] -> [N] int64."""
    num_rows, vocab = logits.shape
    step = max(1, 8 * _CPU_WORDS // vocab) if logits.device.type == "cpu" else max(1, num_rows)
    wide = None if logits.dtype == torch.float64 else torch.float32
    points = uniforms(keys)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for lo in range(0, num_rows, step):
        part = slice(lo, lo + step)
        # A row without a finite logit is NaN here: no weight, id 0.
        ids[part] = _locate_ids(logits[part].softmax(-1, dtype=wide), points[part])
    return ids


def _locate_ids(weights: Tensor, points: Tensor) -> Tensor:
    """The ids at `points` of [0, 1) on weights laid end to end. [N, V], [N] -> [N] int64.

    First the block of columns, then the column in it: running sums are taken over a few hundred
    numbers only, in float64, so no rounding adds up along the vocabulary.
    """
    if tail := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, tail))
    blocks = weights.view(len(weights), -1, _BLOCK)
    block, rest = _locate(blocks.sum(-1), points)
    chosen = blocks[torch.arange(len(block), device=block.device), block]
    column, _ = _locate(chosen, rest)
    return block * _BLOCK + column


def _locate(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Where `points` of [0, 1) fall among weights laid end to end, and where inside that weight.

    [N, M], [N] -> [N] int64 and [N] float64 in [0, 1). A weight of 0 is never hit.
    """
    ends = weights.double().nan_to_num(0.0).cumsum(-1)
    # The product can round up to the end, where nothing lies.
    below = torch.nextafter(ends[:, -1:], torch.zeros_like(ends[:, -1:]))
    at = torch.minimum(points[:, None] * ends[:, -1:], below)
    index = torch.searchsorted(ends, at, right=True).clamp_(max=weights.shape[-1] - 1)
    index = torch.where(ends[:, -1:] > 0, index, 0)
    end = ends.gather(-1, index)
    size = weights.gather(-1, index).double()
    inside = 1 - (end - at) / torch.where(size > 0, size, 1.0)
    return index.squeeze(-1), inside.squeeze(-1).clamp_(0.0, 1 - 2.0**-53)


def uniforms(keys: DrawKeys) -> Tensor:
    """One uniform a key, multiples of 2^-53 in [0, 1). [N] -> [N] float64."""
    return (_hash_keys(keys) & ((1 << 53) - 1)).double() * 2.0**-53


def gumbel_noise(keys: DrawKeys, vocab: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise of every key and vocabulary index. [N] -> [N, vocab] finite.

    float64 noise refines float32 noise of the same key: v agrees within 2^-31.
    """
    row_words = _hash_keys(keys).view(torch.int32).view(-1, 2)
    first, second = row_words[:, :1], row_words[:, 1:]
    index = torch.arange(vocab, dtype=torch.int32, device=keys.seeds.device)
    words = _triple32(index, first, second)
    return _gumbel(words, _triple32(words, second, first) if dtype == torch.float64 else None)


def _gumbel(words: Tensor, fine_words: Tensor | None) -> Tensor:
    """In place: -log(-log(1 - v)) with v from 31 bits, or from 62 in float64."""
    if fine_words is not None:
        fraction = fine_words.bitwise_and_(_LOW31).double().add_(0.5).mul_(2.0**-31)
        v = words.bitwise_and_(_LOW31).double().add_(fraction)
        largest = 1 - 2.0**-53
    else:
        # A sign bit is dropped, not used: integers below 2^24 then convert without rounding.
        v = words.bitwise_and_(_LOW31).float().add_(0.5)
        largest = 1 - 2.0**-24
    return v.mul_(-(2.0**-31)).clamp_(min=-largest).log1p_().neg_().log_().neg_()


def request_seed(seed: int | None, choice: int, entropy: int) -> int:
    """The int64 seed of one choice of a request.

    Args:
        seed: what the caller asked for, any 64-bit integer; None = not reproducible.
        choice: index among the `n` choices. Choice 0 draws the same whatever `n` is.
        entropy: a 64-bit number nobody chose, used when `seed` is None.
    """
    word = _mix64_host((entropy if seed is None else seed) + (0 if seed is None else _GOLDEN))
    word = _mix64_host(word + choice * _GOLDEN)
    return word - (1 << 64) if word >> 63 else word


# The hash: splitmix64's finaliser over the key (Steele, Lea and Flood 2014), then over the index
# the three-multiplication 32-bit finaliser "triple32" (Wellons 2018), the two halves of the row's
# 64 bits going in before its first and its second multiplication.

_GOLDEN = 0x9E3779B97F4A7C15
_MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_TRIPLE32 = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_LOW31 = 0x7FFFFFFF


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word


def _mix64_host(word: int) -> int:
    mask = (1 << 64) - 1
    word &= mask
    word = (word ^ (word >> 30)) * _MIX64[0] & mask
    word = (word ^ (word >> 27)) * _MIX64[1] & mask
    return word ^ (word >> 31)


def _mix64(x: Tensor) -> Tensor:
    # torch shifts arithmetically: the mask makes the shift logical.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX64[0], 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX64[1], 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _hash_keys(keys: DrawKeys) -> Tensor:
    golden = _signed(_GOLDEN, 64)
    x = _mix64(keys.seeds + golden)
    x = _mix64(x + keys.positions * golden)
    return _mix64(x + (keys.purposes + 1) * golden)


def _triple32(index: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Hash every index under every row's key. [V] or [N, V], [N, 1], [N, 1] -> [N, V] int32."""
    x = index + first
    shifted = torch.empty_like(x)

    def xor_shift(shift: int) -> None:
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))

    xor_shift(17)
    x.mul_(_signed(_TRIPLE32[0], 32))
    xor_shift(11)
    x.bitwise_xor_(second).mul_(_signed(_TRIPLE32[1], 32))
    xor_shift(15)
    x.mul_(_signed(_TRIPLE32[2], 32))
    xor_shift(14)
    return x


def _rows(keys: DrawKeys, lo: int, hi: int) -> DrawKeys:
    return DrawKeys(keys.seeds[lo:hi], keys.positions[lo:hi], keys.purposes[lo:hi])
