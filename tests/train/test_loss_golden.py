"""Loss terms against an independent implementation in numpy, float64, term by term and together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from emberline.train.config import DraftConfig, LossConfig
from emberline.train.objectives import (
    Mix,
    confidence_loss,
    fused_loss,
    loss_and_gradient,
    position_weights,
)

BLOCKS, SLOTS, VOCAB = 5, 7, 23
Array = np.ndarray[Any, Any]


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


class Fixture:
    """Logits of draft and target, labels, confidences, and a mask of valid slots."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        shape = (BLOCKS, SLOTS)
        self.draft = 3 * rng.standard_normal((*shape, VOCAB))
        self.target = self.draft + 2 * rng.standard_normal((*shape, VOCAB))
        self.labels = rng.integers(VOCAB, size=shape)
        self.confidence = rng.standard_normal(shape)
        ends = rng.integers(0, SLOTS + 1, size=BLOCKS)  # blocks that end early; one may be empty
        ends[0] = SLOTS
        self.valid = np.arange(SLOTS) < ends[:, None]

    def terms(self, temperature: float = 0.5) -> dict[str, Array]:
        """Every term of every slot, [BLOCKS, SLOTS]."""
        q, p = softmax(self.draft), softmax(self.target)
        sharp = softmax(self.draft / temperature) - softmax(self.target / temperature)
        distance = np.abs(q - p).sum(-1)
        chance, wanted = 1 / (1 + np.exp(-self.confidence)), 1 - distance / 2
        own = np.take_along_axis(q, self.labels[..., None], -1)[..., 0]
        return {
            "ce": -np.log(own),
            "l1": distance,
            "soft_ce": -(p * np.log(q)).sum(-1),
            "l1_sharp": np.abs(sharp).sum(-1),
            "confidence": -(wanted * np.log(chance) + (1 - wanted) * np.log(1 - chance)),
        }

    def weights(self, factors: Array) -> Array:
        """[BLOCKS, SLOTS], summing to 1 over the valid slots."""
        weights = factors * self.valid
        return weights / weights.sum()


def tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).float().flatten(0, 1)


def ours(fixture: Fixture, weights: torch.Tensor, mix: Mix, confidence: float) -> float:
    """The loss as the trainer forms it, with logits that come straight from a head of one."""
    eye = torch.eye(VOCAB)
    labels = torch.from_numpy(fixture.labels).flatten()
    loss, _, l1, *_ = fused_loss(
        tensor(fixture.draft), None, None, eye, tensor(fixture.target), labels, weights, mix, 8
    )
    return float(loss + confidence * confidence_loss(tensor(fixture.confidence), l1, weights))


@pytest.mark.parametrize("term", ["ce", "l1", "soft_ce", "l1_sharp"])
def test_every_term_of_every_slot(term: str):
    fixture = Fixture()
    mix = Mix(**{"ce": 0.0, "l1": 0.0, term: 1.0})
    labels, ones = torch.from_numpy(fixture.labels).flatten(), torch.ones(BLOCKS * SLOTS)
    found = loss_and_gradient(
        tensor(fixture.draft), tensor(fixture.target), labels, ones, mix, torch.float32
    )
    expected = fixture.terms()
    np.testing.assert_allclose(found.total, expected[term].ravel(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found.ce, expected["ce"].ravel(), rtol=2e-5)
    np.testing.assert_allclose(found.l1, expected["l1"].ravel(), rtol=2e-5, atol=2e-6)
    q, p = softmax(fixture.draft), softmax(fixture.target)
    assert found.agree.tolist() == (q.argmax(-1) == p.argmax(-1)).ravel().tolist()


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("dspark", LossConfig()),
        ("dspark", LossConfig(ce=1.0, l1=0.0, confidence=0.0)),
        ("dspark", LossConfig(0.2, 0.5, 0.3, decay=2.5, l1_sharp=0.7, sharp_temperature=0.3)),
        ("eagle3", LossConfig(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0)),
        ("eagle3", LossConfig(ce=0.1, l1=0.9, confidence=0.0)),
    ],
)
def test_the_loss_of_a_step(algorithm: str, loss: LossConfig, draft: DraftConfig):
    fixture = Fixture()
    slots = np.arange(SLOTS)
    factors = 0.8**slots if algorithm == "eagle3" else np.exp(-slots / loss.decay)
    weights, terms = fixture.weights(factors), fixture.terms(loss.sharp_temperature)
    names = ("ce", "l1", "soft_ce", "l1_sharp", "confidence")
    expected = sum(float(getattr(loss, n)) * (weights * terms[n]).sum() for n in names)

    changes: dict[str, Any] = {"block_size": SLOTS, "algorithm": algorithm}
    if algorithm == "eagle3":
        changes |= {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False}
        changes |= {"mask_token_id": None}
    shape = dataclasses.replace(draft, **changes)
    own = position_weights(torch.from_numpy(fixture.valid), shape.position_factors(loss.decay))
    np.testing.assert_allclose(own, weights, rtol=1e-6)
    mix = Mix(loss.ce, loss.l1, loss.l1_sharp, loss.sharp_temperature, loss.soft_ce)
    found = ours(fixture, own.flatten(), mix, float(loss.confidence))
    assert found == pytest.approx(expected, rel=2e-6)
