"""The training losses, and a fused form that keeps few [rows, V] tensors alive.

    loss = ce * CE(q, label) + l1 * ||p - q||_1 + confidence * BCE(c, 1 - ||p - q||_1 / 2)

averaged over valid slots with weights exp(-k / decay); p is the target's distribution, q the
draft's (DSpark, training objective). 1 - ||p - q||_1 / 2 is the chance that a draft drawn from q
is accepted (Leviathan et al. 2023), so the L1 term is acceptance itself. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.train.target import wide_linear


def position_weights(valid: Tensor, decay: float) -> Tensor:
    """exp(-k / decay) on valid slots, normalised to sum 1. valid [..., K] bool -> [..., K]."""
    slots = torch.arange(valid.shape[-1], device=valid.device)
    weights = torch.exp(-slots / decay) * valid
    return weights / weights.sum().clamp(min=1e-8)


def loss_and_gradient(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, ce: float, l1: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per-row losses and the gradient of `ce * CE + l1 * L1` in the draft's logits.

    With s = sign(q - p): dL1/dlogits = q (s - <q, s>); dCE/dlogits = q - onehot(label).

    Args:
        draft_logits, target_logits: [N, V] float32.
        labels: [N] int64.

    Returns:
        CE [N]; L1 [N]; gradient [N, V]; whether both argmaxes agree [N]; whether the draft's
        argmax is the label [N].
    """
    peak = draft_logits.amax(-1, keepdim=True)
    q = torch.exp(draft_logits - peak)
    mass = q.sum(-1, keepdim=True)
    q = q / mass
    p = torch.exp(target_logits - target_logits.amax(-1, keepdim=True))
    p = p / p.sum(-1, keepdim=True)
    difference = q - p
    distance = difference.abs().sum(-1)
    sign = torch.sign(difference)
    lean = (q * sign).sum(-1, keepdim=True)
    gradient = q * (ce + l1 * (sign - lean))
    columns = torch.arange(q.shape[-1], device=q.device)
    hit = columns == labels[:, None]
    gradient = gradient - ce * hit
    picked = torch.where(hit, draft_logits, 0.0).sum(-1)
    cross_entropy = (peak + mass.log()).squeeze(-1) - picked
    choice = draft_logits.argmax(-1)
    return (
        cross_entropy,
        distance,
        gradient,
        choice == target_logits.argmax(-1),
        choice == labels,
    )


class _FusedLoss(torch.autograd.Function):
    """Loss whose gradients are computed in the forward, a chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        w2: Tensor | None,
        head: Tensor,
        target_hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        mix: tuple[float, float],
        chunk: int,
        rule: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dtype, width = head.dtype, hidden.shape[1]
        joined = hidden if latent is None else torch.cat((hidden, latent), dim=-1)
        joined = joined.to(dtype)
        table = head if w2 is None else torch.cat((head, w2.to(dtype)), dim=-1)
        grad_joined = torch.empty_like(joined)
        grad_w2 = None if w2 is None else torch.zeros_like(w2)
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, joined.shape[0], chunk):
            rows = slice(start, start + chunk)
            target_logits = wide_linear(target_hidden[rows].to(dtype), head)
            ce, l1, gradient, agree, hit = rule(
                wide_linear(joined[rows], table), target_logits, labels[rows], *mix
            )
            gradient = (gradient * weights[rows, None]).to(dtype)
            grad_joined[rows] = gradient @ table
            if grad_w2 is not None:
                grad_w2 += (gradient.t() @ joined[rows, width:]).to(grad_w2.dtype)
            parts.append((ce, l1, agree, hit))
        ce, l1, agree, hit = (torch.cat(column) for column in zip(*parts, strict=True))
        grad_hidden = grad_joined[:, :width].to(hidden.dtype)
        grad_latent = None if latent is None else grad_joined[:, width:].to(latent.dtype)
        ctx.save_for_backward(grad_hidden, grad_latent, grad_w2)
        ctx.mark_non_differentiable(ce, l1, agree, hit)
        loss = (weights * (mix[0] * ce + mix[1] * l1)).sum()
        return loss, ce, l1, agree, hit

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if t is None else t * grad_loss.to(t.dtype) for t in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None, None, None)


def fused_loss(
    hidden: Tensor,
    latent: Tensor | None,
    w2: Tensor | None,
    head: Tensor,
    target_hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    ce: float,
    l1: float,
    chunk: int = 4096,
    rule: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = loss_and_gradient,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum of CE and L1 without ever holding the logits of all rows.

    The draft's logits are `hidden @ head.T + latent @ w2.T`, the target's `target_hidden @ head.T`.

    Args:
        hidden: [N, D] draft states; latent: [N, r] and w2: [V, r] of the Markov head, or None.
        head: [V, D] frozen; its dtype is the dtype of the products.
        target_hidden: [N, D] the target's last hidden states, normed.
        labels: [N] int64; weights: [N], summing to 1; ce, l1: weights of the terms.
        chunk: rows whose [rows, V] tensors exist at once.
        rule: `loss_and_gradient`, or a compiled version of it.

    Returns:
        The loss, a differentiable scalar; per row and detached: CE [N], L1 [N], whether the
        argmaxes of draft and target agree [N], whether the draft's argmax is the label [N].
    """
    return _FusedLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, latent, w2, head, target_hidden, labels, weights, (ce, l1), chunk, rule
    )


def confidence_loss(logits: Tensor, distance: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy against the acceptance chance 1 - L1 / 2, weighted. All [N] -> scalar."""
    wanted = (1 - distance / 2).clamp(0, 1)
    losses = F.binary_cross_entropy_with_logits(logits.float(), wanted, reduction="none")
    return (losses * weights).sum()
