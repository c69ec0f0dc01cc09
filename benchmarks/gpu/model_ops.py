"""The ops of a decoder layer as benchmark cases. Must not know how they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from emberline.ops import gated as plain_gated
from emberline.ops import look_up as plain_look_up
from emberline.ops import norm as plain_norm
from emberline.ops import paged_attention as plain_attention
from emberline.ops import place_qkv as plain_place
from emberline.ops.paged_attention import PagedContext
from emberline.ops.triton import gated, look_up, norm, paged_attention, place_qkv

from gpu.timing import Case, copies_of

PAGE = 16
PLAIN_NUMBERS = 2**28  # of gathered keys: the plain attention of more takes too much memory


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry of a model's layer."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    qk_norm: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure at."""

    shapes: tuple[Shape, ...]
    rows: tuple[int, ...]  # of the ops that take rows one by one
    attention: tuple[tuple[int, int, int], ...]  # requests, queries each, tokens in KV each
    blocks: tuple[tuple[int, int, int], ...]  # requests, slots of a block, tokens of context


SIZES = Sizes(
    (
        Shape("135M", 576, 1536, 9, 3, 64, False),
        Shape("8B", 4096, 12288, 32, 8, 128, True),
    ),
    rows=(8, 32, 256, 2048),
    attention=(
        (1, 1, 512), (1, 8, 512), (1, 8, 4096), (8, 8, 1024), (32, 1, 1024), (32, 8, 1024),
        (128, 1, 1024), (256, 8, 512), (1, 512, 512), (1, 2048, 4096),
    ),
    blocks=((1, 7, 512), (1, 7, 4096), (32, 7, 1024), (256, 7, 512)),
)  # fmt: skip


def cases(
    dtype: torch.dtype, wanted: str, sizes: Sizes = SIZES, device: str = "cuda"
) -> Iterator[Case]:
    """Every case whose op has `wanted` in its name."""
    makers: dict[str, Callable[..., Iterator[Case]]] = {
        "look_up": _look_up_cases,
        "add_rms_norm": _norm_cases,
        "gated": _gate_cases,
        "place_qkv": _place_cases,
        "paged_attention": _attention_cases,
        "paged_attention_fixed": partial(_attention_cases, fixed_order=True),
        "block_attention": _block_cases,
    }
    for op, make in makers.items():
        if wanted in op:
            for shape in sizes.shapes:
                yield from make(op, shape, sizes, partial(_random, dtype, device))


def _random(dtype: torch.dtype, device: str, *size: int) -> Tensor:
    return torch.randn(*size, dtype=dtype, device=device)


def _look_up_cases(
    op: str, shape: Shape, sizes: Sizes, new: Callable[..., Tensor]
) -> Iterator[Case]:
    for rows in sizes.rows:
        table = new(copies_of(0) * rows, shape.hidden)
        index = torch.randperm(len(table), device=table.device).view(-1, rows)

        def run(
            op: Callable[..., object], i: int, table: Tensor = table, index: Tensor = index
        ) -> object:
            return op(table, index[i])

        yield Case(
            op, f"{shape.name}, {rows} rows", partial(run, look_up.look_up),
            partial(run, plain_look_up.look_up), len(index),
            2 * rows * shape.hidden * table.element_size(),
        )  # fmt: skip


def _norm_cases(op: str, shape: Shape, sizes: Sizes, new: Callable[..., Tensor]) -> Iterator[Case]:
    for rows in sizes.rows:
        weight = new(shape.hidden)
        num_bytes = 4 * rows * shape.hidden * weight.element_size()
        copies = copies_of(num_bytes)
        x = new(copies, 2, rows, shape.hidden)

        def run(
            op: Callable[..., object], i: int, x: Tensor = x, weight: Tensor = weight
        ) -> object:
            return op(x[i, 0], x[i, 1], weight, 1e-5)

        yield Case(
            op, f"{shape.name}, {rows} rows", partial(run, norm.add_rms_norm),
            partial(run, plain_norm.add_rms_norm), copies, num_bytes,
        )  # fmt: skip


def _gate_cases(op: str, shape: Shape, sizes: Sizes, new: Callable[..., Tensor]) -> Iterator[Case]:
    for rows in sizes.rows:
        num_bytes = 3 * rows * shape.intermediate * new(1).element_size()
        copies = copies_of(num_bytes)
        x = new(copies, rows, 2 * shape.intermediate)

        def run(op: Callable[..., object], i: int, x: Tensor = x) -> object:
            return op(x[i])

        yield Case(
            op, f"{shape.name}, {rows} rows", partial(run, gated.gated),
            partial(run, plain_gated.gated), copies, num_bytes,
        )  # fmt: skip


def _place_cases(op: str, shape: Shape, sizes: Sizes, new: Callable[..., Tensor]) -> Iterator[Case]:
    for rows in sizes.rows:
        heads = shape.heads + 2 * shape.kv_heads
        num_bytes = 2 * rows * heads * shape.dim * new(1).element_size()
        copies = copies_of(num_bytes)
        qkv = new(copies, rows, heads * shape.dim)
        pools = new(copies, 2, rows, shape.kv_heads, shape.dim)
        angles = new(2, rows, shape.dim)
        slots = torch.randperm(rows, device=qkv.device)
        weights = new(shape.heads + shape.kv_heads, shape.dim) if shape.qk_norm else None

        def run(
            op: Callable[..., object],
            i: int,
            qkv: Tensor = qkv,
            pools: Tensor = pools,
            angles: Tensor = angles,
            slots: Tensor = slots,
            weights: Tensor | None = weights,
        ) -> object:
            return op(qkv[i], *angles, *pools[i], slots, norm=weights, eps=1e-6)

        yield Case(
            op, f"{shape.name}, {rows} rows", partial(run, place_qkv.place_qkv),
            partial(run, plain_place.place_qkv), copies, num_bytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Paged:
    """Inputs of an attention over the pages, a pool a copy."""

    q: Tensor  # [N, heads, dim]
    pools: Tensor  # [copies, 2, num_slots, kv_heads, dim]
    context: PagedContext
    num_bytes: float
    flops: float

    @classmethod
    def make(
        cls, shape: Shape, reqs: int, queries: int, length: int, new: Callable[..., Tensor],
        fixed_order: bool = False,
    ) -> _Paged:  # fmt: skip
        rows, num_pages = reqs * queries, -(-length // PAGE)
        q = new(rows, shape.heads, shape.dim)
        kv_numbers = 2 * reqs * length * shape.kv_heads * shape.dim
        num_bytes = (kv_numbers + 2 * q.numel()) * q.element_size()
        size = (2, (reqs * num_pages + 1) * PAGE, shape.kv_heads, shape.dim)
        table = 1 + torch.randperm(reqs * num_pages, device=q.device).view(reqs, num_pages)
        lens = torch.full((reqs,), length, device=q.device)
        return cls(
            q,
            new(copies_of(num_bytes), *size),
            PagedContext(lens, table, PAGE, fixed_order),
            num_bytes,
            4.0 * q.numel() * length,
        )

    @property
    def small(self) -> bool:
        """Whether the plain form, which gathers keys a row, has memory for it."""
        numbers = self.q.shape[0] * self.context.page_table.shape[1] * PAGE
        return numbers * self.pools.shape[3] * self.pools.shape[4] <= PLAIN_NUMBERS


def _attention_cases(
    op: str,
    shape: Shape,
    sizes: Sizes,
    new: Callable[..., Tensor],
    fixed_order: bool = False,
) -> Iterator[Case]:
    for reqs, queries, length in sizes.attention:
        paged = _Paged.make(shape, reqs, queries, length, new, fixed_order)
        starts = torch.arange(reqs + 1, device=paged.q.device) * queries

        def run(
            op: Callable[..., object],
            i: int,
            paged: _Paged = paged,
            starts: Tensor = starts,
            queries: int = queries,
        ) -> object:
            scale = paged.q.shape[2] ** -0.5
            return op(paged.q, *paged.pools[i], paged.context, starts, queries, scale=scale)

        # Of the keys of a long prompt a query sees half.
        seen = 1 - (queries - 1) / (2 * length)
        yield Case(
            op, f"{shape.name}, {reqs} x {queries} of {length}",
            partial(run, paged_attention.paged_attention),
            partial(run, plain_attention.paged_attention) if paged.small else None,
            len(paged.pools), paged.num_bytes, seen * paged.flops,
        )  # fmt: skip


def _block_cases(op: str, shape: Shape, sizes: Sizes, new: Callable[..., Tensor]) -> Iterator[Case]:
    for reqs, width, length in sizes.blocks:
        paged = _Paged.make(shape, reqs, width, length, new)
        fresh = new(2, reqs * width, shape.kv_heads, shape.dim)

        def run(
            op: Callable[..., object], i: int, paged: _Paged = paged, fresh: Tensor = fresh
        ) -> object:
            scale = paged.q.shape[2] ** -0.5
            return op(paged.q, *fresh, *paged.pools[i], paged.context, scale=scale)

        yield Case(
            op, f"{shape.name}, {reqs} x {width} after {length}",
            partial(run, paged_attention.block_attention),
            partial(run, plain_attention.block_attention) if paged.small else None,
            len(paged.pools), paged.num_bytes + fresh.numel() * fresh.element_size(), paged.flops,
        )  # fmt: skip
