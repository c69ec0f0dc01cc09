"""Anchors, labels and masks of packed blocks against loops."""

from __future__ import annotations

import pytest
import torch

from emberline.train.blocks import dense_mask, flex_mask, make_blocks, may_attend, sample_anchors
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import Role, TokenRows
from emberline.train.features import plan_step


def test_dense_mask_is_the_rule_spelled_out():
    anchors, length, size = torch.tensor([[0, 3, 7], [2, 4, 5]]), 12, 4
    mask = dense_mask(anchors, length, size)
    assert mask.shape == (2, 1, 12, 24)
    for seq in range(2):
        for row in range(12):
            for key in range(24):
                block = row // size
                if key < length:
                    allowed = key < int(anchors[seq, block])
                else:
                    allowed = (key - length) // size == block
                assert bool(mask[seq, 0, row, key]) == allowed


@pytest.mark.parametrize(("count", "length", "size"), [(64, 256, 7), (50, 200, 5), (3, 40, 4)])
def test_flex_tiles_cover_every_visible_pair(count: int, length: int, size: int):
    generator = torch.Generator().manual_seed(0)
    anchors = sample_anchors(torch.ones(2, length - size), count, generator)
    tiles = flex_mask(anchors, length, size).to_dense().bool()
    dense = dense_mask(anchors, length, size)
    for seq, _, row, key in dense.nonzero().tolist():
        assert tiles[seq, 0, row // 128, key // 128]
    assert flex_mask(anchors, length, size).seq_lengths == (count * size, length + count * size)
    rule = may_attend(anchors, length, size)
    zero = torch.zeros((), dtype=torch.int64)
    assert bool(rule(zero, zero, zero, zero)) == bool(dense[0, 0, 0, 0])


def test_labels_follow_the_anchor_and_stop_with_the_turn():
    tokens = torch.arange(100, 112)[None]
    roles = torch.tensor([[0, 0, 2, 2, 2, 0, 0, 1, 1, 1, 1, 1]])
    blocks = make_blocks(tokens, roles, torch.tensor([[1, 2, 6]]), block_size=4, mask_token_id=9)
    assert blocks.inputs.tolist() == [[101, 9, 9, 9, 102, 9, 9, 9, 106, 9, 9, 9]]
    assert blocks.previous[0, 0].tolist() == [101, 102, 103, 104]
    assert blocks.labels[0].tolist() == [
        [102, 103, 104, 105],
        [103, 104, 105, 106],
        [107, 108, 109, 110],
    ]
    assert blocks.valid[0].tolist() == [
        [True] * 3 + [False],
        [True, True, False, False],
        [True] * 4,
    ]
    assert blocks.positions[0, 4:8].tolist() == [2, 3, 4, 5]


def test_anchors_are_different_rising_and_allowed():
    weights = torch.zeros(2000, 8)
    weights[:, 1], weights[:, 4], weights[:, 6] = 1.0, 3.0, 1.0
    anchors = sample_anchors(weights, 2, torch.Generator().manual_seed(0))
    assert (anchors[:, 1] > anchors[:, 0]).all()
    assert set(anchors.flatten().tolist()) == {1, 4, 6}
    # Without replacement, 4 is left out with chance 2 * (1/5) * (1/4).
    assert float((anchors == 4).any(1).float().mean()) == pytest.approx(0.9, abs=0.03)


def test_positions_without_weight_that_fill_up_a_row_are_not_trained_on(draft: DraftConfig):
    roles = torch.full((3, 40), int(Role.USER), dtype=torch.uint8)
    roles[:, 20:25] = int(Role.ANSWER)
    rows = TokenRows(torch.arange(120).view(3, 40) % 64, roles)
    config = TrainConfig(anchors=16, user_weight=0.0)
    plan = plan_step(rows, torch.arange(3), draft, config, torch.Generator().manual_seed(0))
    answers = (plan.blocks.anchors >= 19) & (plan.blocks.anchors < 24)
    assert answers.sum(1).tolist() == [5] * 3
    assert not bool(plan.blocks.valid[~answers].any())
    assert float(plan.weights[answers].sum()) == pytest.approx(1.0)
    # With a weight of their own they are.
    plan = plan_step(rows, torch.arange(3), draft, TrainConfig(anchors=16), torch.Generator())
    assert bool(plan.blocks.valid[plan.blocks.anchors < 16].any())
