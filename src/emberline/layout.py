"""Where every token's row is. The one place that converts between the three spaces.

    Tokens  [T, ...]  what is real: live tokens, request-major, no padding
    Rows    [R, ...]  what runs: padding included
    Scored  [Q, ...]  what has a distribution: a subset of Tokens, in order

Static and compact differ in `row_of_token` and `num_rows`, and in nothing else: no later code can
tell which it was. Must not know about models, sampling or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import torch
from torch import Tensor

from emberline.config import LayoutKind

Tokens = NewType("Tokens", Tensor)
Rows = NewType("Rows", Tensor)
Scored = NewType("Scored", Tensor)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The map of one step. Host integers are known before the device has decided any split."""

    num_reqs: int  # B
    num_tokens: int  # T
    num_rows: int  # R
    num_scored: int  # Q; equal to T: token i is scored entry i
    max_query_len: int  # most tokens that one request may forward
    query_start_loc: Tensor  # [B + 1] int64, token space
    window_lens: Tensor  # [B] int64: trailing tokens sampled from; 0 mid-prefill, 1, or 1 + drafts
    req_of_token: Tensor  # [T] int64
    offset_of_token: Tensor  # [T] int64, within its request's query
    row_of_token: Tensor  # [T] int64
    scored_start_loc: Tensor  # [B + 1] int64, scored space
    token_of_scored: Tensor  # [Q] int64

    @classmethod
    def build(
        cls,
        query_lens: Tensor,
        window_lens: Tensor,
        *,
        num_tokens: int,
        num_scored: int,
        kind: LayoutKind = "compact",
        width: int = 1,
        row_granule: int = 1,
        scored_lens: Tensor | None = None,
        max_query_len: int | None = None,
    ) -> TokenLayout:
        """Lay out one step.

        Args:
            query_lens: [B] int64, tokens each request forwards.
            window_lens: [B] int64, trailing tokens each request samples from.
            num_tokens: sum of `query_lens`, known to the host as requests plus draft budget.
            num_scored: sum of `scored_lens`.
            kind: "compact" packs rows densely; "static" starts every request at a multiple of
                `width` rows, so that a uniform verify step has one fixed shape.
            width: row granule of a request under "static" (1 + drafts a block).
            row_granule: rows come in multiples of it (`Target.row_granule`).
            scored_lens: [B] int64, trailing tokens that get logits; None means `window_lens`,
                longer where prompt log-probabilities were asked for.
            max_query_len: a bound of `query_lens` that the host knows; None means `num_tokens`.
        """
        device, num_reqs = query_lens.device, len(query_lens)
        scored_lens = window_lens if scored_lens is None else scored_lens
        start, scored_start = start_loc(query_lens), start_loc(scored_lens)
        reqs = torch.arange(num_reqs, device=device)
        req = torch.repeat_interleave(reqs, query_lens, output_size=num_tokens)
        token = torch.arange(num_tokens, device=device)
        offset = token - start[req]
        if kind == "static":
            row_start = start_loc((query_lens + width - 1) // width * width)
            row, num_rows = row_start[req] + offset, int(row_start[-1])
        else:
            row, num_rows = token, num_tokens
        scored_req = torch.repeat_interleave(reqs, scored_lens, output_size=num_scored)
        tail = start[1:] - scored_start[1:]
        token_of_scored = tail[scored_req] + torch.arange(num_scored, device=device)
        return cls(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_rows=in_granules(max(num_rows, 1), row_granule),
            num_scored=num_scored,
            max_query_len=num_tokens if max_query_len is None else max_query_len,
            query_start_loc=start,
            window_lens=window_lens,
            req_of_token=req,
            offset_of_token=offset,
            row_of_token=row,
            scored_start_loc=scored_start,
            token_of_scored=token_of_scored,
        )

    def check(self) -> TokenLayout:
        """Raise `ValueError` unless every invariant holds. Waits for the device: tests, CPU."""
        lens = self.query_start_loc.diff()
        if self.num_reqs and int(lens.max()) > self.max_query_len:
            raise ValueError(f"query_lens {lens.tolist()} exceed {self.max_query_len}")
        if self.num_reqs and int(lens.min()) < 1:
            raise ValueError(f"every request forwards at least one token, got {lens.tolist()}")
        if int(self.query_start_loc[-1]) != self.num_tokens:
            raise ValueError(f"query_lens {lens.tolist()} do not cover {self.num_tokens} tokens")
        scored = self.scored_start_loc.diff()
        if bool((self.window_lens > scored).any()) or bool((scored > lens).any()):
            raise ValueError("need window_lens <= scored_lens <= query_lens")
        if int(self.scored_start_loc[-1]) != self.num_scored:
            raise ValueError("scored_lens do not cover num_scored")
        if self.num_tokens:
            rising = bool((self.row_of_token.diff() >= 1).all())
            if not rising or int(self.row_of_token[-1]) >= self.num_rows:
                raise ValueError("row_of_token must increase strictly within [0, num_rows)")
        return self

    # The only crossings between the spaces.

    def pack(self, x: Tokens, fill: float) -> Rows:
        """[T, ...] to [R, ...]; padding rows hold `fill` (NaN in tests, never a plausible zero)."""
        _expect(x, self.num_tokens, "token")
        if self.num_rows == self.num_tokens:
            return Rows(x)
        rows = x.new_full((self.num_rows, *x.shape[1:]), fill)
        rows[self.row_of_token] = x
        return Rows(rows)

    def unpack(self, x: Rows) -> Tokens:
        """[R, ...] to [T, ...]; padding is dropped."""
        _expect(x, self.num_rows, "row")
        if self.num_rows == self.num_tokens:
            return Tokens(x)
        return Tokens(x[self.row_of_token])

    def score(self, x: Tokens) -> Scored:
        """[T, ...] to [Q, ...]."""
        _expect(x, self.num_tokens, "token")
        if self.num_scored == self.num_tokens:  # none is left out
            return Scored(x)
        return Scored(x[self.token_of_scored])

    @property
    def window_start(self) -> Tensor:
        """[B] int64, scored space: entry 0 of the window a request samples from."""
        return self.scored_start_loc[1:] - self.window_lens


def in_granules(count: int, granule: int) -> int:
    """The least multiple of `granule` that holds `count`."""
    return -(-count // granule) * granule


def start_loc(lens: Tensor) -> Tensor:
    """[B] lengths to [B + 1] offsets, int64."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])


def _expect(x: Tensor, count: int, space: str) -> None:
    if x.shape[0] != count:
        raise ValueError(f"expected {count} {space}-space entries, got {x.shape[0]}")
