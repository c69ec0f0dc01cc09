"""The three spaces: properties over random batches, with padding rows poisoned by NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emberline.layout import Rows, TokenLayout, Tokens, start_loc

WIDTH = 4


@dataclass(frozen=True)
class Shape:
    """One request of a step: tokens forwarded, tokens scored, tokens sampled from."""

    query: int
    scored: int
    window: int


def shapes() -> st.SearchStrategy[Shape]:
    """Verify, decode, a last prompt chunk, a middle one; with and without prompt scores."""
    return st.integers(1, 9).flatmap(
        lambda query: st.integers(0, query).flatmap(
            lambda scored: st.integers(0, scored).map(lambda window: Shape(query, scored, window))
        )
    )


BATCHES = st.lists(shapes(), min_size=1, max_size=6)
KINDS = st.sampled_from(["compact", "static"])


def lay_out(batch: list[Shape], kind: str, row_granule: int = 1) -> TokenLayout:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(shape, name) for shape in batch], dtype=torch.int64)

    return TokenLayout.build(
        column("query"),
        column("window"),
        scored_lens=column("scored"),
        num_tokens=sum(shape.query for shape in batch),
        num_scored=sum(shape.scored for shape in batch),
        kind=kind,  # type: ignore[arg-type]
        width=WIDTH,
        row_granule=row_granule,
    ).check()


@settings(max_examples=200, deadline=None)
@given(BATCHES, KINDS, st.integers(1, 40))
def test_every_map_agrees_with_counting(batch: list[Shape], kind: str, row_granule: int) -> None:
    layout = lay_out(batch, kind, row_granule)
    token = scored = 0
    for req, shape in enumerate(batch):
        assert layout.query_start_loc[req] == token
        assert layout.scored_start_loc[req] == scored
        assert layout.window_start[req] == scored + shape.scored - shape.window
        for offset in range(shape.query):
            assert layout.req_of_token[token + offset] == req
            assert layout.offset_of_token[token + offset] == offset
        for entry in range(shape.scored):
            expected = token + shape.query - shape.scored + entry
            assert layout.token_of_scored[scored + entry] == expected
        token, scored = token + shape.query, scored + shape.scored
    assert (layout.num_reqs, layout.num_tokens, layout.num_scored) == (len(batch), token, scored)
    assert layout.num_rows >= token
    assert layout.num_rows % row_granule == 0
    if kind == "compact":
        assert layout.num_rows < token + row_granule


@settings(max_examples=200, deadline=None)
@given(BATCHES, KINDS, st.integers(1, 40), st.integers(0, 99))
def test_no_later_code_can_tell_how_rows_were_laid(
    batch: list[Shape], kind: str, row_granule: int, seed: int
) -> None:
    layout = lay_out(batch, kind, row_granule)
    x = torch.randn(layout.num_tokens, 3, generator=torch.Generator().manual_seed(seed))
    rows = layout.pack(Tokens(x), fill=math.nan)
    assert rows.shape == (layout.num_rows, 3)
    assert rows.isnan().any(-1).sum() == layout.num_rows - layout.num_tokens
    assert torch.equal(layout.unpack(rows), x)
    # A model that treats rows independently leaves padding poisoned and real tokens clean.
    scored = layout.score(layout.unpack(Rows(rows * 2 + 1)))
    assert torch.equal(scored, (x * 2 + 1)[layout.token_of_scored])
    assert scored.isfinite().all()


@settings(max_examples=100, deadline=None)
@given(BATCHES)
def test_static_and_compact_differ_in_rows_only(batch: list[Shape]) -> None:
    compact, static = lay_out(batch, "compact"), lay_out(batch, "static")
    for name in TokenLayout.__slots__:
        if name not in ("row_of_token", "num_rows"):
            a, b = getattr(compact, name), getattr(static, name)
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert compact.num_rows == compact.num_tokens
    starts = static.row_of_token[static.query_start_loc[:-1]]
    assert (starts % WIDTH == 0).all()
    assert static.num_rows % WIDTH == 0


def test_a_uniform_verify_step_has_one_static_shape() -> None:
    whole = lay_out([Shape(4, 4, 4)] * 3, "static")
    trimmed = lay_out([Shape(4, 4, 4), Shape(1, 1, 1), Shape(2, 2, 2)], "static")
    assert whole.num_rows == trimmed.num_rows == 12
    assert trimmed.row_of_token.tolist() == [0, 1, 2, 3, 4, 8, 9]


def test_scored_defaults_to_the_window() -> None:
    lens, windows = torch.tensor([3, 5]), torch.tensor([3, 1])
    layout = TokenLayout.build(lens, windows, num_tokens=8, num_scored=4).check()
    assert layout.token_of_scored.tolist() == [0, 1, 2, 7]
    assert layout.window_start.tolist() == [0, 3]


def test_a_tensor_of_the_wrong_space_is_an_error_not_a_wrong_number() -> None:
    layout = lay_out([Shape(1, 1, 1), Shape(3, 3, 3)], "static")
    assert (layout.num_tokens, layout.num_rows) == (4, 8)
    with pytest.raises(ValueError, match="8 row-space entries, got 4"):
        layout.unpack(Rows(torch.zeros(4, 2)))
    with pytest.raises(ValueError, match="4 token-space entries, got 8"):
        layout.pack(Tokens(torch.zeros(8, 2)), fill=0.0)
    with pytest.raises(ValueError, match="4 token-space entries, got 8"):
        layout.score(Tokens(torch.zeros(8, 2)))


@pytest.mark.parametrize(
    ("query", "window", "scored", "num_tokens", "message"),
    [
        ([0, 2], [0, 2], [0, 2], 2, "at least one token"),
        ([2, 2], [1, 3], [1, 3], 4, "window_lens <= scored_lens <= query_lens"),
        ([2, 2], [2, 2], [1, 2], 4, "window_lens <= scored_lens <= query_lens"),
    ],
)
def test_impossible_steps_are_refused(
    query: list[int], window: list[int], scored: list[int], num_tokens: int, message: str
) -> None:
    layout = TokenLayout.build(
        torch.tensor(query),
        torch.tensor(window),
        scored_lens=torch.tensor(scored),
        num_tokens=num_tokens,
        num_scored=sum(scored),
    )
    with pytest.raises(ValueError, match=message):
        layout.check()


def test_start_loc_counts_from_zero() -> None:
    assert start_loc(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert start_loc(torch.tensor([], dtype=torch.int64)).tolist() == [0]
