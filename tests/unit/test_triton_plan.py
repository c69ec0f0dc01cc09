"""Allocation and layout on the device against the planner, `TokenLayout` and `forward_batch`."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from emberline.batch import DraftProposal, StepShape
from emberline.layout import TokenLayout, start_loc
from emberline.ops.triton.plan import DeviceLayout, allocate, fill_batch, lay_out, sound_lens
from emberline.verify.outlook import Confidences
from emberline.verify.planner import Threshold

from support.triton_kernels import DEVICE

PAGE = 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def plain_allocation(confidence: Tensor, num_drafted: Tensor, budget: int) -> list[int]:
    return Confidences.of(confidence, num_drafted).ranked().lens(budget).tolist()


@pytest.mark.parametrize(("num_reqs", "num_drafts"), [(1, 1), (5, 7), (70, 2)])
@pytest.mark.parametrize("coarse", [False, True])
def test_the_allocation_is_the_planners(num_reqs: int, num_drafts: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(num_reqs)
    confidence = torch.rand(num_reqs, num_drafts, generator=generator)
    if coarse:  # ties within and between blocks
        confidence = (confidence * 3).ceil() / 3
    confidence[0, -1] = torch.nan
    num_drafted = torch.randint(0, num_drafts + 1, (num_reqs,), generator=generator)
    confidence, num_drafted = confidence.to(DEVICE), num_drafted.to(DEVICE)
    most = num_reqs * num_drafts
    budgets = {0, 1, most // 5, most // 2, most, most + 9} if num_reqs < 70 else {50}
    for budget in budgets:
        found = allocate(confidence, num_drafted, torch.tensor(budget, device=DEVICE))
        assert found.tolist() == plain_allocation(confidence, num_drafted, budget)


def test_equal_survivals_go_by_position_then_by_request() -> None:
    ones = torch.ones(3, 2, device=DEVICE)
    lens = [
        allocate(ones, ints(2, 2, 2), torch.tensor(m, device=DEVICE)).tolist() for m in range(7)
    ]
    assert lens == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]


@pytest.mark.parametrize("least", [0.0, 0.3, 0.7, 1.0])
def test_the_threshold_is_the_planners(least: float) -> None:
    generator = torch.Generator().manual_seed(3)
    confidence = (torch.rand(40, 3, generator=generator) * 10).ceil() / 10  # some at the threshold
    confidence[0, 1] = torch.nan
    num_drafted = torch.randint(0, 4, (40,), generator=generator)
    proposal = DraftProposal(num_drafted, num_drafted, None, confidence)
    shape = StepShape(40, 40, tuple(range(40)), (3,) * 40)
    planner = Threshold(least)
    plan = planner.device_plan(shape)
    numbers = (
        torch.tensor(plan.budget, device=DEVICE),
        torch.tensor(plan.threshold, device=DEVICE),
    )
    found = allocate(confidence.to(DEVICE), num_drafted.to(DEVICE), *numbers)
    assert found.tolist() == planner.admit(proposal, shape).num_admitted.tolist()
    # Both at once: whatever the budget leaves, as far as it survives.
    some = allocate(confidence.to(DEVICE), num_drafted.to(DEVICE), ints(30)[0], numbers[1])
    by_budget = torch.tensor(plain_allocation(confidence, num_drafted, 30))
    assert some.tolist() == torch.minimum(found.cpu(), by_budget).tolist()


@pytest.mark.parametrize("num_reqs", [1, 5, 70])
def test_drafts_end_before_the_first_that_was_drawn_from_nothing(num_reqs: int) -> None:
    """As the host's cut does it, from the logits."""
    num_drafts, vocab = 3, 8
    logits = torch.randn(num_reqs, num_drafts, vocab, generator=torch.Generator().manual_seed(1))
    for req in range(num_reqs):
        for k in range(num_drafts):
            match (req + 2 * k) % 5:
                case 1:
                    logits[req, k, k] = torch.nan
                case 2:
                    logits[req, k] = -torch.inf
                case 3:
                    logits[req, k, 4] = torch.inf
    logits[0] = logits[0].abs()  # whole
    num_drafted = torch.arange(num_reqs) % (num_drafts + 1)
    num_drafted[0] = num_drafts
    wanted = torch.isfinite(logits.amax(-1)).long().cumprod(-1).sum(-1).minimum(num_drafted)
    peaks = logits.amax(-1)
    normalisers = torch.stack([peaks, (logits - peaks[..., None]).exp().sum(-1)], dim=-1)
    found = sound_lens(normalisers.to(DEVICE), num_drafted.to(DEVICE))
    assert found.tolist() == wanted.tolist()


def assert_same_layout(found: DeviceLayout, wanted: TokenLayout, dead: int) -> None:
    """`dead` requests of the bucket, its last ones, do not live."""
    live_tokens, live_scored = wanted.num_tokens, wanted.num_scored
    start, scored = wanted.query_start_loc.tolist(), wanted.scored_start_loc.tolist()
    assert found.query_start_loc.tolist() == start + start[-1:] * dead
    assert found.scored_start_loc.tolist() == scored + scored[-1:] * dead
    assert found.req_of_token[:live_tokens].tolist() == wanted.req_of_token.tolist()
    assert found.offset_of_token[:live_tokens].tolist() == wanted.offset_of_token.tolist()
    assert found.row_of_token[:live_tokens].tolist() == wanted.row_of_token.tolist()
    assert found.token_of_scored[:live_scored].tolist() == wanted.token_of_scored.tolist()
    assert found.window_start[: wanted.num_reqs].tolist() == wanted.window_start.tolist()
    assert (found.req_of_token[live_tokens:] == -1).all()
    assert (found.offset_of_token[live_tokens:] == 0).all()
    assert (found.token_of_scored[live_scored:] == 0).all()


@pytest.mark.parametrize(
    ("query", "window", "scored"),
    [
        ([1, 1, 1], [1, 1, 1], [1, 1, 1]),
        ([4, 1, 3, 8], [4, 1, 3, 8], [4, 1, 3, 8]),
        ([300, 2, 129, 1], [0, 2, 1, 1], [0, 2, 130 - 1, 1]),
    ],
)
@pytest.mark.parametrize(("width", "spare"), [(1, 0), (1, 7), (4, 7)])
def test_the_layout_is_the_hosts(
    query: list[int], window: list[int], scored: list[int], width: int, spare: int
) -> None:
    wanted = TokenLayout.build(
        ints(*query),
        ints(*window),
        scored_lens=ints(*scored),
        num_tokens=sum(query),
        num_scored=sum(scored),
        kind="static" if width > 1 else "compact",
        width=width,
    ).check()
    dead = 2 if spare else 0
    found = lay_out(
        ints(*query, *[0] * dead),
        ints(*window, *[0] * dead),
        ints(*scored, *[0] * dead),
        num_tokens=sum(query) + spare,
        num_scored=sum(scored) + spare,
        num_rows=wanted.num_rows + spare,
        width=width,
    )
    assert_same_layout(found, wanted, dead)
    rows = found.row_of_token
    assert len(set(rows.tolist())) == len(rows)  # padding has rows of its own
    assert int(rows.max()) < wanted.num_rows + spare


def test_the_batch_is_known_tokens_and_admitted_drafts() -> None:
    # A prompt's chunk of 3, a verify window of 1 + 2, a plain decode, and one that does not live.
    query, known, positions = ints(3, 3, 1, 0), ints(3, 1, 1, 0), ints(5, 9, 0, 0)
    layout = lay_out(query, query, query, num_tokens=9, num_scored=9)
    page_table = torch.arange(1, 21, device=DEVICE).view(4, 5)
    batch = fill_batch(
        layout,
        known_ids=ints(50, 51, 52, 60, 70),
        known_start_loc=start_loc(known),
        start_positions=positions,
        draft_ids=ints(*range(100, 112)).view(4, 3),
        page_table=page_table,
        page_size=PAGE,
    )
    assert batch.token_ids.tolist() == [50, 51, 52, 60, 103, 104, 70, 0, 0]
    assert batch.positions.tolist() == [5, 6, 7, 9, 10, 11, 0, 0, 0]
    pages = [2, 2, 2, 8, 8, 8, 11]
    offsets = [1, 2, 3, 1, 2, 3, 0]
    slots = [page * PAGE + offset for page, offset in zip(pages, offsets, strict=True)]
    assert batch.slot_mapping[:7].tolist() == slots
    assert (batch.slot_mapping[7:] < PAGE).all()  # page 0: scratch
    assert batch.seq_lens.tolist() == [8, 12, 1, 0]
    assert batch.first_positions.tolist()[:3] == [6, 10, 1]


def test_a_decode_step_is_an_anchor_of_each_request_and_its_drafts() -> None:
    alive, drafts = ints(1, 1, 0, 1), ints(2, 0, 0, 3)
    layout = lay_out(alive, alive, alive, drafts, num_tokens=9, num_scored=9)
    summed = lay_out(*[alive + drafts] * 3, num_tokens=9, num_scored=9)
    assert layout.window_lens.tolist() == [3, 1, 0, 4]
    for field in fields(layout):
        assert torch.equal(getattr(layout, field.name), getattr(summed, field.name)), field.name
    batch = fill_batch(
        layout,
        known_ids=ints(60, 61, 62, 63),
        known_start_loc=None,
        start_positions=ints(5, 9, 0, 2),
        draft_ids=ints(*range(100, 112)).view(4, 3),
        page_table=torch.arange(1, 21, device=DEVICE).view(4, 5),
        page_size=PAGE,
    )
    assert batch.token_ids.tolist() == [60, 100, 101, 61, 63, 109, 110, 111, 0]
    assert batch.positions.tolist() == [5, 6, 7, 9, 2, 3, 4, 5, 0]
    firsts = batch.first_positions.tolist()
    assert [firsts[req] for req in (0, 1, 3)] == [6, 10, 3]


def test_a_bucket_that_is_too_small_cuts_the_last_tokens() -> None:
    query = ints(3, 4)
    layout = lay_out(query, query, query, num_tokens=5, num_scored=5)
    assert layout.req_of_token.tolist() == [0, 0, 0, 1, 1]
    assert layout.token_of_scored.tolist() == [0, 1, 2, 3, 4]
