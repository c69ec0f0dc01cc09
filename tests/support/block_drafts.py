"""The same block draft on the CPU's own path and on kernels, told and asked the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emberline.batch import BlockContext, DraftContext, DrawKeys, DrawnBlock, Purpose
from emberline.drafters.base import Capturable
from emberline.ops.kernels import Kernels
from emberline.sampling.keys import block_purposes

from support.drafter_world import HIDDEN, LENGTHS, PAGE_SIZE, TAPS, World, load
from support.tiny_dialects import PLAIN, reduced_tensors
from support.tiny_draft import (
    DFLASH,
    EVERYONE,
    MIXED,
    ZLAB,
    draft_config,
    draft_tensors,
    gemma4_config,
    gemma4_tensors,
)

Draft = tuple[dict[str, Any], dict[str, torch.Tensor]]
DRAFTS: dict[str, Callable[[], Draft]] = {
    "vanilla": lambda: (draft_config(), draft_tensors()),
    "gated": lambda: (draft_config(), draft_tensors("gated")),
    "rnn": lambda: (draft_config(), draft_tensors("rnn")),
    "biases": lambda: (draft_config(attention_bias=True), draft_tensors(bias=True)),
    "gemma4": lambda: (
        gemma4_config(keys_are_values=False), gemma4_tensors(keys_are_values=False)
    ),
    "gemma4-keys": lambda: (
        gemma4_config(keys_are_values=True), gemma4_tensors(keys_are_values=True)
    ),
    "reduced": lambda: (PLAIN, reduced_tensors()),
    "reduced-rnn": lambda: (PLAIN, reduced_tensors("rnn")),
    "dflash": lambda: (draft_config(**DFLASH), draft_tensors(None)),
    "dflash-shifted": lambda: (draft_config(**ZLAB), draft_tensors(None)),
    "dflash-reduced": lambda: (draft_config(**DFLASH), reduced_tensors(None)),
}  # fmt: skip
RULES = {"greedy": ([0.0] * 4, True), "coupled": (MIXED, True), "rejection": (MIXED, False)}


@dataclass(frozen=True)
class Pair:
    """The same draft on the CPU's own path and on kernels, each with what it has been told."""

    own: World
    fast: World

    @classmethod
    def load(cls, folder: Path, draft: str, kernels: Kernels, **options: Any) -> Pair:
        config, tensors = DRAFTS[draft]()
        own, fast = (
            World(load(folder / name, config, tensors, kernels=k, **options))
            for name, k in (("own", None), ("fast", kernels))
        )
        return cls(own, fast)

    @property
    def drafter(self) -> Capturable:
        assert isinstance(self.fast.drafter, Capturable)
        return self.fast.drafter

    def context(self, rule: str, need_logits: bool, reqs: Sequence[int] = EVERYONE) -> DraftContext:
        """What the requests are asked under one of `RULES`."""
        temperatures, coupled = RULES[rule]
        positions = torch.tensor(LENGTHS)[list(reqs)]
        purposes = block_purposes(torch.full_like(positions, coupled, dtype=torch.bool), positions)
        return self.own.context(
            list(reqs),
            [temperatures[req] for req in reqs],
            purposes=purposes,
            need_logits=need_logits,
        )


def block_of(context: DraftContext) -> BlockContext:
    """The same for a graph to capture."""
    return BlockContext(
        num_drafts=context.num_drafts,
        anchors=context.anchors,
        positions=context.positions,
        page_table=context.page_table,
        temperatures=context.temperatures,
        keys=DrawKeys(context.seeds, context.positions, context.purposes),
        need_logits=context.need_logits,
    )


def follow_all(world: World, spare: int = 3) -> None:
    """Everything of every request at once, and some tokens of a bucket's tail."""
    drafter = world.drafter
    assert isinstance(drafter, Capturable)
    reqs = torch.tensor(LENGTHS)
    req = torch.repeat_interleave(torch.arange(len(LENGTHS)), reqs)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    pages = world.page_table[req, positions // PAGE_SIZE]
    slots = pages * PAGE_SIZE + positions % PAGE_SIZE
    nothing = torch.zeros(spare, dtype=torch.int64)
    junk = torch.full((spare, len(TAPS) * HIDDEN), float("nan"))
    drafter.follow(
        torch.cat((world.taps[req, positions], junk)),
        torch.cat((positions, nothing)),
        torch.cat((slots, torch.arange(spare))),
    )


def assert_same_block(block: DrawnBlock, pair: Pair, context: DraftContext) -> None:
    with torch.inference_mode():
        wanted = pair.own.drafter.propose(context)
    assert torch.equal(block.token_ids, wanted.token_ids)
    assert (block.confidence is None) == (wanted.confidence is None)
    if wanted.confidence is not None:
        torch.testing.assert_close(block.confidence, wanted.confidence, rtol=1e-4, atol=1e-5)
    if not context.need_logits:
        assert block.logits is block.normalisers is None
        return
    read = (context.temperatures > 0) & (context.purposes != int(Purpose.TARGET))
    assert wanted.logits is not None
    assert block.logits is not None
    assert block.normalisers is not None
    assert block.logits.dtype == torch.float32
    torch.testing.assert_close(block.logits[read], wanted.logits[read], rtol=1e-5, atol=2e-5)
    q = wanted.logits[read].softmax(-1)
    peaks, masses = block.normalisers[read].unbind(-1)
    ours = (block.logits[read] - peaks[..., None]).exp() / masses[..., None]
    torch.testing.assert_close(ours, q, rtol=0, atol=1e-5)
    torch.testing.assert_close(peaks, wanted.logits[read].amax(-1), rtol=1e-5, atol=2e-5)
