"""Sampling options against a one-token-at-a-time reference, at every position of a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from emberline.layout import Scored, TokenLayout, Tokens
from emberline.sampling.processors import SamplingBatch, process
from emberline.sampling.truncation import keep_min_p_, keep_top_
from emberline.types import SamplingParams

from support.reference_sampling import NearBoundary, processed_by_hand, truncated_by_hand

VOCAB = 7


@dataclass(frozen=True)
class Case:
    """A request in the middle of its life, and the drafts of this step."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    eos: frozenset[int] = frozenset()
    num_scored_before: int = 0  # scored entries before the window
    samples: bool = True


def reference(logits: list[float], case: Case, num_drafts: int) -> list[float]:
    """Logits of p after `num_drafts` of the drafts have been emitted."""
    output = case.output + case.drafts[:num_drafts]
    return processed_by_hand(logits, case.params, case.prompt, output, case.eos)


# Running real steps.


def lay_out(cases: list[Case]) -> tuple[TokenLayout, Tokens]:
    """Every query is: tokens scored before the window, the anchor, the drafts."""
    ids, query, window = [], [], []
    for case in cases:
        anchor = (case.prompt + case.output)[-1]
        known = [0] * case.num_scored_before + [anchor]
        ids += known + case.drafts
        query.append(len(known) + len(case.drafts))
        window.append(1 + len(case.drafts) if case.samples else 0)
    layout = TokenLayout.build(
        torch.tensor(query),
        torch.tensor(window),
        scored_lens=torch.tensor(query),
        num_tokens=sum(query),
        num_scored=sum(query),
    ).check()
    return layout, Tokens(torch.tensor(ids))


def sampling_of(cases: list[Case]) -> SamplingBatch:
    return SamplingBatch.build(
        [case.params for case in cases],
        [case.prompt for case in cases],
        [case.output for case in cases],
        [case.eos for case in cases],
    )


def run(logits: Tensor, cases: list[Case]) -> Tensor:
    layout, ids = lay_out(cases)
    before = logits.clone()
    processed = process(Scored(logits), layout, ids, sampling_of(cases))
    assert torch.equal(logits, before), "raw logits were written to"
    return processed


def num_rows(cases: list[Case]) -> int:
    return sum(case.num_scored_before + 1 + len(case.drafts) for case in cases)


def random_logits(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Multiples of a half: ties happen."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 7, (rows, VOCAB), generator=generator).to(dtype) / 2


def assert_same_law(got: Tensor, expected: list[float]) -> None:
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


IDS = st.integers(0, VOCAB - 1)


def optional(values: list[Any], off: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([off, off, *values])


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=optional([0.2, 0.55, 0.97], 1.0),
    top_k=optional([-1, 1, 2, 5, VOCAB, VOCAB + 3], 0),
    min_p=optional([0.07, 0.4, 1.0], 0.0),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, -0.5, 2.0]), max_size=2),
    frequency_penalty=optional([-1.5, 0.25, 2.0], 0.0),
    presence_penalty=optional([-0.75, 1.0], 0.0),
    repetition_penalty=optional([0.8, 1.15, 3.0], 1.0),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(IDS, max_size=2),
)
CASES = st.builds(
    Case,
    params=PARAMS,
    prompt=st.lists(IDS, min_size=1, max_size=4),
    output=st.lists(IDS, max_size=5),
    drafts=st.lists(IDS, max_size=4),
    eos=st.frozensets(IDS, max_size=2),
    num_scored_before=st.integers(0, 2),
    samples=st.booleans() | st.just(True),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(CASES, min_size=1, max_size=3), st.integers(0, 999))
def test_a_block_is_processed_as_if_its_tokens_had_come_one_by_one(
    cases: list[Case], seed: int
) -> None:
    logits = random_logits(num_rows(cases), seed)
    processed = run(logits, cases)
    row = 0
    for case in cases:
        window = row + case.num_scored_before
        row = window + 1 + len(case.drafts)
        if not case.samples:
            assert torch.equal(processed[window:row], logits[window:row])
            continue
        before = slice(window - case.num_scored_before, window)
        assert torch.equal(processed[before], logits[before])
        for entry in range(1 + len(case.drafts)):
            try:
                expected = reference(logits[window + entry].tolist(), case, entry)
            except NearBoundary:
                assume(False)
            assert_same_law(processed[window + entry], expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(CASES, min_size=2, max_size=3), st.integers(0, 999))
def test_a_row_is_the_same_float_in_any_batch_and_block(cases: list[Case], seed: int) -> None:
    logits = random_logits(num_rows(cases), seed, torch.float32) * 1.1
    together, row = run(logits, cases), 0
    for case in cases:
        end = row + case.num_scored_before + 1 + len(case.drafts)
        assert torch.equal(run(logits[row:end], [case]), together[row:end])
        first = row + case.num_scored_before
        for entry in range(1 + len(case.drafts) if case.samples else 0):
            # Plain decode at the same point: the drafts so far are output, no draft after.
            alone = Case(case.params, case.prompt, case.output + case.drafts[:entry], eos=case.eos)
            assert torch.equal(
                run(logits[first + entry : first + entry + 1], [alone])[0],
                together[first + entry],
            )
        row = end


# What costs nothing.


@pytest.mark.parametrize(
    "case",
    [
        Case(SamplingParams(temperature=0)),
        Case(SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1), drafts=[1, 2]),
        Case(SamplingParams(temperature=1.0, top_k=-1), drafts=[1]),
        Case(SamplingParams(min_tokens=2), output=[1, 1], drafts=[1], eos=frozenset({1})),
        Case(SamplingParams(temperature=0.5, logit_bias={1: 5.0}), samples=False),
    ],
)
def test_logits_that_need_nothing_are_not_copied(case: Case) -> None:
    layout, ids = lay_out([case])
    logits = Scored(random_logits(num_rows([case]), 0))
    assert process(logits, layout, ids, sampling_of([case])) is logits


# Each option by itself, in cases where a wrong rule shows.


def test_min_tokens_bars_exactly_the_entries_before_the_minimum() -> None:
    params = SamplingParams(temperature=0, min_tokens=4, stop_token_ids=[2])
    case = Case(params, output=[3, 3], drafts=[3, 3, 3], eos=frozenset({5}))
    undrafted = Case(params, output=[3, 3, 3], eos=frozenset({5}))
    processed = run(torch.zeros(5, VOCAB), [case, undrafted])
    barred = processed == -torch.inf
    # Two tokens are out: the third and fourth may not end it, the fifth may.
    assert barred[:, 5].tolist() == [True, True, False, False, True]
    assert torch.equal(barred[:, 5], barred[:, 2])
    assert not barred[:, [0, 1, 3, 4, 6]].any()


def test_frequency_counts_every_draft_and_presence_counts_once() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=1.0)
    processed = run(torch.zeros(4, VOCAB), [Case(params, [4, 4], [1], [1, 2, 1])])
    assert processed[:, 1].tolist() == [-1.5, -2.0, -2.0, -2.5]
    assert processed[:, 2].tolist() == [0.0, 0.0, -1.5, -1.5]
    assert processed[:, 4].tolist() == [0.0] * 4  # the prompt does not count


def test_repetition_counts_the_prompt_and_shrinks_either_sign() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    logits = torch.tensor([[3.0, -3.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 2)
    processed = run(logits, [Case(params, [0, 1, 0], [], [2])])
    assert processed[:, :3].tolist() == [[1.5, -6.0, 1.0], [1.5, -6.0, 0.5]]


def test_a_banned_id_stays_banned_at_every_entry() -> None:
    params = SamplingParams(logit_bias={3: -100.0}, top_k=5)
    logits = torch.zeros(5, VOCAB)
    logits[:, 3] = 20.0
    processed = run(logits, [Case(params, drafts=[3, 3, 3, 3])])
    assert (processed.softmax(-1)[:, 3] == 0).all()


def test_temperature_divides_and_spares_greedy_requests() -> None:
    logits = random_logits(2, 0)
    cases = [Case(SamplingParams(temperature=0.5)), Case(SamplingParams(temperature=0))]
    processed = run(logits, cases)
    assert torch.equal(processed, logits / torch.tensor([[0.5], [1.0]]))


# Truncation.


def test_exactly_k_ids_survive_ties_included() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    keep_top_(logits, 3, 1.0)
    assert logits.isfinite().tolist() == [
        [True, True, True, False, False],
        [True, True, True, False, False],
    ]


def test_the_best_of_one_is_the_greedy_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    for top_k, top_p in ((1, 1.0), (0, 1e-9), (2, 1e-9)):
        cut = logits.clone()
        keep_top_(cut, top_k, top_p)
        assert cut.isfinite().tolist() == [[False, True, False]]


def test_top_p_keeps_the_id_that_reaches_the_mass() -> None:
    for top_p, kept in ((0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)):
        logits = torch.zeros(1, 4)
        keep_top_(logits, 0, top_p)
        assert logits.isfinite().tolist() == [[i < kept for i in range(4)]]


def test_top_p_looks_at_what_top_k_and_min_p_left() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    logits = probs.log()
    keep_top_(logits, 2, 0.55)  # 0.4 / 0.7 = 0.57: the first alone reaches 0.55
    assert logits.isfinite().tolist() == [[True, False, False, False]]
    logits = probs.log()
    keep_min_p_(logits, 0.7)
    keep_top_(logits, 0, 0.58)
    assert logits.isfinite().tolist() == [[True, True, False, False]]


def test_min_p_of_one_keeps_the_best_and_its_equals() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0]])
    keep_min_p_(logits, 1.0)
    assert logits.isfinite().tolist() == [[True, False, True]]


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0.0, 0, 0.9),
        (0.0, 2000, 0.9),
        (0.0, 50, 1.0),
        (0.0, 9_999, 0.999),
        (0.2, 0, 0.5),
        (0.05, 300, 0.7),
    ],
)
def test_large_rows_are_cut_where_a_full_sort_cuts(
    scale: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Past the shortlist, and past eight times the shortlist, with many equal logits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-40, 41, (3, 10_000), generator=generator).double() / 10 * scale
    expected = [truncated_by_hand(row, min_p, top_k, top_p) for row in logits.tolist()]
    cut = logits.clone()
    if min_p:
        keep_min_p_(cut, min_p)
    keep_top_(cut, top_k, top_p)
    assert cut.tolist() == expected


def test_a_row_is_cut_the_same_beside_a_flat_one() -> None:
    generator = torch.Generator().manual_seed(4)
    peaked = torch.randn(1, 30_000, generator=generator) * 6
    flat = torch.randn(1, 30_000, generator=generator) * 0.01
    both, alone = torch.cat([flat, peaked]), peaked.clone()
    keep_top_(both, 0, 0.9)
    keep_top_(alone, 0, 0.9)
    assert torch.equal(both[1:], alone)
    assert 1 < alone.isfinite().sum() < 1024
    assert both[0].isfinite().sum() > 8192
