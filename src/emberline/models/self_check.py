"""Whether this machine gives a token the same logits bit for bit, however its step was cut.

Kernels are chosen by shape and processor, so the promise is measured when an engine starts, not
assumed. Must not know requests or the scheduler: it is handed scratch pages and gives them back
zeroed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.batch import ForwardBatch
from emberline.config import LayoutKind
from emberline.layout import TokenLayout, Tokens
from emberline.models.target import Target

COMPARED = 32
LONG = 64  # tokens of the chunk that the small steps are compared with
ENDS = (132, 400)  # the compared tokens straddle positions 128 and 384, where windows grow
NEIGHBOUR = 5  # tokens of a second request, for the batched step
_CUTS: tuple[tuple[int, bool], ...] = ((1, False), (1, False), (8, True), (22, False))


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was found."""

    bitwise: bool
    max_logit_diff: float  # largest difference of any logit after a computed context
    seconds: float


def check_row_invariance(target: Target, pages: Sequence[int]) -> SelfCheck:
    """Score the same tokens in a long chunk, then alone, in a batched block and in a short chunk.

    The context before them is noise written straight into the pages: it has to be the same, not
    to mean anything, and filling it is quicker than a prefill. Only where something differs is it
    computed: noise makes much of small differences, and the figure is to be one that users see.

    Args:
        target: as it will run (dtype, threads, device).
        pages: free pages; 1 + ceil(400 / page size) of them for the whole check. With fewer, or
            a shorter context, only what fits is compared.

    Raises:
        ValueError: not even the compared tokens and a neighbour fit.
    """
    started = time.perf_counter()
    page_size = target.kv_pools[0].page_size
    room = min((len(pages) - 1) * page_size, target.max_model_len)
    if room < COMPARED:
        raise ValueError(f"the self-check needs {COMPARED} tokens of scratch, got {room}")
    ends = [end for end in ENDS if end <= room] or [room]
    scratch = Scratch(target, pages)
    with torch.no_grad():
        scratch.fill()
        diff = _largest(scratch, ends)
        bitwise = diff == 0.0
        if diff > 0.0:
            scratch.run(0, max(ends), scored=1)
            diff = _largest(scratch, ends)
    for pool in target.kv_pools:
        pool.clear(pages)
    return SelfCheck(bitwise, diff, time.perf_counter() - started)


def _largest(scratch: Scratch, ends: Sequence[int]) -> float:
    """Largest difference over all ends; NaN if any is: a model that says NaN is not equal."""
    diffs = []
    for end in ends:
        start = max(0, end - LONG)
        want = scratch.run(start, end - start, scored=COMPARED)
        diffs.append(_recut(scratch, end - COMPARED, want))
    return float(torch.tensor(diffs).max())


def _recut(scratch: Scratch, start: int, want: Tensor) -> float:
    """Largest difference from `want` [COMPARED, V] when its tokens run in small steps."""
    got = []
    for count, batched in _CUTS:
        got.append(scratch.run(start, count, scored=count, batched=batched))
        start += count
    return float((torch.cat(got) - want).abs().max())


class Scratch:
    """One sequence in the scratch pages, and a neighbour in the last of them."""

    def __init__(self, target: Target, pages: Sequence[int]) -> None:
        self._target = target
        self._device = target.kv_pools[0].keys.device
        self._pages = torch.tensor(pages, dtype=torch.int64, device=self._device)
        # Any ids will do: a fixed walk over the vocabulary.
        steps = torch.arange(max(ENDS), device=self._device)
        self.tokens = (steps * 7919 + 11) % target.vocab_size

    def run(
        self, start: int, count: int, *, scored: int, batched: bool = False, shift: int = 0
    ) -> Tensor:
        """Forward tokens [start, start + count); logits [scored, V] of the last ones.

        `shift` is added to the positions that the model is told, not to places in the pages.
        """
        page_size = self._target.kv_pools[0].page_size
        spans = [(start, count)] + [(0, min(NEIGHBOUR, page_size))] * batched
        lens = torch.tensor([n for _, n in spans], device=self._device)
        windows = torch.tensor([scored, 1][: len(spans)], device=self._device)
        kind: LayoutKind = "static" if batched else "compact"
        layout = TokenLayout.build(
            lens,
            windows,
            num_tokens=int(lens.sum()),
            num_scored=int(windows.sum()),
            kind=kind,
            width=8,
            row_granule=self._target.row_granule,
        )
        table = self._pages[:-1].repeat(len(spans), 1)
        table[1:] = self._pages[-1]
        positions = torch.cat([torch.arange(a, a + n, device=self._device) for a, n in spans])
        page = table[layout.req_of_token, positions // page_size]
        batch = ForwardBatch(
            layout=layout,
            token_ids=Tokens(self.tokens[positions]),
            positions=Tokens(positions + shift),
            slot_mapping=Tokens(page * page_size + positions % page_size),
            page_table=table,
            seq_lens=torch.tensor([a + n for a, n in spans], device=self._device),
        )
        return self._target.forward(batch).logits[:scored]

    def fill(self) -> None:
        """Write the same unit noise every time."""
        pools = self._target.kv_pools
        num_slots = len(self._pages) * pools[0].page_size
        slots = pools[0].slots_of(self._pages[None], num_slots).flatten()
        generator = torch.Generator().manual_seed(0)
        for tensor in [part for pool in pools for part in (pool.keys, pool.values)]:
            shape = (slots.numel(), *tensor.shape[2:])
            noise = torch.randn(shape, generator=generator).to(tensor)
            for layer in tensor:
                layer.index_copy_(0, slots, noise)
