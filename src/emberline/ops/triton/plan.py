"""What is verified and where its rows are, on a GPU: from confidences to a layout.

`sound_lens` is the cut of `engine.propose` at drafts that were drawn from nothing, `allocate` the
allocation of `verify.planner`, its two numbers being given; `lay_out` and `fill_batch` are
`TokenLayout.build` and `engine.step.forward_batch` for buckets of fixed size, whose tail is
padding. Nothing waits for the host, and no shape depends on a value.

Must not know why a budget is what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.triton.gpu import await_inputs, early_start

REQS = 64  # requests whose drafts a program looks at together
LENS = 256  # requests whose lengths it does
SLOTS = 8  # of a block, at least: one variant of a kernel serves most blocks
TOKENS = 128  # tokens that a program writes together


@triton.jit(do_not_specialize=["num_reqs", "num_drafts"])
def _sound_lens(
    normalisers, num_drafted, lens, num_reqs, num_drafts,
    SLOTS: tl.constexpr, REQS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    req = tl.program_id(0) * REQS + tl.arange(0, REQS)
    slot = tl.arange(0, SLOTS)
    there = req < num_reqs
    at = (req[:, None] * num_drafts + slot) * 2
    read = there[:, None] & (slot < num_drafts)
    peak = tl.abs(tl.load(normalisers + at, mask=read, other=0.0))
    mass = tl.abs(tl.load(normalisers + at + 1, mask=read, other=1.0))
    sound = (peak < float("inf")) & (mass < float("inf"))  # no NaN is less than anything
    first = tl.min(tl.where(sound, SLOTS, slot[None, :]), 1)
    drafted = tl.load(num_drafted + req, mask=there, other=0)
    tl.store(lens + req, tl.minimum(drafted, first.to(tl.int64)), mask=there)


def sound_lens(normalisers: Tensor, num_drafted: Tensor) -> Tensor:
    """How many drafts of each request come before its first whose logits were not finite.

    A ratio to a q that is NaN would accept anything: such a draft was drawn from nothing.

    Args:
        normalisers: [B, K, 2] float32, largest logit and mass of each q, contiguous.
        num_drafted: [B] int64, 0 .. K.

    Returns:
        [B] int64, at most `num_drafted`.
    """
    num_reqs, num_drafts, _ = normalisers.shape
    lens = torch.empty_like(num_drafted)
    if num_reqs:
        _sound_lens[(triton.cdiv(num_reqs, REQS),)](
            normalisers, num_drafted, lens, num_reqs, num_drafts,
            SLOTS=_slots(num_drafts), REQS=REQS, **early_start(lens.device),
        )  # fmt: skip
    return lens


def _slots(num_drafts: int) -> int:
    return max(SLOTS, int(triton.next_power_of_2(num_drafts)))


@triton.jit
def _sure(confidence):
    """As float64. NaN counts as 0: unknown is not worth verifying."""
    known = tl.where(confidence == confidence, confidence, 0.0)
    return tl.minimum(tl.maximum(known, 0.0), 1.0).to(tl.float64)


@triton.jit(do_not_specialize=["num_reqs", "num_drafts"])
def _allocate(
    confidence, num_drafted, budget, threshold, num_admitted, num_reqs, num_drafts,
    SLOTS: tl.constexpr, REQS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One request a program: for each of its drafts it counts those that come first.

    Confidences are read all at once, and multiplied one by one as the planner does it.
    """
    await_inputs(EARLY)
    req = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    there = slot < num_drafts
    mine = _sure(tl.load(confidence + req * num_drafts + slot, mask=there, other=0.0))
    own = tl.zeros((SLOTS,), tl.float64)
    survival = tl.full((), 1.0, tl.float64)
    for k in range(num_drafts):
        survival *= tl.sum(tl.where(slot == k, mine, 0.0), 0)
        own = tl.where(slot == k, survival, own)
    first = tl.zeros((SLOTS,), tl.int64)
    for lo in range(0, num_reqs, REQS):
        other = lo + tl.arange(0, REQS)
        drafted = tl.load(num_drafted + other, mask=other < num_reqs, other=0)
        at = other[:, None] * num_drafts + slot
        read = (other < num_reqs)[:, None] & there
        sure = _sure(tl.load(confidence + at, mask=read, other=0.0))
        theirs = tl.full((REQS,), 1.0, tl.float64)
        for k in range(num_drafts):
            theirs *= tl.sum(tl.where(slot[None, :] == k, sure, 0.0), 1)
            earlier = (k < slot[None, :]) | ((k == slot[None, :]) & (other[:, None] < req))
            ahead = (theirs[:, None] > own[None, :]) | ((theirs[:, None] == own[None, :]) & earlier)
            ahead = ahead & (k < drafted)[:, None]
            first += tl.sum(ahead.to(tl.int64), 0)
    admitted = (slot < tl.load(num_drafted + req)) & (first < tl.load(budget))
    if threshold is not None:
        admitted = admitted & (own >= tl.load(threshold).to(tl.float64))
    tl.store(num_admitted + req, tl.sum(admitted.to(tl.int64), 0))


def allocate(
    confidence: Tensor, num_drafted: Tensor, budget: Tensor, threshold: Tensor | None = None
) -> Tensor:
    """How many drafts of each request a `verify.planner.DevicePlan` admits.

    Those among the `budget` likeliest to survive, as far as their survival reaches the threshold.
    By survival, the product of the confidences up to a draft; ties by position, then by request.

    Args:
        confidence: [B, K] float32, contiguous.
        num_drafted: [B] int64, 0 .. K.
        budget: [] int64, drafts of all requests together.
        threshold: [] float32, least survival; None: any.

    Returns:
        [B] int64: a prefix of each block.
    """
    num_reqs, num_drafts = confidence.shape
    num_admitted = torch.empty_like(num_drafted)
    if num_reqs:
        _allocate[(num_reqs,)](
            confidence.contiguous(), num_drafted, budget, threshold, num_admitted,
            num_reqs, num_drafts,
            SLOTS=_slots(num_drafts), REQS=REQS, **early_start(num_drafted.device),
        )  # fmt: skip
    return num_admitted


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The tensors of a `TokenLayout` in a bucket of B requests, T tokens and Q scored tokens.

    Requests of the bucket that do not live have a length of 0. Of the tails: tokens past the last
    live one have request -1, offset 0 and the last rows; scored entries past the last one point at
    token 0, whose logits nobody reads there.
    """

    query_start_loc: Tensor  # [B + 1] int64
    window_lens: Tensor  # [B] int64
    req_of_token: Tensor  # [T] int64
    offset_of_token: Tensor  # [T] int64
    row_of_token: Tensor  # [T] int64
    scored_start_loc: Tensor  # [B + 1] int64
    token_of_scored: Tensor  # [Q] int64
    window_start: Tensor  # [B] int64, scored space


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_scored", "num_rows", "granule"])
def _lay_out(
    query_lens, window_lens, scored_lens, drafts,
    query_start_loc, windows, req_of_token, offset_of_token, row_of_token,
    scored_start_loc, token_of_scored, window_start,
    num_reqs, num_tokens, num_scored, num_rows, granule,
    LENS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b writes request b's part of every tensor, program B what belongs to none."""
    await_inputs(EARLY)
    req = tl.program_id(0)
    start = tl.full((), 0, tl.int64)
    row_start = tl.full((), 0, tl.int64)
    scored_start = tl.full((), 0, tl.int64)
    for first in range(0, req, LENS):
        other = first + tl.arange(0, LENS)
        lens = tl.load(query_lens + other, mask=other < req, other=0)
        scored = tl.load(scored_lens + other, mask=other < req, other=0)
        if drafts is not None:
            more = tl.load(drafts + other, mask=other < req, other=0)
            lens += more
            scored += more
        start += tl.sum(lens, 0)
        row_start += tl.sum((lens + granule - 1) // granule * granule, 0)
        scored_start += tl.sum(scored, 0)
    tl.store(query_start_loc + req, start)
    tl.store(scored_start_loc + req, scored_start)
    lane = tl.arange(0, TOKENS)
    if req == num_reqs:
        for lo in range(start, num_tokens, TOKENS):
            token = lo + lane
            mask = token < num_tokens
            tl.store(req_of_token + token, tl.full((TOKENS,), -1, tl.int64), mask=mask)
            tl.store(offset_of_token + token, tl.zeros((TOKENS,), tl.int64), mask=mask)
            tl.store(row_of_token + token, num_rows - num_tokens + token, mask=mask)
        for lo in range(scored_start, num_scored, TOKENS):
            scored = lo + lane
            nowhere = tl.zeros((TOKENS,), tl.int64)
            tl.store(token_of_scored + scored, nowhere, mask=scored < num_scored)
    else:
        length = tl.load(query_lens + req)
        num_own = tl.load(scored_lens + req)
        window = tl.load(window_lens + req)
        if drafts is not None:
            more = tl.load(drafts + req)
            length += more
            num_own += more
            window += more
        for lo in range(0, length, TOKENS):
            offset = lo + lane.to(tl.int64)
            # A bucket that is too small loses its last tokens, and nobody else's memory.
            mask = (offset < length) & (start + offset < num_tokens)
            tl.store(req_of_token + start + offset, offset * 0 + req, mask=mask)
            tl.store(offset_of_token + start + offset, offset, mask=mask)
            tl.store(row_of_token + start + offset, row_start + offset, mask=mask)
        for lo in range(0, num_own, TOKENS):
            index = lo + lane.to(tl.int64)
            mask = (index < num_own) & (scored_start + index < num_scored)
            token = start + length - num_own + index
            tl.store(token_of_scored + scored_start + index, token, mask=mask)
        tl.store(windows + req, window)
        tl.store(window_start + req, scored_start + num_own - window)


def lay_out(
    query_lens: Tensor,
    window_lens: Tensor,
    scored_lens: Tensor,
    drafts: Tensor | None = None,
    *,
    num_tokens: int,
    num_scored: int,
    num_rows: int | None = None,
    width: int = 1,
) -> DeviceLayout:
    """`TokenLayout.build` without the host.

    Args:
        query_lens: [B] int64, tokens each request forwards; 0: it does not live.
        window_lens: [B] int64, trailing tokens each samples from.
        scored_lens: [B] int64, trailing tokens that get logits.
        drafts: [B] int64, tokens more in each of the three; None: none.
        num_tokens: T of the bucket, at least the sum of `query_lens`.
        num_scored: Q of the bucket, at least the sum of `scored_lens`.
        num_rows: R of the bucket, None = T. Padding takes the last of them.
        width: rows of a request start at a multiple of it: 1 = compact.
    """
    num_reqs, device = len(query_lens), query_lens.device

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=device)

    layout = DeviceLayout(
        query_start_loc=ints(num_reqs + 1),
        window_lens=ints(num_reqs),
        req_of_token=ints(num_tokens),
        offset_of_token=ints(num_tokens),
        row_of_token=ints(num_tokens),
        scored_start_loc=ints(num_reqs + 1),
        token_of_scored=ints(num_scored),
        window_start=ints(num_reqs),
    )
    _lay_out[(num_reqs + 1,)](
        query_lens, window_lens, scored_lens, drafts,
        layout.query_start_loc, layout.window_lens,
        layout.req_of_token, layout.offset_of_token, layout.row_of_token,
        layout.scored_start_loc, layout.token_of_scored, layout.window_start,
        num_reqs, num_tokens, num_scored, num_tokens if num_rows is None else num_rows, width,
        LENS=LENS, TOKENS=TOKENS, **early_start(device),
    )  # fmt: skip
    return layout


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What the target runs on, in token space of a bucket: those of a `ForwardBatch`."""

    token_ids: Tensor  # [T] int64, 0 past the last live token
    positions: Tensor  # [T] int64, 0 past it
    slot_mapping: Tensor  # [T] int64, past it in page 0, which is scratch
    seq_lens: Tensor  # [B] int64
    first_positions: Tensor  # [B] int64, of what is drawn at the first entry of each window


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_drafts", "num_pages"])
def _fill(
    req_of_token, offset_of_token, query_start_loc, window_lens,
    known_ids, known_start_loc, start_positions, draft_ids, page_table,
    token_ids, positions, slot_mapping, seq_lens, first_positions,
    num_reqs, num_tokens, num_drafts, num_pages,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = index < num_tokens
    req = tl.load(req_of_token + index, mask=inside, other=-1)
    live = req >= 0
    offset = tl.load(offset_of_token + index, mask=live, other=0)
    if known_start_loc is None:
        known = req
        num_known = tl.full((TOKENS,), 1, tl.int64)
    else:
        known = tl.load(known_start_loc + req, mask=live, other=0)
        num_known = tl.load(known_start_loc + req + 1, mask=live, other=0) - known
    is_draft = live & (offset >= num_known)
    given = tl.load(known_ids + known + offset, mask=live & (offset < num_known), other=0)
    draft = tl.load(draft_ids + req * num_drafts + offset - num_known, mask=is_draft, other=0)
    position = tl.load(start_positions + req, mask=live, other=0) + offset
    page = tl.load(page_table + req * num_pages + position // PAGE, mask=live, other=0)
    tl.store(token_ids + index, tl.where(is_draft, draft, given), mask=inside)
    tl.store(positions + index, tl.where(live, position, 0), mask=inside)
    slot = tl.where(live, page * PAGE + position % PAGE, index % PAGE)
    tl.store(slot_mapping + index, slot, mask=inside)
    # The same programs take the requests; there are never more of these than of tokens.
    mask = index < num_reqs
    length = tl.load(query_start_loc + index + 1, mask=mask, other=0)
    length -= tl.load(query_start_loc + index, mask=mask, other=0)
    end = tl.load(start_positions + index, mask=mask, other=0) + length
    tl.store(seq_lens + index, end, mask=mask)
    window = tl.load(window_lens + index, mask=mask, other=0)
    tl.store(first_positions + index, end - window + 1, mask=mask)


def fill_batch(
    layout: DeviceLayout,
    *,
    known_ids: Tensor,
    known_start_loc: Tensor | None,
    start_positions: Tensor,
    draft_ids: Tensor,
    page_table: Tensor,
    page_size: int,
) -> DeviceBatch:
    """Ids, positions and slots of every token of a bucket: known tokens, then admitted drafts.

    Args:
        layout: of the step; a request's query is its known tokens and as many drafts as fit.
        known_ids: [any] int64, request-major; of a request that only decodes, its anchor.
        known_start_loc: [B + 1] int64 in `known_ids`; None: one of each request.
        start_positions: [B] int64, position of the first known token.
        draft_ids: [B, K] int64, contiguous.
        page_table: [B, M] int64, contiguous.
        page_size: tokens a page.
    """
    num_tokens, num_reqs = len(layout.req_of_token), len(start_positions)
    token_ids, positions, slots = (torch.empty_like(layout.req_of_token) for _ in range(3))
    seq_lens, first_positions = (torch.empty_like(start_positions) for _ in range(2))
    _fill[(triton.cdiv(max(num_tokens, num_reqs), TOKENS),)](
        layout.req_of_token, layout.offset_of_token, layout.query_start_loc, layout.window_lens,
        known_ids, known_start_loc, start_positions, draft_ids, page_table,
        token_ids, positions, slots, seq_lens, first_positions,
        num_reqs, num_tokens, draft_ids.shape[1], page_table.shape[1],
        PAGE=page_size, TOKENS=TOKENS, **early_start(seq_lens.device),
    )  # fmt: skip
    return DeviceBatch(token_ids, positions, slots, seq_lens, first_positions)
