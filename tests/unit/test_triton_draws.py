"""The draw kernels against `sampling.keys.draw`: the same ids under the same keys."""

from __future__ import annotations

import pytest
import torch

from emberline.batch import DrawKeys, Purpose
from emberline.ops.triton.draws import draw
from emberline.sampling import keys as plain

from support.triton_kernels import DEVICE


def keys_of(num: int, purpose: int | torch.Tensor) -> DrawKeys:
    seeds = torch.randint(1 << 62, (num,), generator=torch.Generator().manual_seed(3))
    purposes = torch.zeros(num, dtype=torch.int64) + purpose
    return DrawKeys(*(x.to(DEVICE) for x in (seeds, torch.arange(num) * 7, purposes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 1000, 5000])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_ids_are_the_plain_ones(vocab: int, spread: float, dtype: torch.dtype) -> None:
    num = 12
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(num, vocab, generator=generator) * spread).to(DEVICE, dtype)
    purposes = torch.tensor([Purpose.TARGET, Purpose.DRAFT + 5 * 41, Purpose.BONUS])
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.7], device=DEVICE).repeat(num // 4)
    keys = keys_of(num, purposes.repeat_interleave(num // 3))
    ids, normalisers = draw(logits, temperatures, keys)
    wanted, drawn = plain.draw(logits, temperatures, keys, plain.KeyedDraws())
    assert torch.equal(ids, wanted)
    log_sum = normalisers[:, 0] + normalisers[:, 1].log()
    torch.testing.assert_close(log_sum, drawn.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(normalisers[:, 0], drawn.amax(-1))


@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.BONUS])
def test_what_is_masked_is_never_drawn(purpose: Purpose) -> None:
    vocab, num = 4500, 24
    logits = torch.full((num, vocab), -torch.inf, device=DEVICE)
    alive = torch.tensor([5, 2100, 4400], device=DEVICE)
    logits[:, alive] = torch.tensor([0.0, 1.0, -1.0], device=DEVICE)
    temperatures = torch.ones(num, device=DEVICE)
    ids, _ = draw(logits, temperatures, keys_of(num, purpose))
    assert set(ids.tolist()) == set(alive.tolist())
    wanted, _ = plain.draw(logits, temperatures, keys_of(num, purpose), plain.KeyedDraws())
    assert torch.equal(ids, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_a_row_without_a_distribution_gives_an_id_all_the_same() -> None:
    logits = torch.randn(4, 3000, device=DEVICE)
    logits[0] = -torch.inf
    logits[1, 77] = torch.nan
    logits[2] = torch.nan
    logits[3, 2900] = torch.inf
    ones = torch.ones(4, device=DEVICE)
    assert draw(logits, ones, keys_of(4, Purpose.BONUS))[0].tolist() == [0, 0, 0, 0]
    for temperatures in (ones, 0 * ones):
        ids, _ = draw(logits, temperatures, keys_of(4, Purpose.TARGET))
        assert ids[1] == 77
        assert ids[3] == 2900
        assert 0 <= int(ids.min()) <= int(ids.max()) < 3000


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    keys, temperatures = keys_of(6, Purpose.BONUS), torch.full((6,), 1.3, device=DEVICE)
    ids, normalisers = draw(logits, temperatures, keys)
    for row in range(6):
        part = slice(row, row + 1)
        alone = DrawKeys(keys.seeds[part], keys.positions[part], keys.purposes[part])
        one, norm = draw(logits[part], temperatures[part], alone)
        assert one == ids[row]
        assert torch.equal(norm[0], normalisers[row])


@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.BONUS])
def test_rows_of_one_key_are_drawn_at_one_position_after_another(purpose: Purpose) -> None:
    width, keys = 3, keys_of(4, purpose)
    logits = torch.randn(4 * width, 900, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    temperatures = torch.tensor([0.0, 0.8, 1.0, 1.4], device=DEVICE)
    ids, normalisers = draw(logits, temperatures, keys, width)
    for entry in range(width):
        at = DrawKeys(keys.seeds, keys.positions + entry, keys.purposes)
        wanted = draw(logits[entry::width], temperatures, at)
        assert torch.equal(ids[entry::width], wanted[0])
        assert torch.equal(normalisers[entry::width], wanted[1])


def test_what_the_kernels_cannot_read_is_refused() -> None:
    keys = keys_of(2, Purpose.BONUS)
    with pytest.raises(ValueError, match=r"float64 with strides"):
        draw(torch.zeros(2, 8, device=DEVICE).double(), torch.ones(2, device=DEVICE), keys)
    with pytest.raises(ValueError, match=r"contiguous columns"):
        draw(torch.zeros(8, 2, device=DEVICE).t(), torch.ones(2, device=DEVICE), keys)
