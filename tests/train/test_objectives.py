"""Losses against the formula, written out and differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from emberline.train.metrics import block_stats
from emberline.train.objectives import Mix, confidence_loss, fused_loss, position_weights


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("mix", [Mix(0.1, 0.9), Mix(1.0, 0.0), Mix(0.1, 0.5, 0.4, 0.3)])
def test_fused_loss_is_the_naive_one_with_its_gradients(with_markov: bool, mix: Mix):
    torch.manual_seed(0)
    rows, width, rank, vocab = 20, 8, 4, 30
    hidden = torch.randn(rows, width, requires_grad=True)
    latent = torch.randn(rows, rank, requires_grad=True)
    w2 = torch.randn(vocab, rank, requires_grad=True)
    head, target_hidden = torch.randn(vocab, width), torch.randn(rows, width)
    labels, weights = torch.randint(0, vocab, (rows,)), torch.rand(rows)
    wanted = (hidden, latent, w2) if with_markov else (hidden,)
    markov = (latent, w2) if with_markov else (None, None)

    loss, *per_row = fused_loss(hidden, *markov, head, target_hidden, labels, weights, mix, chunk=7)
    found = torch.autograd.grad(3 * loss, wanted)

    logits = hidden @ head.T + (latent @ w2.T if with_markov else 0)
    q, p = torch.softmax(logits, -1), torch.softmax(target_hidden @ head.T, -1)
    naive_ce = -q[torch.arange(rows), labels].log()
    naive_l1 = (p - q).abs().sum(-1)
    cold = 1 / mix.sharp_temperature
    sharp_q = torch.softmax(cold * logits, -1)
    sharp_p = torch.softmax(cold * (target_hidden @ head.T), -1)
    sharp = (sharp_p - sharp_q).abs().sum(-1)
    terms = mix.ce * naive_ce + mix.l1 * naive_l1 + mix.l1_sharp * sharp
    naive = (weights * terms).sum()
    expected = torch.autograd.grad(3 * naive, wanted)

    torch.testing.assert_close(loss, naive)
    torch.testing.assert_close(per_row[0], naive_ce)
    torch.testing.assert_close(per_row[1], naive_l1)
    assert torch.equal(per_row[2], q.argmax(-1) == p.argmax(-1))
    assert torch.equal(per_row[3], q.argmax(-1) == labels)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_position_weights_decay_and_sum_to_one():
    valid = torch.tensor([[True, True, True], [True, False, False]])
    weights = position_weights(valid, (1.0, math.exp(-1 / 4), math.exp(-2 / 4)))
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights[0, 1] / weights[0, 0]) == pytest.approx(torch.e ** (-1 / 4), rel=1e-5)
    assert weights[1, 1:].tolist() == [0, 0]


def test_confidence_is_taught_the_chance_of_acceptance():
    distance = torch.tensor([0.5, 1.2])
    logits = torch.zeros(2, requires_grad=True)
    weights = torch.tensor([0.5, 0.5])
    best = torch.logit(1 - distance / 2)
    assert confidence_loss(best, distance, weights) < confidence_loss(logits, distance, weights)
    (gradient,) = torch.autograd.grad(
        confidence_loss(best.requires_grad_(), distance, weights), best
    )
    torch.testing.assert_close(gradient, torch.zeros(2), atol=1e-6, rtol=0)


def test_stats_of_two_blocks_by_hand():
    valid = torch.tensor([[True, True], [True, False]])
    distance = torch.tensor([0.4, 1.0, 0.8, 2.0])
    agree = torch.tensor([True, True, False, True])
    logits = torch.logit(1 - distance.clamp(max=1.9) / 2)
    zero = torch.zeros(())
    one = torch.ones(())
    found = block_stats(torch.ones(4), distance, agree, valid, logits, zero, zero, one).summary()
    assert found["acceptance"] == pytest.approx([0.7, 0.5])
    assert found["agreement"] == pytest.approx([0.5, 1.0])
    assert found["length_t1"] == pytest.approx(1 + (0.8 + 0.8 * 0.5 + 0.6) / 2)
    assert found["length_t0"] == pytest.approx(1 + (1 + 1 + 0) / 2)
    assert found["ece"] == pytest.approx(0, abs=1e-6)
