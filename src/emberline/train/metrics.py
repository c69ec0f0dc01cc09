"""What is measured on blocks: acceptance by position, expected length, calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Sums over the blocks of some batches; all on the device, read with `summary`.

    Batches may be parts of steps: what is summed belongs to slots, and the weights of a whole
    step's slots sum to 1.
    """

    terms: Tensor  # [2] CE and L1, summed over valid slots
    loss: Tensor  # [2] the loss and its confidence term, slots weighted as in training
    weight: Tensor  # [] of the slots in `loss`: how many steps
    accepted: Tensor  # [K] sum of 1 - L1 / 2 over valid slots
    agreed: Tensor  # [K] sum of equal argmaxes
    counted: Tensor  # [K] valid slots
    length: Tensor  # [2] sum over blocks of accepted tokens expected at T = 1 and found at T = 0
    blocks: Tensor  # [] blocks with a valid first slot
    bins: Tensor  # [3, 10] confidence, acceptance and count by confidence

    def __add__(self, other: BlockStats) -> BlockStats:
        return BlockStats(*(getattr(self, n) + getattr(other, n) for n in self.__slots__))

    def flat(self) -> Tensor:
        """All sums in one row, as processes exchange them."""
        return torch.cat([getattr(self, name).flatten() for name in self.__slots__])

    def like(self, flat: Tensor) -> BlockStats:
        """The sums in a row of `flat`, in the shapes of these."""
        fields = [getattr(self, name) for name in self.__slots__]
        parts = torch.split(flat, [field.numel() for field in fields])
        return BlockStats(*(part.view_as(f) for part, f in zip(parts, fields, strict=True)))

    def summary(self) -> dict[str, float | list[float]]:
        """Plain numbers. `length_*` count the token that verification adds."""
        counted = self.counted.clamp(min=1)
        ce, l1 = (self.terms / self.counted.sum().clamp(min=1)).tolist()
        loss, confidence = (self.loss / self.weight.clamp(min=1e-8)).tolist()
        expected, greedy = (1 + self.length / self.blocks.clamp(min=1)).tolist()
        gap = (self.bins[0] - self.bins[1]).abs().sum() / self.bins[2].sum().clamp(min=1)
        return {
            "loss": loss,
            "ce": ce,
            "l1": l1,
            "confidence_bce": confidence,
            "acceptance": (self.accepted / counted).tolist(),
            "agreement": (self.agreed / counted).tolist(),
            "length_t1": expected,
            "length_t0": greedy,
            "ece": float(gap),
        }


def block_stats(
    cross_entropy: Tensor,
    distance: Tensor,
    agree: Tensor,
    valid: Tensor,
    confidence_logits: Tensor | None,
    loss: Tensor,
    confidence_bce: Tensor,
    weight: Tensor,
) -> BlockStats:
    """Sums of one batch. Row tensors are [N * K], `valid` is [N, K], blocks in order.

    `loss`, its term `confidence_bce` and the slots' summed `weight` are scalars.
    """
    share = valid.float()
    accept = (1 - distance / 2).view_as(share) * share
    same = agree.view_as(share).float() * share
    flat = share.flatten()
    terms = [(cross_entropy * flat).sum(), (distance * flat).sum()]
    lengths = [accept.cumprod(1).sum(), same.cumprod(1).sum()]
    bins = torch.zeros(3, 10, device=share.device)
    if confidence_logits is not None:
        chance = torch.sigmoid(confidence_logits.detach().float()).flatten()
        index = (chance * 10).long().clamp(0, 9)
        for row, values in enumerate((chance * flat, accept.flatten(), flat)):
            bins[row] = bins[row].index_add(0, index, values)
    return BlockStats(
        terms=torch.stack(terms),
        loss=torch.stack([loss.detach(), confidence_bce.detach()]),
        weight=weight,
        accepted=accept.sum(0),
        agreed=same.sum(0),
        counted=share.sum(0),
        length=torch.stack(lengths),
        blocks=share[:, 0].sum(),
        bins=bins,
    )
