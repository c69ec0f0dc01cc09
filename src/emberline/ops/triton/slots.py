"""The state of requests that stays on the device between steps: reading it, and moving it on.

A slot's state is one row of int64, `COLUMNS` numbers and then its pages, so that the host brings
any of it up to date with one list of (place, number) pairs. The last row belongs to nobody: its
limit is 0, and what fills a bucket up points at it.

Must not know what a step does with the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.ops.triton.gpu import await_inputs, early_start

# Columns of a row. The numbers of a live request; a temperature is stored as its float32's bits.
ANCHOR = tl.constexpr(0)  # last emitted token, which has no KV yet
LEN = tl.constexpr(1)  # tokens with KV: the anchor's position
LIMIT = tl.constexpr(2)  # most tokens the sequence may hold
SEED = tl.constexpr(3)
TEMPERATURE = tl.constexpr(4)
COUPLED = tl.constexpr(5)
ASKS = tl.constexpr(6)  # whether its tokens are to be scored
COLUMNS = tl.constexpr(8)  # the pages begin here

PURPOSES = tl.constexpr(5)  # how many `batch.Purpose` there are
DRAFT = tl.constexpr(1)
PAGES = 64  # pages that a program copies


@dataclass(frozen=True, slots=True)
class SlotStates:
    """What a step reads of its B requests. A request is alive while it may emit a token."""

    anchors: Tensor  # [B] int64
    start_positions: Tensor  # [B] int64, tokens with KV
    alive: Tensor  # [B] int64, 0 or 1
    draft_limits: Tensor  # [B] int64, most drafts each may have verified; 0 of one not alive
    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B] float32
    coupled: Tensor  # [B] bool
    draft_purposes: Tensor  # [B] int64, as `sampling.keys.block_purposes`
    asks: Tensor  # [B] bool
    page_table: Tensor  # [B, M] int32


@triton.jit(do_not_specialize=["num_pages", "num_drafts"])
def _read(
    rows, slots, limits,
    anchors, starts, alive, draft_limits, seeds, temperatures, coupled, purposes, asks, page_table,
    row_stride, num_pages, num_drafts,
    PAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (b, i) copies pages of request b; program (b, 0) the rest."""
    await_inputs(EARLY)
    req = tl.program_id(0)
    row = rows + tl.load(slots + req) * row_stride
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    inside = page < num_pages
    held = tl.load(row + COLUMNS + page, mask=inside, other=0)
    tl.store(page_table + req * num_pages + page, held.to(tl.int32), mask=inside)
    if tl.program_id(1) == 0:
        start = tl.load(row + LEN)
        limit = tl.load(row + LIMIT)
        is_coupled = tl.load(row + COUPLED)
        tl.store(anchors + req, tl.load(row + ANCHOR))
        tl.store(starts + req, start)
        # The anchor is a token of the sequence, and a block ends in one that is no draft.
        tl.store(alive + req, (limit - start - 1 > 0).to(tl.int64))
        most = tl.minimum(tl.load(limits + req), limit - start - 2)
        tl.store(draft_limits + req, tl.minimum(tl.maximum(most, 0), num_drafts))
        tl.store(seeds + req, tl.load(row + SEED))
        bits = tl.load(row + TEMPERATURE).to(tl.int32)
        tl.store(temperatures + req, bits.to(tl.float32, bitcast=True))
        tl.store(coupled + req, is_coupled != 0)
        tl.store(purposes + req, tl.where(is_coupled != 0, 0, DRAFT + PURPOSES * (start + 1)))
        tl.store(asks + req, tl.load(row + ASKS) != 0)


def read_slots(
    rows: Tensor, slots: Tensor, limits: Tensor, *, num_pages: int, num_drafts: int
) -> SlotStates:
    """Gather what a step of B requests needs.

    Args:
        rows: [S + 1, COLUMNS + any] int64.
        slots: [B] int64, rows; S: nobody.
        limits: [B] int64, most drafts the host has room for.
        num_pages: M, pages of the longest request at most.
        num_drafts: K, drafts of a block at most.
    """
    num_reqs, device = len(slots), rows.device

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    states = SlotStates(
        anchors=ints(num_reqs),
        start_positions=ints(num_reqs),
        alive=ints(num_reqs),
        draft_limits=ints(num_reqs),
        seeds=ints(num_reqs),
        temperatures=torch.empty(num_reqs, device=device),
        coupled=torch.empty(num_reqs, dtype=torch.bool, device=device),
        draft_purposes=ints(num_reqs),
        asks=torch.empty(num_reqs, dtype=torch.bool, device=device),
        page_table=torch.empty(num_reqs, num_pages, dtype=torch.int32, device=device),
    )
    _read[(num_reqs, triton.cdiv(num_pages, PAGES))](
        rows, slots, limits,
        states.anchors, states.start_positions, states.alive, states.draft_limits, states.seeds,
        states.temperatures, states.coupled, states.draft_purposes, states.asks, states.page_table,
        rows.stride(0), num_pages, num_drafts,
        PAGES=PAGES, **early_start(device),
    )  # fmt: skip
    return states


@triton.jit
def _advance(
    rows, slots, starts, known_lens, num_accepted, token_ids, emitted_start_loc, row_stride,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One request a program."""
    await_inputs(EARLY)
    req = tl.program_id(0)
    row = rows + tl.load(slots + req) * row_stride
    begin = tl.load(emitted_start_loc + req)
    end = tl.load(emitted_start_loc + req + 1)
    added = tl.load(known_lens + req) + tl.load(num_accepted + req)
    tl.store(row + LEN, tl.load(starts + req) + added)
    if end > begin:
        last = tl.load(token_ids + end - 1)
        tl.store(row + ANCHOR, tl.maximum(last, 0))
        if last < 0:  # nothing could be drawn: the host will say so
            tl.store(row + LIMIT, tl.full((), 0, tl.int64))


def advance_slots(
    rows: Tensor,
    slots: Tensor,
    states: SlotStates,
    known_lens: Tensor,
    num_accepted: Tensor,
    token_ids: Tensor,
    emitted_start_loc: Tensor,
) -> None:
    """Write the state after a step: KV of known and accepted tokens, the new anchor.

    A request whose last emitted id is -1 ends.

    Args:
        rows, slots: as in `read_slots`; written to.
        states: what it returned.
        known_lens: [B] int64, tokens forwarded besides drafts; 0: it did not run.
        num_accepted: [B] int64.
        token_ids: [any] int64, request-major.
        emitted_start_loc: [B + 1] int64.
    """
    if len(slots):
        _advance[(len(slots),)](
            rows, slots, states.start_positions, known_lens, num_accepted, token_ids,
            emitted_start_loc, rows.stride(0), **early_start(rows.device),
        )  # fmt: skip
