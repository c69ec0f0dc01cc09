"""The shapes that steps on the device run in: what a step is rounded up to, and what stands in.

A captured step is bound to its shape, and a capture takes as long as dozens of steps. So there are
few shapes; the likeliest are captured before the first request, the others while nothing runs; and
a step whose shape is not captured runs in a larger one that is. Only where that has cost as much as
a capture is one made between two steps. Must not know requests, or what a step computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from emberline.engine.device_step import Bucket

LEAST_PAGES = 64
LEAST_TOKENS = 64
PARTS = 4
"""Numbers of verified tokens are parts of the deepest blocks' drafts: so many sizes."""
BASE_TOKENS = 512
"""Tokens that take a step about as long as its weights do, on any model: `_work` counts in them."""
LEAST_WASTE = 0.3
"""Of a step's work: a shape that wastes less stands in for as long as steps follow each other."""
CAPTURE_STEPS = 80.0
"""Steps that a capture takes as long as. Standing in may waste so much first."""
FEW_REQUESTS = 16
"""Under so many, blocks are drawn whole: half of them would take the device as long."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that a step's are rounded up to: few enough to capture, close enough to waste little.

    Each rises to the most that a step can have.
    """

    reqs: tuple[int, ...]
    pages: tuple[int, ...]  # of the longest request
    prompts: tuple[int, ...]  # requests of a chunk step
    chunks: tuple[int, ...]  # known tokens of a request in one step
    tokens: tuple[int, ...]  # known tokens of a chunk step
    drafts: tuple[int, ...]  # of a block; empty: there is no drafter

    @classmethod
    def up_to(cls, reqs: int, pages: int, chunk: int, tokens: int, drafts: int) -> Sizes:
        """Sizes up to the largest of each."""
        halves = [n for power in range(7, 12) for n in (3 * 2 ** (power - 2), 2**power)]
        return cls(
            reqs=_capped([*(2**power for power in range(7)), *halves], reqs),
            pages=_capped([LEAST_PAGES * 4**i for i in range(8)], pages),
            # Whoever is missing from a chunk step takes it next to nothing: it has few logits.
            prompts=_capped([4**i for i in range(8)], reqs),
            chunks=_capped([LEAST_TOKENS * 8**i for i in range(5)], chunk),
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

    def decode(self, num_reqs: int, num_pages: int, depth: int) -> Bucket:
        """Of steps of so many requests that verify all that they draw."""
        return Bucket(num_reqs, self.verify(num_reqs, depth)[-1], num_pages, depth)

    def most_known(self, num_reqs: int) -> int:
        """Tokens of the largest chunk step of so many requests."""
        return fit(min(num_reqs * self.chunks[-1], self.tokens[-1]), self.tokens)

    def whole(self, bucket: Bucket) -> Bucket:
        """The shape that holds all steps of as many requests, whatever they draw and verify."""
        if bucket.chunk:
            most = self.most_known(bucket.num_reqs)
            return replace(bucket, num_tokens=most, chunk=self.chunks[-1])
        if not self.drafts:
            return bucket
        whole = self.decode(bucket.num_reqs, bucket.num_pages, self.drafts[-1])
        return replace(whole, coins=bucket.coins, num_top=bucket.num_top)


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


def first_buckets(sizes: Sizes) -> Iterator[Bucket]:
    """Shapes without which somebody would wait: those of one request, and what holds any number."""
    most, pages = sizes.drafts[-1] if sizes.drafts else 0, sizes.pages[0]
    one, many = (sizes.decode(num_reqs, pages, most) for num_reqs in (1, sizes.reqs[-1]))
    prompt = next(chunk_buckets(sizes, 1, pages))
    yield from (prompt, one, sizes.whole(prompt), many)
    yield sizes.whole(replace(prompt, num_reqs=sizes.prompts[-1]))
    yield from (replace(one, coins=True), replace(many, coins=True))


def likely_buckets(sizes: Sizes) -> Iterator[Bucket]:
    """All shapes that are worth having before they are asked for, the likeliest first."""
    most = sizes.drafts[-1] if sizes.drafts else 0
    yield from first_buckets(sizes)
    for pages in sizes.pages[:2]:
        whole = [sizes.decode(num_reqs, pages, most) for num_reqs in sizes.reqs]
        yield from whole
        for num_prompts in sizes.prompts:
            yield from chunk_buckets(sizes, num_prompts, pages)
        if most:
            yield from (sizes.decode(num_reqs, pages, 0) for num_reqs in sizes.reqs)
        yield from (replace(bucket, coins=True) for bucket in whole)
        for depth in reversed(sizes.drafts):
            for num_reqs in sizes.reqs:
                if depth == most or num_reqs >= FEW_REQUESTS:
                    for num_tokens in reversed(sizes.verify(num_reqs, depth)):
                        yield Bucket(num_reqs, num_tokens, pages, depth)


def chunk_buckets(sizes: Sizes, num_reqs: int, pages: int) -> Iterator[Bucket]:
    """Shapes of chunk steps of so many requests, by tokens. For any options: coins take nothing."""
    for num_tokens in sizes.tokens:
        if num_reqs <= num_tokens <= sizes.most_known(num_reqs):
            chunk = fit(-(-num_tokens // num_reqs), sizes.chunks)
            yield Bucket(num_reqs, num_tokens, pages, chunk=chunk, coins=True)


class BucketChoice:
    """Which captured shape a step runs in, and which shapes were missed."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._wasted = defaultdict[Bucket, float](float)  # steps that standing in has taken
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
        if stand_in is None:
            self._wasted[wanted] += 0
            return self._sizes.whole(wanted)
        waste = _work(stand_in) / _work(wanted) - 1
        self._wasted[wanted] += waste
        too_much = waste >= LEAST_WASTE and self._wasted[wanted] >= CAPTURE_STEPS
        return wanted if too_much else stand_in

    def missed(self, captured: Collection[Bucket]) -> Iterator[Bucket]:
        """Shapes that steps wanted and that are not captured yet, the one that wasted most first.

        Behind them whole blocks of as many requests as any, with the same options.
        """
        for bucket in sorted(self._wasted, key=lambda b: -self._wasted[b]):
            if bucket not in captured:
                yield bucket
        kinds = {(b.num_pages, b.coins, b.num_top) for b in self._wasted if not b.chunk}
        most = self._sizes.drafts[-1] if self._sizes.drafts else 0
        for pages, coins, num_top in sorted(kinds, key=str):
            for num_reqs in self._sizes.reqs:
                whole = self._sizes.decode(num_reqs, pages, most)
                yield replace(whole, coins=coins, num_top=num_top)


def stands_in(bucket: Bucket, wanted: Bucket) -> bool:
    """Whether a step for `wanted` may run in another bucket: with room for all."""
    return (
        wanted.num_reqs <= bucket.num_reqs
        and wanted.num_tokens <= bucket.num_tokens
        and wanted.num_pages <= bucket.num_pages
        and wanted.num_drafts <= bucket.num_drafts
        and wanted.chunk <= bucket.chunk
        and bool(wanted.chunk) == bool(bucket.chunk)
        and wanted.coins <= bucket.coins
        and _tops(wanted) <= _tops(bucket)
    )


def _tops(bucket: Bucket) -> int:
    return -1 if bucket.num_top is None else bucket.num_top


def _work(bucket: Bucket) -> float:
    """About how long a step of that shape takes, in tokens."""
    work = BASE_TOKENS + bucket.num_tokens + bucket.num_reqs * bucket.num_drafts / 4
    if bucket.num_drafts:  # to draw blocks takes a part of any step, and to keep q some of it
        work *= 1.4 if bucket.coins else 1.3
    return work


def _cost(bucket: Bucket) -> tuple[float, ...]:
    """What makes a step longer, the most telling first."""
    return (
        _work(bucket), bucket.coins, _tops(bucket), bucket.num_reqs, bucket.num_pages, bucket.chunk,
    )  # fmt: skip
