"""One step on the device, from the slots' state to what it emits and the state after it.

The calls of `engine.step.run_step`, for requests whose options need nothing but the target's
logits: no shape depends on a value and nothing waits for the host, so that a CUDA graph can capture
it. Which requests take part, and how many drafts are verified at most, the host says in a few
integers (`Controls`). Must not know requests, pages' owners or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.batch import (
    BlockContext,
    DrawKeys,
    DrawnBlock,
    ForwardBatch,
    TokenScores,
    Verdict,
)
from emberline.config import LayoutKind
from emberline.drafters.base import Capturable
from emberline.engine.device_result import ResultPlaces
from emberline.layout import Scored, TokenLayout, Tokens, start_loc
from emberline.models.target import Target
from emberline.ops.triton.gather_result import gather_result
from emberline.ops.triton.plan import DeviceLayout, allocate, fill_batch, lay_out, sound_lens
from emberline.ops.triton.scores import score_tokens
from emberline.ops.triton.slots import SlotStates, advance_slots, read_slots
from emberline.ops.triton.verdict import accept

HEAD = 2  # numbers before the parts of `Controls`
PARTS = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a step: all that a captured graph is bound to.

    Two kinds: a decode step, every request of which forwards its anchor and drafts, and a chunk
    step (`chunk` > 0), which forwards prompts and drafts nothing.
    """

    num_reqs: int  # B
    num_tokens: int  # T
    num_pages: int  # M, of the longest request
    num_drafts: int = 0  # K, drafts drawn of each block
    chunk: int = 0  # most known tokens of a request; 0: a decode step
    coins: bool = False  # whether some request goes by rejection, so that q is kept
    num_top: int | None = None  # alternatives scored for those who ask; None: nobody does

    @property
    def num_scored(self) -> int:
        """Q: in a decode step every token has logits, in a chunk step one of each request."""
        return self.num_reqs if self.chunk else self.num_tokens


@dataclass(frozen=True, slots=True)
class Controls:
    """What the host says of a step, in one tensor whose parts lie where they lie for any bucket."""

    numbers: Tensor  # [HEAD + 4 * max_reqs + max_tokens] int64
    max_reqs: int

    @classmethod
    def allocate(cls, max_reqs: int, max_tokens: int, device: str) -> Controls:
        """Room for steps of so many requests and known tokens."""
        size = HEAD + PARTS * max_reqs + max_tokens
        return cls(torch.zeros(size, dtype=torch.int64, device=device), max_reqs)

    def write(
        self,
        *parts: Sequence[int],
        budget: int = 0,
        threshold: float = 0.0,
        known_ids: Sequence[int] = (),
    ) -> NDArray[np.int64]:
        """The leading numbers of a step, on the host.

        Args:
            parts: slots, limits, known_lens and samples, or the first of them.
            budget: most drafts verified, of all requests together.
            threshold: least survival of a verified draft.
            known_ids: known tokens, request-major.
        """
        size = HEAD + PARTS * self.max_reqs + len(known_ids)
        numbers = np.zeros(size, dtype=np.int64)
        numbers[0] = budget
        numbers[1] = np.float64(threshold).view(np.int64)
        for index, part in enumerate(parts):
            begin = HEAD + index * self.max_reqs
            numbers[begin : begin + len(part)] = part
        if known_ids:
            numbers[-len(known_ids) :] = known_ids
        return numbers

    @property
    def budget(self) -> Tensor:
        """[] int64."""
        return self.numbers[0]

    @property
    def threshold(self) -> Tensor:
        """[] float64."""
        return self.numbers[1:2].view(torch.float64)[0]

    def slots(self, count: int) -> Tensor:
        """[B] rows of the slots' state."""
        return self._part(0, count)

    def limits(self, count: int) -> Tensor:
        """[B] drafts of each request that there is room for."""
        return self._part(1, count)

    def known_lens(self, count: int) -> Tensor:
        """[B] known tokens of each request of a chunk step."""
        return self._part(2, count)

    def samples(self, count: int) -> Tensor:
        """[B] 1 where a token is drawn after them."""
        return self._part(3, count)

    def known_ids(self, count: int) -> Tensor:
        """[T] known tokens, request-major."""
        begin = HEAD + PARTS * self.max_reqs
        return self.numbers[begin : begin + count]

    def _part(self, index: int, count: int) -> Tensor:
        begin = HEAD + index * self.max_reqs
        return self.numbers[begin : begin + count]


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a step on the device is made of. The same for every step of an engine."""

    target: Target
    drafter: Capturable | None
    rows: Tensor  # [S + 1, slots.COLUMNS + M] int64, state by slot
    controls: Controls
    page_size: int
    layout: LayoutKind = "compact"


@torch.inference_mode()
def run_device_step(parts: DeviceParts, bucket: Bucket) -> Tensor:
    """Run one step. Reads and writes `parts.rows` and the KV; waits for nothing.

    Returns:
        [any] int64, what it leaves for the host: `device_result` reads it.
    """
    count = bucket.num_reqs
    controls, slots = parts.controls, parts.controls.slots(count)
    states, block = draw_block(parts, bucket)
    num_drafted = _num_drafted(states, block)
    admitted = _admit(parts, num_drafted, block)
    if bucket.chunk:
        known_lens, samples = controls.known_lens(count), controls.samples(count)
        known_ids, known_start_loc = controls.known_ids(bucket.num_tokens), start_loc(known_lens)
    else:
        known_lens = samples = states.alive
        known_ids, known_start_loc = states.anchors, None
    drafts = None if block is None else admitted
    places = _lay_out(parts, bucket, known_lens, samples, drafts)
    draft_ids = slots.new_empty((count, 0)) if block is None else block.token_ids
    batch = fill_batch(
        places,
        known_ids=known_ids,
        known_start_loc=known_start_loc,
        start_positions=states.start_positions,
        draft_ids=draft_ids,
        page_table=states.page_table,
        page_size=parts.page_size,
    )
    output = parts.target.forward(
        ForwardBatch(
            layout=_token_layout(parts, bucket, places),
            token_ids=Tokens(batch.token_ids),
            positions=Tokens(batch.positions),
            slot_mapping=Tokens(batch.slot_mapping),
            page_table=states.page_table,
            seq_lens=batch.seq_lens,
        )
    )
    verdict, owners = accept(
        output.logits,
        places.window_start,
        places.window_lens,
        draft_ids,
        None if block is None else block.logits,
        None if block is None else block.normalisers,
        temperatures=states.temperatures,
        coupled=states.coupled,
        seeds=states.seeds,
        first_positions=batch.first_positions,
        coins=bucket.coins,
    )
    if parts.drafter is not None and output.taps is not None:
        # Rejected drafts leave what the next block overwrites before it is read, as in the target.
        parts.drafter.follow(output.taps, batch.positions, batch.slot_mapping)
    advance_slots(
        parts.rows,
        slots,
        states,
        known_lens,
        verdict.num_accepted,
        verdict.token_ids,
        verdict.emitted_start_loc,
    )
    return _pack(bucket, states, output.logits, verdict, owners, num_drafted, admitted, block)


@torch.inference_mode()
def draw_block(parts: DeviceParts, bucket: Bucket) -> tuple[SlotStates, DrawnBlock | None]:
    """The first part of a step: what its requests are, and their drafts if any are drawn."""
    states = read_slots(
        parts.rows,
        parts.controls.slots(bucket.num_reqs),
        parts.controls.limits(bucket.num_reqs),
        num_pages=bucket.num_pages,
        num_drafts=bucket.num_drafts,
    )
    if not bucket.num_drafts:
        return states, None
    assert parts.drafter is not None
    block = parts.drafter.propose_block(
        BlockContext(
            num_drafts=bucket.num_drafts,
            anchors=states.anchors,
            positions=states.start_positions,
            page_table=states.page_table,
            temperatures=states.temperatures,
            keys=DrawKeys(states.seeds, states.start_positions, states.draft_purposes),
            need_logits=bucket.coins,
        )
    )
    return states, block


def _num_drafted(states: SlotStates, block: DrawnBlock | None) -> Tensor:
    """[B] drafts that may be verified. What was drawn from no distribution may not."""
    if block is None or block.normalisers is None:
        return states.draft_limits
    return sound_lens(block.normalisers, states.draft_limits)


def _admit(parts: DeviceParts, num_drafted: Tensor, block: DrawnBlock | None) -> Tensor:
    """[B] drafts that are verified. Looks at no draft: see `verify.planner`."""
    if block is None:
        return num_drafted
    controls, confidence = parts.controls, block.confidence
    if confidence is None:  # the step has room for the budget, whoever gets it
        confidence = torch.ones_like(block.token_ids, dtype=torch.float32)
    return allocate(confidence, num_drafted, controls.budget, controls.threshold)


def _lay_out(
    parts: DeviceParts,
    bucket: Bucket,
    known_lens: Tensor,
    samples: Tensor,
    drafts: Tensor | None,
) -> DeviceLayout:
    # A chunk's rows follow each other anyway: no granule fits prompts of any length.
    spread = parts.layout == "static" and not bucket.chunk
    width = 1 + bucket.num_drafts
    # Where there is room for the logits of all tokens, they need not be picked.
    scores_all = bucket.num_scored == bucket.num_tokens
    return lay_out(
        known_lens,
        samples,
        known_lens if scores_all else samples,
        drafts,
        num_tokens=bucket.num_tokens,
        num_scored=bucket.num_scored,
        num_rows=_num_rows(bucket) if spread else None,
        width=width if spread else 1,
    )


def _num_rows(bucket: Bucket) -> int:
    """R of a static decode step: a block a request, and the tail behind them."""
    return bucket.num_reqs * (1 + bucket.num_drafts) + bucket.num_tokens


def _token_layout(parts: DeviceParts, bucket: Bucket, places: DeviceLayout) -> TokenLayout:
    spread = parts.layout == "static" and not bucket.chunk
    return TokenLayout(
        num_reqs=bucket.num_reqs,
        num_tokens=bucket.num_tokens,
        num_rows=_num_rows(bucket) if spread else bucket.num_tokens,
        num_scored=bucket.num_scored,
        max_query_len=bucket.chunk or 1 + bucket.num_drafts,
        query_start_loc=places.query_start_loc,
        window_lens=places.window_lens,
        req_of_token=places.req_of_token,
        offset_of_token=places.offset_of_token,
        row_of_token=places.row_of_token,
        scored_start_loc=places.scored_start_loc,
        token_of_scored=places.token_of_scored,
    )


def _pack(
    bucket: Bucket,
    states: SlotStates,
    logits: Scored,
    verdict: Verdict,
    owners: Tensor,
    num_drafted: Tensor,
    admitted: Tensor,
    block: DrawnBlock | None,
) -> Tensor:
    """Everything for the host in one tensor, so that one copy brings it over."""
    confidence = None if block is None else block.confidence
    places = ResultPlaces(
        bucket.num_reqs, bucket.num_drafts, bucket.num_top, has_confidence=confidence is not None
    )
    numbers, parts = places.allocate(admitted.device)
    if bucket.num_top is not None and parts.scores is not None:
        scores, ids = parts.scores, verdict.token_ids
        room = TokenScores(ids, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        score_tokens(
            logits, verdict.scored_index, ids, states.asks, bucket.num_top,
            owners=owners, into=room,
        )  # fmt: skip
    gather_result(verdict, num_drafted, admitted, confidence, numbers, parts.confidence)
    return numbers
