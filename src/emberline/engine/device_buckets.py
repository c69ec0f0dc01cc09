"""The shapes that steps on the device run in: what a step is rounded up to, and what stands in.

A captured step is bound to its shape, and a capture takes as long as many steps. So there are few
shapes; the likeliest are captured before the first request; and a step whose shape is not captured
runs in a somewhat larger one that is, until it has come often enough to be worth its own. Must not
know requests, or what a step computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from emberline.engine.device_step import Bucket

LEAST_PAGES = 16
LEAST_TOKENS = 64
PARTS = 8
"""Numbers of verified tokens are parts of the deepest blocks' drafts: so many sizes."""
PATIENCE = 32
"""Steps that a shape goes without its own capture while another can stand in."""
MOST_WASTE = 2
"""Times as many requests, or prompt tokens, as a step has that one standing in may have."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that a step's are rounded up to: few enough to capture, close enough to waste little.

    Each rises to the most that a step can have.
    """

    reqs: tuple[int, ...]
    pages: tuple[int, ...]  # of the longest request
    chunks: tuple[int, ...]  # known tokens of a request in one step
    tokens: tuple[int, ...]  # known tokens of a chunk step
    drafts: tuple[int, ...]  # of a block; empty: there is no drafter

    @classmethod
    def up_to(cls, reqs: int, pages: int, chunk: int, tokens: int, drafts: int) -> Sizes:
        """Sizes up to the largest of each."""
        halves = [n for power in range(4, 12) for n in (2**power, 3 * 2 ** (power - 1))]
        return cls(
            reqs=_capped([1, 2, 4, 8, *halves], reqs),
            pages=_capped([LEAST_PAGES * 4**i for i in range(8)], pages),
            chunks=_capped([LEAST_TOKENS * 4**i for i in range(8)], chunk),
            tokens=_capped([LEAST_TOKENS * 2**i for i in range(12)], tokens),
            drafts=_capped([-(-drafts // 2)], drafts) if drafts else (),
        )

    def verify(self, num_reqs: int, depth: int) -> tuple[int, ...]:
        """Anchors and drafts of decode steps of so many requests, blocks being so deep.

        Parts of what the deepest blocks of as many requests as a step is rounded up to would take.
        """
        num_reqs = fit(num_reqs, self.reqs)
        if not depth:
            return (num_reqs,)
        whole = num_reqs * self.drafts[-1]
        parts = {num_reqs - (-whole * part // PARTS) for part in range(1, PARTS)}
        return _capped(sorted(parts), num_reqs * (1 + fit(depth, self.drafts)))


def _capped(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sorted(sizes) if size < most), most)


def fit(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count`.

    Raises:
        ValueError: none does.
    """
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} does not fit the largest size, {sizes[-1]}")


def likely_buckets(sizes: Sizes) -> Iterator[Bucket]:
    """Shapes in the order in which they are worth having: whole blocks stand in for parts."""
    most = sizes.drafts[-1] if sizes.drafts else 0
    for pages in sizes.pages[:2]:
        for chunk in sizes.chunks[:2]:
            yield Bucket(1, fit(chunk, sizes.tokens), pages, chunk=chunk)
        for depth in dict.fromkeys((most, 0)):
            for num_reqs in sizes.reqs:
                yield Bucket(num_reqs, sizes.verify(num_reqs, depth)[-1], pages, depth)
        for num_reqs in sizes.reqs if most else ():
            for num_tokens in reversed(sizes.verify(num_reqs, most)[:-1]):
                yield Bucket(num_reqs, num_tokens, pages, most)
        for num_reqs in sizes.reqs if most else ():
            num_tokens = sizes.verify(num_reqs, most)[-1]
            yield Bucket(num_reqs, num_tokens, pages, most, coins=True)


class BucketChoice:
    """Which captured shape a step runs in."""

    def __init__(self) -> None:
        self._num_missed = Counter[Bucket]()
        self._stand_ins: dict[Bucket, Bucket | None] = {}  # among so many captured ones:
        self._num_captured = 0

    def choose(self, wanted: Bucket, captured: Collection[Bucket]) -> Bucket:
        """The shape for a step that would fit `wanted`; it may have to be captured."""
        if wanted in captured:
            return wanted
        if len(captured) != self._num_captured:
            self._num_captured = len(captured)
            self._stand_ins.clear()
        if wanted not in self._stand_ins:
            able = [bucket for bucket in captured if stands_in(bucket, wanted)]
            self._stand_ins[wanted] = min(able, key=_cost, default=None)
        stand_in = self._stand_ins[wanted]
        self._num_missed[wanted] += 1
        if stand_in is None or self._num_missed[wanted] > PATIENCE:
            return wanted
        return stand_in


def stands_in(bucket: Bucket, wanted: Bucket) -> bool:
    """Whether a step for `wanted` may run in another bucket: with room for all, wasting little."""
    return (
        wanted.num_reqs <= bucket.num_reqs <= MOST_WASTE * wanted.num_reqs
        and wanted.num_tokens <= bucket.num_tokens
        and (not wanted.chunk or bucket.num_tokens <= MOST_WASTE * wanted.num_tokens)
        and wanted.num_pages <= bucket.num_pages
        and wanted.num_drafts <= bucket.num_drafts
        and bool(wanted.num_drafts) == bool(bucket.num_drafts)
        and wanted.chunk <= bucket.chunk
        and bool(wanted.chunk) == bool(bucket.chunk)
        and wanted.coins <= bucket.coins
        and _tops(wanted) <= _tops(bucket)
    )


def _tops(bucket: Bucket) -> int:
    return -1 if bucket.num_top is None else bucket.num_top


def _cost(bucket: Bucket) -> tuple[int, ...]:
    """What makes a step longer, the most telling first."""
    return (
        bucket.num_tokens, bucket.num_drafts, bucket.coins, _tops(bucket), bucket.num_reqs,
        bucket.num_pages, bucket.chunk,
    )  # fmt: skip
