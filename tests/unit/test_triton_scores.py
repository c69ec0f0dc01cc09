"""The scoring kernels against the plain log-softmax."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from emberline.engine import scoring
from emberline.layout import Scored
from emberline.ops.triton.scores import score_tokens, takes
from emberline.sampling import logprobs as plain

from support.triton_kernels import DEVICE


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Scored:
    generator = torch.Generator().manual_seed(rows * vocab)
    return Scored((torch.randn(rows, vocab, generator=generator) * 5).to(DEVICE, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "num_top"), [(3, 3), (257, 0), (5000, 1), (5000, 20)])
def test_scores_are_the_plain_ones(dtype: torch.dtype, vocab: int, num_top: int) -> None:
    logits = random_logits(4, vocab, dtype)
    index = torch.tensor([3, 0, 0, 2, 1, 2], device=DEVICE)
    ids = torch.randint(vocab, (6,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids[0] = logits[3].argmax()
    asks = torch.tensor([True, True, False, True, True, False], device=DEVICE)
    ours = score_tokens(logits, index, ids, asks, num_top)
    wanted = plain.score_tokens(logits, index, ids, num_top)
    assert torch.equal(ours.token_ids, ids)
    assert torch.equal(ours.ranks[asks], wanted.ranks[asks])
    assert torch.equal(ours.top_ids[asks], wanted.top_ids[asks])
    torch.testing.assert_close(ours.logprobs[asks], wanted.logprobs[asks], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        ours.top_logprobs[asks], wanted.top_logprobs[asks], rtol=0, atol=1e-5
    )
    if num_top:  # the same float, bit for bit
        assert ours.top_logprobs[0, 0] == ours.logprobs[0]
    assert ours.ranks[~asks].tolist() == [0, 0]
    assert ours.logprobs[~asks].isnan().all()
    assert ours.top_logprobs[~asks].isnan().all()
    assert (ours.top_ids[~asks] == -1).all()


def test_a_row_that_does_not_ask_is_not_read() -> None:
    logits = random_logits(1, 64)
    index = torch.tensor([0, 1 << 60], device=DEVICE)
    asks = torch.tensor([True, False], device=DEVICE)
    scores = score_tokens(logits, index, torch.tensor([5, 1 << 60], device=DEVICE), asks, 2)
    assert scores.ranks[0] == 1 + (logits[0] > logits[0, 5]).sum()


def test_ties_go_to_the_lowest_id_across_blocks_and_chunks() -> None:
    vocab = 6000
    rows = torch.full((4, vocab), -3.0)
    rows[0, [5900, 2500, 130, 129]] = 1.0  # blocks and chunks apart
    rows[0, 4000] = 2.0
    rows[1] = -torch.inf  # masked but for two
    rows[1, [4999, 70]] = torch.tensor([0.5, 0.25])
    rows[2, ::2] = 0.0
    rows[2, 1::2] = -0.0
    logits = Scored(rows.to(DEVICE))
    index = torch.arange(4, device=DEVICE)
    ids = torch.tensor([5900, 4999, 17, 5999], device=DEVICE)
    asks = torch.ones(4, dtype=torch.bool, device=DEVICE)
    ours = score_tokens(logits, index, ids, asks, 6)
    wanted = plain.score_tokens(logits, index, ids, 6)
    assert torch.equal(ours.top_ids, wanted.top_ids)
    assert ours.ranks.tolist() == [2, 1, 1, 1]
    assert ours.top_ids[0].tolist() == [4000, 129, 130, 2500, 5900, 0]
    assert ours.top_ids[1].tolist() == [4999, 70, 0, 1, 2, 3]
    assert ours.top_ids[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert ours.top_logprobs[1, 2:].tolist() == [-torch.inf] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_a_broken_row_has_no_plausible_number() -> None:
    logits = random_logits(2, 3000)
    logits[0, 2500] = torch.nan
    logits[1] = -torch.inf
    index, asks = torch.arange(2, device=DEVICE), torch.ones(2, dtype=torch.bool, device=DEVICE)
    scores = score_tokens(logits, index, torch.tensor([7, 8], device=DEVICE), asks, 3)
    assert scores.logprobs.isnan().all()


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_row_does_not_depend_on_the_batch(num_rows: int) -> None:
    logits = random_logits(6, 9000)
    index = torch.arange(6, device=DEVICE)
    asks = torch.ones(6, dtype=torch.bool, device=DEVICE)
    whole = score_tokens(logits, index, index, asks, 4)
    few = score_tokens(logits, index[:num_rows], index[:num_rows], asks[:num_rows], 4)
    assert torch.equal(few.logprobs, whole.logprobs[:num_rows])
    assert torch.equal(few.top_logprobs, whole.top_logprobs[:num_rows])


def test_temperatures_give_the_processed_values() -> None:
    logits = random_logits(3, 3000)
    temperatures = torch.tensor([0.0, 0.7, 1.9], device=DEVICE)
    index = torch.arange(3, device=DEVICE)
    asks = torch.ones(3, dtype=torch.bool, device=DEVICE)
    ours = score_tokens(logits, index, index, asks, 3, temperatures)
    divided = logits / torch.tensor([[1.0], [0.7], [1.9]], device=DEVICE)
    wanted = plain.score_tokens(Scored(divided), index, index, 3)
    torch.testing.assert_close(ours.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(ours.top_ids, wanted.top_ids)


def test_requests_ask_for_all_of_their_tokens_and_nobody_for_the_others() -> None:
    logits = random_logits(5, 3000)
    index = torch.arange(5, device=DEVICE)
    ids = torch.tensor([3, 8, -1, 9, 4], device=DEVICE)
    owners = torch.tensor([1, 0, 1, 1, -1], device=DEVICE)
    asks = torch.tensor([False, True], device=DEVICE)
    by_request = score_tokens(logits, index, ids, asks, 2, owners=owners)
    asked = torch.tensor([True, False, False, True, False], device=DEVICE)
    by_token = score_tokens(logits, index, ids, asked, 2)
    for field in fields(by_token):
        ours, wanted = getattr(by_request, field.name), getattr(by_token, field.name)
        assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0)), field.name
    assert by_request.ranks.gt(0).tolist() == asked.tolist()


def test_what_the_kernels_cannot_do_is_refused() -> None:
    logits = random_logits(1, 64)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    asks = torch.ones(1, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match=r"num_top must be in \[0, 20\], got 21"):
        score_tokens(logits, one, one, asks, 21)
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16.*float64"):
        score_tokens(Scored(logits.double()), one, one, asks, 1)


@pytest.mark.parametrize("num_top", [0, 5, 20, 21, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_records_of_a_plain_step_are_the_plain_ones(dtype: torch.dtype, num_top: int) -> None:
    """On a GPU the kernels make them wherever they can."""
    logits = random_logits(9, 3000, dtype)
    index = torch.tensor([8, 0, 4, 4], device=DEVICE)
    ids = torch.tensor([5, 2999, 0, 17], device=DEVICE)
    ours = scoring._score_tokens(logits, index, ids, num_top)
    wanted = plain.score_tokens(logits, index, ids, num_top)
    assert torch.equal(ours.ranks, wanted.ranks)
    assert torch.equal(ours.top_ids, wanted.top_ids)
    torch.testing.assert_close(ours.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.top_logprobs, wanted.top_logprobs, rtol=0, atol=1e-5)


def test_what_the_kernels_take() -> None:
    logits = torch.zeros(2, 64)
    assert takes(logits, 20)
    assert takes(logits.bfloat16(), 0)
    assert not takes(logits, 21)
    assert not takes(logits[:, :8], 9)
    assert not takes(logits.double(), 5)
    assert not takes(logits[:, ::2], 5)
