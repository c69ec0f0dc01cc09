"""Slots on the device against what `RequestState` and `block_purposes` say."""

from __future__ import annotations

import torch

from emberline.batch import Purpose
from emberline.ops.triton.slots import (
    ANCHOR,
    ASKS,
    COLUMNS,
    COUPLED,
    LEN,
    LIMIT,
    PURPOSES,
    SEED,
    TEMPERATURE,
    advance_slots,
    read_slots,
)
from emberline.sampling.keys import block_purposes

from support.triton_kernels import DEVICE

NOBODY = 4


def table(num_pages: int = 70) -> torch.Tensor:
    rows = torch.zeros(NOBODY + 1, COLUMNS.value + num_pages, dtype=torch.int64)
    for slot in range(NOBODY):
        rows[slot, ANCHOR.value] = 100 + slot
        rows[slot, LEN.value] = 10 + slot
        rows[slot, LIMIT.value] = (64, 15, 13, 14)[slot]
        rows[slot, SEED.value] = -(2**63) + slot
        rows[slot, TEMPERATURE.value] = torch.tensor(0.3 * slot).view(torch.int32)
        rows[slot, COUPLED.value] = slot % 2
        rows[slot, ASKS.value] = slot // 2
        rows[slot, COLUMNS.value :] = torch.arange(num_pages) + 1000 * slot
    return rows.to(DEVICE)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def test_the_numbers_of_purposes_are_the_engines() -> None:
    assert PURPOSES.value == len(Purpose)


def test_a_step_reads_its_requests_in_its_own_order() -> None:
    slots = ints(3, 0, NOBODY, 1, 2)
    states = read_slots(table(), slots, ints(7, 3, 7, 7, 7), num_pages=66, num_drafts=5)
    assert states.anchors.tolist() == [103, 100, 0, 101, 102]
    assert states.start_positions.tolist() == [13, 10, 0, 11, 12]
    # Slot 2 holds 12 tokens and its anchor of 13: it may emit no more.
    assert states.alive.tolist() == [0, 1, 0, 1, 0]
    assert states.draft_limits.tolist() == [0, 3, 0, 2, 0]
    assert states.seeds.tolist() == [-(2**63) + 3, -(2**63), 0, -(2**63) + 1, -(2**63) + 2]
    assert torch.equal(
        states.temperatures.cpu(), torch.tensor([0.3 * 3, 0.0, 0.0, 0.3 * 1, 0.3 * 2])
    )
    assert states.coupled.tolist() == [True, False, False, True, False]
    assert torch.equal(
        states.draft_purposes, block_purposes(states.coupled, states.start_positions)
    )
    assert states.asks.tolist() == [True, False, False, False, True]
    assert states.page_table[:, [0, 65]].tolist() == [
        [3000, 3065],
        [0, 65],
        [0, 0],
        [1000, 1065],
        [2000, 2065],
    ]


def test_a_step_moves_its_requests_on_and_nobody_else() -> None:
    rows, before = table(), table()
    slots = ints(1, NOBODY, 0, 3)
    states = read_slots(rows, slots, ints(7, 7, 7, 7), num_pages=1, num_drafts=7)
    known, accepted = ints(1, 0, 5, 0), ints(2, 0, 0, 0)
    advance_slots(rows, slots, states, known, accepted, ints(7, 8, 9, -1), ints(0, 3, 3, 4, 4))
    changed = (rows != before).nonzero().tolist()
    assert sorted(changed) == [
        [0, ANCHOR.value],
        [0, LEN.value],
        [0, LIMIT.value],
        [1, ANCHOR.value],
        [1, LEN.value],
    ]
    assert rows[1, [ANCHOR.value, LEN.value]].tolist() == [9, 14]
    assert rows[0, [ANCHOR.value, LEN.value, LIMIT.value]].tolist() == [0, 15, 0]
