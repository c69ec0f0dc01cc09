"""Drawing, accepting, scoring and planning as benchmark cases. Must not know how they are timed.

Most have no plain form to stand beside: the plain ops ask the device for values as they go, which
no graph can. Logits are float32, as a target's head gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from emberline.batch import DrawKeys, Purpose, Verdict
from emberline.drafters.markov import ConfidenceHead
from emberline.engine.device_result import ResultPlaces
from emberline.layout import Scored, TokenLayout
from emberline.ops.triton.draws import draw
from emberline.ops.triton.gather_result import gather_result
from emberline.ops.triton.plan import allocate, fill_batch, lay_out, sound_lens
from emberline.ops.triton.scores import score_tokens
from emberline.ops.triton.verdict import accept
from emberline.ops.triton.walk import markov_walk

from gpu.timing import Case, copies_of

PAGE, PAGES = 16, 64  # tokens a page, pages a request
TOP = 5  # alternatives of a scored token
NUMBER, INDEX = 4, 8  # bytes of a float32 and of an int64


@dataclass(frozen=True, slots=True)
class Shape:
    """A vocabulary and the sequential head of a draft."""

    name: str
    vocab: int
    hidden: int
    rank: int
    drafts: int  # of a block


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure at."""

    shapes: tuple[Shape, ...]
    reqs: tuple[int, ...]


SIZES = Sizes((Shape("135M", 49152, 576, 32, 7), Shape("8B", 151936, 4096, 256, 7)), (1, 32, 256))


@dataclass(frozen=True, slots=True)
class _Step:
    """What the requests of a step are, whole windows of 1 + K entries."""

    shape: Shape
    size: str
    reqs: int
    index: Tensor  # [B] int64, 0 .. B - 1
    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B], 1
    greedy: Tensor  # [B], 0
    window_start: Tensor  # [B] int64
    window_lens: Tensor  # [B] int64

    @classmethod
    def make(cls, shape: Shape, reqs: int, device: str) -> _Step:
        index = torch.arange(reqs, device=device)
        width = shape.drafts + 1
        return cls(
            shape, f"{shape.name}, {reqs} requests", reqs, index, index * 12345 + 1,
            torch.ones(reqs, device=device), torch.zeros(reqs, device=device),
            index * width, torch.full_like(index, width),
        )  # fmt: skip

    def keys(self, purpose: Purpose) -> DrawKeys:
        return DrawKeys(self.seeds, self.index + 9, torch.full_like(self.index, int(purpose)))

    def rows(self, num_rows: int) -> Tensor:
        """[copies, num_rows, V] float32, no two alike."""
        num_bytes = NUMBER * num_rows * self.shape.vocab
        size = (copies_of(num_bytes), num_rows, self.shape.vocab)
        return torch.randn(size, device=self.index.device)


def cases(
    dtype: torch.dtype, wanted: str, sizes: Sizes = SIZES, device: str = "cuda"
) -> Iterator[Case]:
    """Every case whose op has `wanted` in its name. `dtype` is the draft head's."""
    makers: dict[str, Callable[[str, _Step], Case]] = {
        "draw_greedy": partial(_draw, purpose=Purpose.TARGET, sampled=False),
        "draw_by_noise": partial(_draw, purpose=Purpose.TARGET),
        "draw_by_mass": partial(_draw, purpose=Purpose.BONUS),
        "accept_greedy": partial(_accept, sampled=False, coupled=True),
        "accept_coupled": partial(_accept, sampled=True, coupled=True),
        "accept_rejection": partial(_accept, sampled=True, coupled=False),
        "score_tokens": partial(_score, asking=True),
        "score_tokens_unasked": partial(_score, asking=False),
        "score_tokens_one_each": partial(_score, asking=True, width=1),
        "gather_result": _gather_result,
        "markov_walk_greedy": partial(_walk, dtype=dtype, sampled=False, need_logits=False),
        "markov_walk_coupled": partial(_walk, dtype=dtype, sampled=True, need_logits=False),
        "markov_walk_with_q": partial(_walk, dtype=dtype, sampled=True, need_logits=True),
        "sound_lens": _sound_lens,
        "allocate": _allocate,
        "lay_out": _lay_out,
        "fill_batch": _fill_batch,
    }
    for op, make in makers.items():
        if wanted in op:
            for shape in sizes.shapes:
                for reqs in sizes.reqs:
                    yield make(op, _Step.make(shape, reqs, device))


def _draw(op: str, step: _Step, purpose: Purpose, sampled: bool = True) -> Case:
    rows, keys = step.rows(step.reqs), step.keys(purpose)
    temperatures = step.temperatures if sampled else step.greedy

    def run(i: int) -> object:
        return draw(rows[i], temperatures, keys)

    return Case(op, step.size, run, None, len(rows), NUMBER * rows[0].numel())


def _accept(op: str, step: _Step, sampled: bool, coupled: bool) -> Case:
    shape, reqs = step.shape, step.reqs
    rows = step.rows(reqs * (shape.drafts + 1))
    by_coins = sampled and not coupled
    device = step.index.device
    # q as p is: about every second draft stands where they are independent draws of one scale.
    draft_logits = draft_normalisers = None
    num_bytes = NUMBER * rows[0].numel()
    if by_coins:
        draft_logits = torch.randn(reqs, shape.drafts, shape.vocab, device=device)
        peaks = draft_logits.amax(-1)
        masses = (draft_logits - peaks[..., None]).exp().sum(-1)
        draft_normalisers = torch.stack([peaks, masses], dim=-1)
        num_bytes += 2 * NUMBER * reqs * shape.vocab  # the rejected row of p again, and of q
    draft_ids = rows[0].view(reqs, shape.drafts + 1, -1)[:, :-1].argmax(-1)

    def run(i: int) -> object:
        return accept(
            Scored(rows[i]),
            step.window_start,
            step.window_lens,
            draft_ids,
            draft_logits,
            draft_normalisers,
            temperatures=step.temperatures if sampled else step.greedy,
            coupled=torch.full_like(step.index, coupled, dtype=torch.bool),
            seeds=step.seeds,
            first_positions=step.index + 9,
            coins=by_coins,
        )

    return Case(op, step.size, run, None, len(rows), num_bytes)


def _score(op: str, step: _Step, asking: bool, width: int | None = None) -> Case:
    num_tokens = step.reqs * (width or step.shape.drafts + 1)
    rows = step.rows(num_tokens)
    index = torch.arange(num_tokens, device=rows.device)
    asks = torch.full_like(index, asking, dtype=torch.bool)

    def run(i: int) -> object:
        return score_tokens(Scored(rows[i]), index, index, asks, TOP)

    num_bytes = NUMBER * rows[0].numel() if asking else 0
    return Case(op, f"{step.size}, {num_tokens} tokens", run, None, len(rows), num_bytes)


def _gather_result(op: str, step: _Step) -> Case:
    num_ids = step.reqs * (step.shape.drafts + 1)
    ids = torch.zeros(num_ids, dtype=torch.int64, device=step.index.device)
    bounds = torch.zeros(step.reqs + 1, dtype=torch.int64, device=step.index.device)
    verdict = Verdict(step.index, ids, ids, bounds)
    sure = torch.ones(step.reqs, step.shape.drafts, device=step.index.device)
    places = ResultPlaces(step.reqs, step.shape.drafts, None, has_confidence=True)
    numbers, parts = places.allocate(step.index.device)

    def run(i: int) -> object:  # noqa: ARG001
        gather_result(verdict, step.index, step.index, sure, numbers, parts.confidence)
        return numbers

    def plain(i: int) -> object:  # noqa: ARG001
        counts = [step.index] * 3
        torch.cat([bounds, *counts, ids], out=numbers[: places.num_ints])
        assert parts.confidence is not None
        return parts.confidence.copy_(sure)

    return Case(op, step.size, run, plain, 1, 2 * INDEX * numbers.numel())


def _walk(op: str, step: _Step, dtype: torch.dtype, sampled: bool, need_logits: bool) -> Case:
    shape, device = step.shape, step.index.device

    def new(*size: int) -> Tensor:
        return torch.randn(*size, dtype=dtype, device=device)

    base = step.rows(step.reqs * shape.drafts)
    base = base.view(len(base), step.reqs, shape.drafts, shape.vocab)
    hidden = new(step.reqs, shape.drafts, shape.hidden)
    w1, w2 = new(2, shape.vocab, shape.rank)
    scales = torch.ones(shape.drafts, device=device)
    head = ConfidenceHead(new(1, shape.hidden + shape.rank), new(1), scales)
    keys = step.keys(Purpose.DRAFT if need_logits else Purpose.TARGET)

    def run(i: int) -> object:
        return markov_walk(
            base[i],
            hidden,
            step.index,
            w1,
            w2,
            temperatures=step.temperatures if sampled else step.greedy,
            keys=keys,
            need_logits=need_logits,
            confidence=head,
        )

    num_bytes = NUMBER * base[0].numel() * (2 if need_logits else 1)
    # w2 is read in every slot: a small one comes from the cache.
    num_bytes += w2.numel() * w2.element_size() * shape.drafts
    return Case(op, step.size, run, None, len(base), num_bytes)


def _sound_lens(op: str, step: _Step) -> Case:
    normalisers = torch.ones(step.reqs, step.shape.drafts, 2, device=step.index.device)
    num_drafted = step.window_lens - 1

    def run(i: int) -> object:  # noqa: ARG001
        return sound_lens(normalisers, num_drafted)

    def plain(i: int) -> object:  # noqa: ARG001
        finite = torch.isfinite(normalisers).all(-1).long().cumprod(-1).sum(-1)
        return torch.minimum(finite, num_drafted)

    num_bytes = NUMBER * normalisers.numel() + 2 * INDEX * step.reqs
    return Case(op, step.size, run, plain, 1, num_bytes)


def _allocate(op: str, step: _Step) -> Case:
    confidence = torch.rand(step.reqs, step.shape.drafts, device=step.index.device)
    num_drafted = step.window_lens - 1
    budget = num_drafted.sum() // 2

    def run(i: int) -> object:  # noqa: ARG001
        return allocate(confidence, num_drafted, budget)

    return Case(op, step.size, run, None, 1, NUMBER * confidence.numel() + 2 * INDEX * step.reqs)


def _lay_out(op: str, step: _Step) -> Case:
    num_tokens, lens = step.reqs * (step.shape.drafts + 1), step.window_lens

    def run(i: int) -> object:  # noqa: ARG001
        return lay_out(lens, lens, lens, num_tokens=num_tokens, num_scored=num_tokens)

    def plain(i: int) -> object:  # noqa: ARG001
        return TokenLayout.build(lens, lens, num_tokens=num_tokens, num_scored=num_tokens)

    return Case(op, step.size, run, plain, 1, INDEX * (4 * num_tokens + 6 * step.reqs))


def _fill_batch(op: str, step: _Step) -> Case:
    num_tokens, lens = step.reqs * (step.shape.drafts + 1), step.window_lens
    layout = lay_out(lens, lens, lens, num_tokens=num_tokens, num_scored=num_tokens)
    known_start_loc = torch.arange(step.reqs + 1, device=lens.device)
    draft_ids = step.index[:, None].repeat(1, step.shape.drafts)
    table = torch.arange(step.reqs * PAGES, device=lens.device).view(step.reqs, PAGES)

    def run(i: int) -> object:  # noqa: ARG001
        return fill_batch(
            layout,
            known_ids=step.index,
            known_start_loc=known_start_loc,
            start_positions=step.index,
            draft_ids=draft_ids,
            page_table=table,
            page_size=PAGE,
        )

    return Case(op, step.size, run, None, 1, INDEX * (7 * num_tokens + 4 * step.reqs))
