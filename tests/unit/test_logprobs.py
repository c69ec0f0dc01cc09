"""The log-softmax: right, one float a token, blind to the batch, bounded in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emberline.layout import Scored
from emberline.sampling.logprobs import chosen_logprobs, score_tokens


def random_logits(rows: int, vocab: int, seed: int = 0) -> Scored:
    generator = torch.Generator().manual_seed(seed)
    return Scored(torch.randn(rows, vocab, generator=generator) * 5)


def index_of(*rows: int) -> Tensor:
    return torch.tensor(rows)


def test_scores_are_those_of_the_softmax() -> None:
    logits = random_logits(30, 101)
    index = torch.randint(0, 30, (50,), generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, 101, (50,), generator=torch.Generator().manual_seed(2))
    scores = score_tokens(logits, index, ids, 5)
    exact = logits.double().softmax(-1).log()[index]
    assert torch.equal(scores.token_ids, ids)
    chosen = exact.gather(-1, ids[:, None]).squeeze(-1)
    assert torch.allclose(scores.logprobs.double(), chosen, atol=1e-5)
    for n, row in enumerate(exact.tolist()):
        order = sorted(range(101), key=lambda i: (-row[i], i))
        assert scores.ranks[n] == order.index(int(ids[n])) + 1
        assert scores.top_ids[n].tolist() == order[:5]
        assert scores.top_logprobs[n].tolist() == pytest.approx(
            [row[i] for i in order[:5]], abs=1e-5
        )


@pytest.mark.parametrize("num_top", [0, 1, 20, 101])
def test_a_token_and_its_top_entry_are_the_same_float(num_top: int) -> None:
    logits = random_logits(20, 101)
    ids = logits.argmax(-1)
    scores = score_tokens(logits, torch.arange(20), ids, num_top)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (20, num_top)
    assert (scores.ranks == 1).all()
    if num_top:
        assert torch.equal(scores.top_logprobs[:, 0], scores.logprobs)
        assert torch.equal(scores.top_ids[:, 0], ids)
        again = score_tokens(logits, torch.arange(20), scores.top_ids[:, -1], 0)
        assert torch.equal(again.logprobs, scores.top_logprobs[:, -1])
    chosen = chosen_logprobs(logits, torch.arange(20), [(int(i),) for i in ids])
    assert [row[0] for row in chosen] == scores.logprobs.tolist()


def test_ties_share_the_better_rank_and_list_the_lowest_id_first() -> None:
    logits = Scored(torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0, 1.0]]))
    scores = score_tokens(logits, torch.zeros(6, dtype=torch.int64), torch.arange(6), 5)
    assert scores.ranks.tolist() == [3, 1, 3, 1, 6, 3]
    assert scores.top_ids.tolist() == [[1, 3, 0, 2, 5]] * 6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40), st.integers(0, 40))
def test_top_ids_are_ordered_by_value_then_id(values: list[int], num_top: int) -> None:
    num_top = min(num_top, len(values))
    row = [-math.inf if value == -2 else float(value) for value in values]
    if max(row) == -math.inf:
        row[0] = 0.0
    scores = score_tokens(Scored(torch.tensor([row])), index_of(0), index_of(0), num_top)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert scores.top_ids[0].tolist() == order[:num_top]


@pytest.mark.parametrize("vocab", [4_096, 50_257])
@pytest.mark.parametrize("num_top", [1, 5, 24])
@pytest.mark.parametrize("kind", ["spread", "coarse", "flat", "masked", "ties behind the first"])
def test_large_vocabularies_are_ordered_by_value_then_id(
    vocab: int, num_top: int, kind: str
) -> None:
    rows = 5
    logits = random_logits(rows, vocab, seed=3)
    if kind == "coarse":  # many ties everywhere, as bfloat16 has
        logits = Scored(logits.round())
    elif kind == "flat":
        logits = Scored(torch.zeros(rows, vocab))
    elif kind == "masked":  # fewer ids are left than are asked for
        kept = torch.arange(vocab) % (vocab // 3) == 7
        logits = Scored(logits.masked_fill(~kept, -torch.inf))
    elif kind == "ties behind the first":
        logits = Scored(logits.clamp(max=9.0))
        logits[torch.arange(rows), torch.arange(rows) * 700] = 11.0
    ids = torch.arange(rows) * 11 % vocab
    scores = score_tokens(logits, torch.arange(rows), ids, num_top)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(scores.top_ids, order[:, :num_top])
    above = logits > logits.gather(-1, ids[:, None])
    assert torch.equal(scores.ranks, above.sum(-1) + 1)


def test_the_first_alternative_is_the_argmax_where_values_round_to_one() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 1], logits[0, 2] = 1e-8, 2e-8
    scores = score_tokens(Scored(logits), index_of(0), index_of(2), 4)
    assert scores.top_logprobs[0].unique().numel() == 1
    assert scores.top_ids[0].tolist() == [2, 1, 0, 3]
    assert scores.ranks.item() == 1


def test_masked_ids_score_minus_infinity() -> None:
    logits = Scored(torch.tensor([[0.0, -torch.inf, 0.0]]))
    scores = score_tokens(logits, index_of(0), index_of(1), 3)
    assert scores.logprobs.item() == -math.inf
    assert scores.ranks.item() == 3
    assert scores.top_logprobs[0].tolist() == pytest.approx([-math.log(2)] * 2 + [-math.inf])


@pytest.mark.parametrize("vocab", [3, 1000, 49_152, 50_257])
def test_a_row_scores_the_same_in_any_company(vocab: int) -> None:
    logits = random_logits(19, vocab)
    ids = torch.arange(19) % vocab
    num_top = min(20, vocab)
    whole = score_tokens(logits, torch.arange(19), ids, num_top)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            for rows in ([0], [18], [5, 3], list(range(7, 16)), list(range(18, -1, -1))):
                index = torch.tensor(rows)
                part = score_tokens(logits, index, ids[rows], num_top)
                assert torch.equal(part.logprobs, whole.logprobs[rows])
                assert torch.equal(part.ranks, whole.ranks[rows])
                assert torch.equal(part.top_ids, whole.top_ids[rows])
                assert torch.equal(part.top_logprobs, whole.top_logprobs[rows])
                alone = Scored(logits[index].clone())
                moved = score_tokens(alone, torch.arange(len(rows)), ids[rows], 0)
                assert torch.equal(moved.logprobs, whole.logprobs[rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("given", "scored"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scores_are_single_precision_unless_given_double(
    given: torch.dtype, scored: torch.dtype
) -> None:
    logits = Scored(random_logits(2, 9).to(given))
    scores = score_tokens(logits, index_of(1), index_of(4), 2)
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == scored
    assert scores.logprobs.item() == pytest.approx(
        logits[1].double().softmax(-1)[4].log().item(), abs=1e-6
    )


def test_nothing_to_score_is_an_empty_score() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    scores = score_tokens(random_logits(3, 5), none, none, 2)
    assert scores.logprobs.shape == (0,)
    assert scores.top_ids.shape == (0, 2)
    assert chosen_logprobs(random_logits(3, 5), none, []) == []


def test_chosen_ids_keep_their_order_and_their_request() -> None:
    logits = random_logits(12, 50)
    index = torch.arange(11, -1, -1)
    wanted = [(), (3,), (4, 4, 0), (), *[(n, n + 1) for n in range(8)]]
    exact = logits.double().softmax(-1).log()
    for n, values in enumerate(chosen_logprobs(logits, index, wanted)):
        assert values == pytest.approx([exact[11 - n, i].item() for i in wanted[n]], abs=1e-5)


def test_logits_are_left_alone() -> None:
    logits = random_logits(4, 30)
    before = logits.clone()
    score_tokens(logits, torch.arange(4), torch.arange(4), 3)
    chosen_logprobs(logits, torch.arange(4), [(1,)] * 4)
    assert torch.equal(logits, before)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    vocab, sizes = 1000, []
    logits = random_logits(2, vocab)
    for num_tokens in (16, 60):
        index = torch.zeros(num_tokens, dtype=torch.int64)
        with LargestTensor() as largest:
            score_tokens(logits, index, index, 1)
            chosen_logprobs(logits, index, [(3,)] * num_tokens)
        sizes.append(largest.numel)
    assert sizes == [16 * vocab, 16 * vocab]
