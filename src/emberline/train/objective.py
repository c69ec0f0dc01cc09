"""What a step minimises: from a batch to the loss and to what is measured on the way.

Owns how drafts of every algorithm meet the losses; it must not know about data, optimisers or
processes. It is a module so that data parallel training can wrap it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from emberline.train.backbone import DraftModel
from emberline.train.config import LossConfig
from emberline.train.features import Batch
from emberline.train.metrics import BlockStats, block_stats
from emberline.train.model import Model
from emberline.train.objectives import Mix, Rule, confidence_loss, fused_loss, loss_and_gradient
from emberline.train.schedule import value_at


class Objective(nn.Module):
    """The loss of a draft.

    Args:
        model: the draft.
        head: [V, D] the target's output head, frozen.
        logit_cap: c of a family whose logits are c * tanh(x / c), or None.
        loss: weights of the terms.
        angles: rotary angles by position, for the longest row and a block.
        bfloat16: compute the draft in bfloat16.
        compiled: compile the draft (fixed shapes).
    """

    def __init__(
        self,
        model: Model,
        head: Tensor,
        logit_cap: float | None,
        loss: LossConfig,
        angles: Tensor,
        *,
        bfloat16: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.head, self.config, self.angles = model, head, loss, angles
        self.logit_cap, self.autocasts = logit_cap, bfloat16
        self.backbone: Callable[..., Tensor] = model
        if compiled:
            self.backbone = torch.compile(model, dynamic=False)
        self.rule: Rule = loss_and_gradient
        if head.is_cuda:
            from emberline.train import kernels

            self.rule = kernels.loss_rows

    def forward(self, batch: Batch, progress: float) -> tuple[Tensor, BlockStats]:
        """The batch's share of a step's loss, and what was measured on its blocks.

        `progress` (0 .. 1) is how much of the run is done: weights may be scheduled.
        """
        valid = batch.blocks.valid.flatten(0, 1)  # [N, K]
        with torch.autocast(self.head.device.type, torch.bfloat16, enabled=self.autocasts):
            hidden = self.backbone(
                batch.taps, batch.embedded, batch.blocks.positions, self.angles, batch.context
            ).view(*valid.shape, -1)
            latent, w2, confidence = self._heads(hidden, batch.blocks.previous.view_as(valid))
        weights = batch.weights.flatten()
        loss, ce, l1, agree, _ = fused_loss(
            hidden.flatten(0, 1),
            latent,
            w2,
            self.head,
            batch.target_hidden,
            batch.blocks.labels.flatten(),
            weights,
            self.mix(progress),
            self.config.chunk_rows,
            self.rule,
            self.logit_cap,
        )
        bce = torch.zeros((), device=loss.device)
        if confidence is not None:
            bce = confidence_loss(confidence, l1, weights)
            loss = loss + value_at(self.config.confidence, progress) * bce
        found = block_stats(ce, l1, agree, valid, confidence, loss, bce, weights.sum())
        return loss, found

    def mix(self, progress: float) -> Mix:
        """Weights of the terms on logits at this point of the run."""
        config = self.config
        return Mix(
            ce=value_at(config.ce, progress),
            l1=value_at(config.l1, progress),
            l1_sharp=value_at(config.l1_sharp, progress),
            sharp_temperature=config.sharp_temperature,
            soft_ce=value_at(config.soft_ce, progress),
        )

    def _heads(
        self, hidden: Tensor, previous: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The Markov head's latents [N * K, r] and w2 [V, r], and confidence logits [N * K]."""
        model = self.model
        if not isinstance(model, DraftModel):
            return None, None, None
        embedded = model.embed_previous(previous)
        latent = w2 = confidence = None
        if model.markov_head is not None and embedded is not None:
            latent = model.markov_head.latent(hidden, embedded).flatten(0, 1)
            w2 = model.markov_head.markov_w2.weight
        if model.confidence_head is not None:
            confidence = model.confidence_head(hidden, embedded).flatten()
        return latent, w2, confidence
