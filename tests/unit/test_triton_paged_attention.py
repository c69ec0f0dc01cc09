"""Attention over pages: the plain form against dense attention, the kernels against it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from emberline.ops import paged_attention as plain
from emberline.ops.attention import attend, plan_attention
from emberline.ops.paged_attention import PagedContext
from emberline.ops.triton import paged_attention as fast

from support.triton_kernels import DEVICE, exact_products

__all__ = ["exact_products"]
pytestmark = pytest.mark.usefixtures("exact_products")
PAGE = 16
# A sum of products of rounded numbers, in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_context(lens: list[int], num_pages: int, fixed_order: bool = False) -> PagedContext:
    """Pages in no order; those past a request's tokens are the scratch page."""
    ids = (torch.randperm(sum(-(-n // PAGE) for n in lens)) + 1).tolist()
    table = torch.zeros(len(lens), num_pages, dtype=torch.int64)
    for row, length in zip(table, lens, strict=True):
        for index in range(-(-length // PAGE)):
            row[index] = ids.pop()
    return PagedContext(torch.tensor(lens).to(DEVICE), table.to(DEVICE), PAGE, fixed_order)


def make_pool(context: PagedContext, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Slots that hold no token of a request are NaN: they may not be read."""
    pool = torch.full((int(context.page_table.max()) * PAGE + PAGE, kv_heads, dim), float("nan"))
    for length, slots in zip(context.lens.tolist(), context.slots().cpu(), strict=True):
        pool[slots[:length]] = torch.randn(length, kv_heads, dim)
    return pool.to(DEVICE, dtype)


def start_loc(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(DEVICE)


def rows(count: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads of wider rows, as they lie after a packed projection."""
    return torch.randn(count, heads + 2, dim).to(DEVICE, dtype)[:, :heads]


HALF, BRAIN, WIDE = torch.float16, torch.bfloat16, torch.float32
CASES = [
    # queries, lengths, table width, kv heads, group, head dim, dtype
    ([1, 1, 0, 1], [1, 17, 40, 16], 4, 2, 3, 64, WIDE),
    ([1, 1, 0, 1], [1, 17, 40, 16], 4, 2, 3, 64, BRAIN),
    ([8, 0, 5], [300, 20, 5], 20, 1, 3, 64, WIDE),
    ([8, 0, 5], [300, 20, 5], 20, 1, 3, 64, HALF),
    ([4], [700], 48, 1, 4, 128, WIDE),
    ([1, 3], [1, 70], 8, 1, 8, 128, BRAIN),
    ([40, 2], [55, 130], 10, 1, 1, 64, WIDE),
    ([2, 1], [33, 150], 12, 1, 7, 256, HALF),
    ([3, 9], [9, 50], 5, 2, 2, 80, WIDE),
]


@dataclass(frozen=True)
class World:
    """Inputs of one launch."""

    context: PagedContext
    keys: torch.Tensor
    values: torch.Tensor
    q: torch.Tensor  # two rows more than there are queries
    counts: list[int]

    def attend(self, op: Any, **options: Any) -> torch.Tensor:
        """Rows of queries alone: others hold anything."""
        starts, most = start_loc(self.counts), max(self.counts)
        options = {"scale": self.q.shape[2] ** -0.5, **options}
        out = op(self.q, self.keys, self.values, self.context, starts, most, **options)
        return out[: sum(self.counts)]


def make_world(counts, lens, pages, kv_heads, group, dim, dtype=WIDE, fixed_order=False) -> World:
    torch.manual_seed(0)
    context = make_context(lens, pages, fixed_order)
    keys, values = (make_pool(context, kv_heads, dim, dtype) for _ in range(2))
    q = rows(sum(counts) + 2, kv_heads * group, dim, dtype)
    return World(context, keys, values, q, counts)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize(("counts", "lens", "pages", "kv_heads", "group", "dim", "dtype"), CASES)
def test_kernels_are_the_plain_form(
    counts, lens, pages, kv_heads, group, dim, dtype, fixed_order
) -> None:
    world = make_world(counts, lens, pages, kv_heads, group, dim, dtype, fixed_order)
    got, want = (world.attend(op.paged_attention) for op in (fast, plain))
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("processors", [1, 132])  # a full GPU has larger tiles
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"soft_cap": 0.5}])
def test_prompts_in_large_tiles(processors, dim, options, monkeypatch) -> None:
    """Of rows that see whole tiles of keys, parts of some, and none of others."""
    monkeypatch.setattr(fast, "processors", lambda device: processors)
    world = make_world([150, 0, 3], [400, 20, 3], 26, 1, 2, dim, BRAIN)
    got, want = (world.attend(op.paged_attention, **options) for op in (fast, plain))
    torch.testing.assert_close(got, want, rtol=TOLERANCE[BRAIN], atol=TOLERANCE[BRAIN])


@pytest.mark.parametrize("fixed_order", [False, True])
def test_the_last_program_leaves_its_counter_as_it_was(fixed_order) -> None:
    world = make_world([8, 1, 2], [1100, 20, 600], 70, 2, 2, 64, BRAIN, fixed_order)
    first = world.attend(fast.paged_attention)
    assert "arrivals" in vars(world.context)  # programs did meet
    assert not world.context.arrivals.any()
    assert torch.equal(world.attend(fast.paged_attention), first)


OPTIONS = [{"sliding_window": 9}, {"sliding_window": 100}, {"soft_cap": 0.5}, {"sinks": True}]
TOGETHER = {"sliding_window": 100, "soft_cap": 0.5, "sinks": True}


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, TOGETHER])
def test_options_are_those_of_the_plain_form(options, fixed_order) -> None:
    # Under a narrow table one program takes all keys; else several do.
    pages, lens = (8, [120, 20, 5]) if len(options) > 1 else (40, [600, 20, 5])
    world = make_world([2, 0, 3], lens, pages, 1, 2, 64, WIDE, fixed_order)
    if "sinks" in options:
        options = {**options, "sinks": torch.randn(2, device=DEVICE)}
    got, want = (world.attend(op.paged_attention, **options) for op in (fast, plain))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("pages", [8, 40])
def test_what_lies_behind_every_window_may_be_anything(pages, fixed_order) -> None:
    """Its pages are given up: the table says scratch there, where padding leaves its NaN."""
    world = make_world([2, 0, 3], [120, 20, 110], pages, 1, 2, 64, WIDE, fixed_order)
    want = world.attend(plain.paged_attention, sliding_window=30)
    world.keys[:PAGE] = world.values[:PAGE] = float("nan")
    slots = world.context.slots()
    for req, first in ((0, 120 - 2 + 1 - 30), (2, 110 - 3 + 1 - 30)):
        world.keys[slots[req, :first]] = world.values[slots[req, :first]] = float("nan")
        world.context.page_table[req, : first // PAGE] = 0
    got = world.attend(fast.paged_attention, sliding_window=30)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_the_plain_form_is_the_attention_of_the_cpu(options) -> None:
    world = make_world([3, 0, 5, 1], [300, 20, 5, 131], 20, 2, 3, 16)
    window = options.get("sliding_window")
    lens, table = world.context.lens.tolist(), world.context.page_table
    groups = plan_attention(
        world.counts, lens, table, PAGE, share=3, sliding_window=window, dtype=WIDE
    )
    if "sinks" in options:
        options = {"sinks": torch.randn(6, device=DEVICE)}
    rest = {name: value for name, value in options.items() if name != "sliding_window"}
    keys, values = world.keys.nan_to_num(), world.values.nan_to_num()
    want = attend(world.q[:9], keys, values, groups, world.q.shape[2] ** -0.5, **rest)
    got = world.attend(plain.paged_attention, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize(
    ("lens", "pages", "width", "kv_heads", "group", "dim", "dtype"),
    [
        ([0, 1, 150], 12, 7, 1, 3, 64, WIDE),
        ([300], 20, 8, 2, 2, 64, BRAIN),
        ([20, 31], 2, 16, 1, 4, 128, HALF),
        ([500, 3], 40, 1, 1, 2, 80, WIDE),
    ],
)
def test_blocks_see_their_context_and_themselves(
    lens, pages, width, kv_heads, group, dim, dtype, fixed_order
) -> None:
    world = make_world([width] * len(lens), lens, pages, kv_heads, group, dim, dtype, fixed_order)
    q = world.q[:-2]
    fresh = [rows(len(q), kv_heads, dim, dtype) for _ in range(2)]
    got, want = (
        op.block_attention(q, *fresh, world.keys, world.values, world.context, scale=0.2)
        for op in (fast, plain)
    )
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_values_may_be_narrower_than_keys() -> None:
    world = make_world([2, 3], [200, 9], 16, 2, 2, 64)
    world = replace(world, values=world.values[:, :, :32].contiguous())
    got, want = (world.attend(op.paged_attention) for op in (fast, plain))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("options", "dtype"), [({}, BRAIN), ({"sliding_window": 40}, WIDE)])
def test_in_fixed_order_a_row_is_the_same_whatever_runs_beside_it(
    options, dtype, monkeypatch
) -> None:
    """Alone, in a block, beside others, under a wider table, by one program or by several."""
    counts, lens = [4, 2], [600, 300]
    world = make_world(counts, lens, 40, 1, 3, 64, dtype, fixed_order=True)
    want = world.attend(fast.paged_attention, **options)
    context = world.context
    for row in (0, 3):  # of the first request
        alone = PagedContext(
            context.lens[:1] - 3 + row, context.page_table[:1], PAGE, fixed_order=True
        )
        single = replace(world, context=alone, q=world.q[row : row + 1], counts=[1])
        assert torch.equal(single.attend(fast.paged_attention, **options)[0], want[row])
    wider = replace(context, page_table=torch.nn.functional.pad(context.page_table, (0, 60)))
    assert torch.equal(replace(world, context=wider).attend(fast.paged_attention, **options), want)
    monkeypatch.setattr(fast, "MOST_PARTIAL_BYTES", 0)  # one program takes all chunks
    assert torch.equal(world.attend(fast.paged_attention, **options), want)


def test_in_fixed_order_a_block_is_the_same_whatever_runs_beside_it(monkeypatch) -> None:
    world = make_world([7, 7], [600, 20], 40, 1, 3, 64, BRAIN, fixed_order=True)
    q, fresh = world.q[:-2], [rows(14, 1, 64, BRAIN) for _ in range(2)]

    def run(count: int, context: PagedContext) -> torch.Tensor:
        parts = (part[: 7 * count] for part in (q, *fresh))
        return fast.block_attention(*parts, world.keys, world.values, context, scale=0.2)

    want = run(2, world.context)
    first = PagedContext(world.context.lens[:1], world.context.page_table[:1], PAGE, True)
    assert torch.equal(run(1, first), want[:7])
    monkeypatch.setattr(fast, "MOST_PARTIAL_BYTES", 0)
    assert torch.equal(run(2, world.context), want)


def test_nothing_to_attend() -> None:
    world = make_world([1], [1], 1, 1, 1, 64)
    empty = fast.paged_attention(
        world.q[:0], world.keys, world.values, world.context, start_loc([0]), 0, scale=1.0
    )
    assert empty.shape == (0, 64)
