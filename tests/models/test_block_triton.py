"""Block drafts on Triton's kernels, under its interpreter: the CPU's own drafts, no waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emberline.ops.kernels import triton_kernels

from support.block_drafts import Pair, assert_same_block, block_of, follow_all
from support.drafter_world import PAGE_SIZE
from support.no_waiting import no_waiting
from support.triton_kernels import DEVICE, exact_products

__all__ = ["exact_products"]
pytestmark = [
    pytest.mark.usefixtures("exact_products"),
    pytest.mark.skipif(DEVICE != "cpu", reason="the world around the drafts is on the CPU"),
]
CASES = [
    ("vanilla", "greedy", False),
    ("gated", "rejection", True),
    ("reduced", "rejection", True),
    ("gemma4-keys", "coupled", False),
    ("dflash-shifted", "coupled", False),
    ("dflash", "rejection", True),
]


def test_follow_is_observe(tmp_path: Path) -> None:
    pair = Pair.load(tmp_path, "gemma4", triton_kernels())
    pair.own.observe_all()
    follow_all(pair.fast)
    (own,), (fast,) = pair.own.drafter.kv_pools, pair.fast.drafter.kv_pools
    for ours, theirs in ((fast.keys, own.keys), (fast.values, own.values)):
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(ours[:, PAGE_SIZE:], theirs[:, PAGE_SIZE:], **close)


@pytest.mark.parametrize(("draft", "rule", "need_logits"), CASES)
def test_a_block_is_the_proposal(tmp_path: Path, draft: str, rule: str, need_logits: bool) -> None:
    pair = Pair.load(tmp_path, draft, triton_kernels())
    pair.own.observe_all()
    (own,), (fast,) = pair.own.drafter.kv_pools, pair.fast.drafter.kv_pools
    fast.keys.copy_(own.keys)
    fast.values.copy_(own.values)
    context = pair.context(rule, need_logits, reqs=(0, 3))
    asked = block_of(context)
    with no_waiting():
        block = pair.drafter.propose_block(asked)
    assert_same_block(block, pair, context)
