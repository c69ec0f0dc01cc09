"""Block drafts on kernels: the numbers of the CPU's own path, without ever waiting for the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.batch import DrawKeys
from emberline.drafters import Drafter
from emberline.drafters.base import Capturable
from emberline.ops.kernels import plain_kernels

from support.block_drafts import DRAFTS, RULES, Pair, assert_same_block, block_of, follow_all
from support.drafter_world import HIDDEN, PAGE_SIZE, TAPS, load
from support.no_waiting import no_waiting
from support.tiny_draft import draft_config, draft_tensors
from support.tiny_eagle3 import eagle3_config, eagle3_tensors


@pytest.mark.parametrize("draft", DRAFTS)
def test_follow_is_observe(tmp_path: Path, draft: str) -> None:
    pair = Pair.load(tmp_path, draft, plain_kernels())
    pair.own.observe_all()
    follow_all(pair.fast)
    (own,), (fast,) = pair.own.drafter.kv_pools, pair.fast.drafter.kv_pools
    for ours, theirs in ((fast.keys, own.keys), (fast.values, own.values)):
        torch.testing.assert_close(ours[:, PAGE_SIZE:], theirs[:, PAGE_SIZE:], rtol=1e-5, atol=1e-5)
        assert ours[:, :3].isnan().all(), "the tail goes to the scratch page"
        assert ours[:, 3:PAGE_SIZE].eq(0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_block_is_the_proposal(tmp_path: Path, draft: str, rule: str) -> None:
    pair = Pair.load(tmp_path, draft, plain_kernels())
    pair.own.observe_all()
    follow_all(pair.fast)
    for need_logits in (True, False):
        context = pair.context(rule, need_logits)
        block = pair.drafter.propose_block(block_of(context))
        assert_same_block(block, pair, context)


def test_fewer_drafts_of_a_block(tmp_path: Path) -> None:
    pair = Pair.load(tmp_path, "vanilla", plain_kernels(), num_draft_tokens=4)
    pair.own.observe_all()
    follow_all(pair.fast)
    context = replace(pair.context("rejection", True), num_drafts=2)
    block = pair.drafter.propose_block(block_of(context))
    assert block.token_ids.shape == (4, 2)
    assert_same_block(block, pair, context)


@pytest.mark.parametrize("draft", ["vanilla", "dflash"])
def test_requests_that_do_not_live_change_nothing(tmp_path: Path, draft: str) -> None:
    pair = Pair.load(tmp_path, draft, plain_kernels())
    pair.own.observe_all()
    follow_all(pair.fast)
    context = pair.context("coupled", False)
    live = block_of(context)

    def longer(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.zeros_like(x[:2])))

    keys = DrawKeys(*(longer(getattr(live.keys, n)) for n in ("seeds", "positions", "purposes")))
    names = ("anchors", "positions", "page_table", "temperatures")
    bucket = replace(live, keys=keys, **{name: longer(getattr(live, name)) for name in names})
    block = pair.drafter.propose_block(bucket)
    assert block.token_ids.shape[0] == 6
    mine = replace(
        block,
        token_ids=block.token_ids[:4],
        confidence=None if block.confidence is None else block.confidence[:4],
    )
    assert_same_block(mine, pair, context)


@pytest.mark.parametrize("draft", ["vanilla", "gemma4", "reduced"])
def test_the_host_never_waits_for_a_backbone(tmp_path: Path, draft: str) -> None:
    pair = Pair.load(tmp_path, draft, plain_kernels())
    context = block_of(pair.context("coupled", False))
    drafter: Any = pair.fast.drafter
    args = torch.zeros(6, len(TAPS) * HIDDEN), torch.arange(6), torch.arange(6)
    with no_waiting():
        drafter.follow(*args)
        assert drafter.base_logits(drafter.run_block(context)).shape[:2] == (4, 5)


def test_only_some_drafts_can_be_captured(tmp_path: Path) -> None:
    without: Any = load(tmp_path / "a", draft_config(), draft_tensors())
    with pytest.raises(ValueError, match="load the draft with them"):
        without.follow(torch.zeros(1, len(TAPS) * HIDDEN), *torch.zeros(2, 1, dtype=torch.int64))
    eagle: Drafter = load(
        tmp_path / "b", eagle3_config(), eagle3_tensors(), kernels=plain_kernels()
    )
    assert not isinstance(eagle, Capturable)
