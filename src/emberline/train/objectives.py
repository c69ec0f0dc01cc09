"""The training losses, and a fused form that keeps few [rows, V] tensors alive.

    loss = ce * CE(q, label) + l1 * ||p - q||_1 + confidence * BCE(c, 1 - ||p - q||_1 / 2)

averaged over valid slots with weights exp(-k / decay); p is the target's distribution, q the
draft's (DSpark, training objective). 1 - ||p - q||_1 / 2 is the chance that a draft drawn from q
is accepted (Leviathan et al. 2023), so the L1 term is acceptance itself. EAGLE-3 has CE(q, p)
alone, with weights 0.8^k (Li et al. 2025): the term `soft_ce` here. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.train.target import soft_capped, wide_linear


def position_weights(valid: Tensor, factors: Sequence[float]) -> Tensor:
    """Each position's factor on valid slots, normalised to sum 1.

    valid [..., K] bool, K factors -> [..., K] float32.
    """
    weights = torch.tensor(factors, device=valid.device) * valid
    return weights / weights.sum().clamp(min=1e-8)


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of the terms that are computed on logits."""

    ce: float
    l1: float
    l1_sharp: float = 0.0  # of ||p' - q'||_1, both distributions at `sharp_temperature`
    sharp_temperature: float = 0.5
    soft_ce: float = 0.0  # of the cross-entropy against the target's distribution


class Rule(Protocol):
    """Losses of rows of logits, with their gradient: `loss_and_gradient`, or a faster form."""

    def __call__(
        self,
        draft_logits: Tensor,
        target_logits: Tensor,
        labels: Tensor,
        weights: Tensor,
        mix: Mix,
        dtype: torch.dtype,
    ) -> RowLosses:
        """See `loss_and_gradient`."""
        ...


class RowLosses(NamedTuple):
    """What a rule finds on N rows."""

    ce: Tensor  # [N] float32
    l1: Tensor  # [N] float32, of the distributions at temperature 1
    total: Tensor  # [N] float32, the mix of the terms
    gradient: Tensor  # [N, V] of `weights * total` in the draft's logits
    agree: Tensor  # [N] bool, both argmaxes are the same token
    hit: Tensor  # [N] bool, the draft's argmax is the label


def loss_and_gradient(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    mix: Mix,
    dtype: torch.dtype,
) -> RowLosses:
    """Losses of rows of logits, and the gradient in the draft's logits.

    With s = sign(q - p): dL1/dlogits = q (s - <q, s>); dCE/dlogits = q - onehot(label), or q - p
    against the target's distribution. At a temperature t the logits are divided by it, and so is
    the gradient.

    Args:
        draft_logits, target_logits: [N, V] float32.
        labels: [N] int64.
        weights: [N] float32, of the rows' gradients.
        mix: of the terms.
        dtype: of the gradient.
    """
    peak = draft_logits.amax(-1, keepdim=True)
    mass = torch.exp(draft_logits - peak).sum(-1, keepdim=True)
    q = torch.exp(draft_logits - peak) / mass
    distance, gradient = _distance(draft_logits, target_logits, 1.0)
    columns = torch.arange(q.shape[-1], device=q.device)
    hit = columns == labels[:, None]
    picked = torch.where(hit, draft_logits, 0.0).sum(-1)
    normaliser = (peak + mass.log()).squeeze(-1)
    cross_entropy = normaliser - picked
    total = mix.ce * cross_entropy + mix.l1 * distance
    gradient = mix.ce * (q - hit.to(q.dtype)) + mix.l1 * gradient
    if mix.l1_sharp:
        sharp, slope = _distance(draft_logits, target_logits, mix.sharp_temperature)
        total = total + mix.l1_sharp * sharp
        gradient = gradient + mix.l1_sharp * slope
    if mix.soft_ce:
        p = torch.softmax(target_logits, dim=-1)
        total = total + mix.soft_ce * (normaliser - (p * draft_logits).sum(-1))
        gradient = gradient + mix.soft_ce * (q - p)
    choice = draft_logits.argmax(-1)
    return RowLosses(
        cross_entropy,
        distance,
        total,
        (gradient * weights[:, None]).to(dtype),
        choice == target_logits.argmax(-1),
        choice == labels,
    )


def _distance(
    draft_logits: Tensor, target_logits: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """||p - q||_1 [N] at a temperature, and its gradient in the draft's logits [N, V]."""
    q = torch.softmax(draft_logits / temperature, dim=-1)
    difference = q - torch.softmax(target_logits / temperature, dim=-1)
    sign = torch.sign(difference)
    lean = (q * sign).sum(-1, keepdim=True)
    return difference.abs().sum(-1), q * (sign - lean) / temperature


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
        mix: Mix,
        chunk: int,
        rule: Rule,
        cap: float | None,
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
            target_logits = soft_capped(wide_linear(target_hidden[rows].to(dtype), head), cap)
            draft_logits, slope = _draft_logits(joined[rows], table, width, cap)
            found = rule(draft_logits, target_logits, labels[rows], weights[rows], mix, dtype)
            grad_joined[rows] = _pulled_back(found.gradient, table, width, slope)
            if grad_w2 is not None:
                grad_w2 += (found.gradient.t() @ joined[rows, width:]).to(grad_w2.dtype)
            parts.append((found.ce, found.l1, found.total, found.agree, found.hit))
        ce, l1, total, agree, hit = (torch.cat(column) for column in zip(*parts, strict=True))
        grad_hidden = grad_joined[:, :width].to(hidden.dtype)
        grad_latent = None if latent is None else grad_joined[:, width:].to(latent.dtype)
        ctx.save_for_backward(grad_hidden, grad_latent, grad_w2)
        ctx.mark_non_differentiable(ce, l1, agree, hit)
        loss = (weights * total).sum()
        return loss, ce, l1, agree, hit

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if t is None else t * grad_loss.to(t.dtype) for t in ctx.saved_tensors]
        return (*scaled, *[None] * 8)


def _draft_logits(
    joined: Tensor, table: Tensor, width: int, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Logits of [hidden | latent] rows, and the slope of the cap, which is on the head's alone."""
    if cap is None:
        return wide_linear(joined, table), None
    base = soft_capped(wide_linear(joined[:, :width], table[:, :width]), cap)
    slope = 1 - (base / cap).square()
    if joined.shape[1] > width:
        base = base + wide_linear(joined[:, width:], table[:, width:])
    return base, slope


def _pulled_back(gradient: Tensor, table: Tensor, width: int, slope: Tensor | None) -> Tensor:
    """A gradient in the draft's logits [N, V] as one in the [hidden | latent] rows."""
    if slope is None:
        return gradient @ table
    under = (gradient * slope).to(gradient.dtype) @ table[:, :width]
    return torch.cat((under, gradient @ table[:, width:]), dim=-1)


def fused_loss(
    hidden: Tensor,
    latent: Tensor | None,
    w2: Tensor | None,
    head: Tensor,
    target_hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    mix: Mix,
    chunk: int = 4096,
    rule: Rule = loss_and_gradient,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum of the terms on logits without ever holding the logits of all rows.

    The draft's logits are `hidden @ head.T + latent @ w2.T`, the target's `target_hidden @ head.T`;
    a cap bounds what comes from the head.

    Args:
        hidden: [N, D] draft states; latent: [N, r] and w2: [V, r] of the Markov head, or None.
        head: [V, D] frozen; its dtype is the dtype of the products.
        target_hidden: [N, D] the target's last hidden states, normed.
        labels: [N] int64; weights: [N], summing to 1; mix: of the terms.
        chunk: rows whose [rows, V] tensors exist at once.
        rule: `loss_and_gradient`, or a faster form of it.
        cap: c of logits that are c * tanh(x / c), or None.

    Returns:
        The loss, a differentiable scalar; per row and detached: CE [N], L1 [N], whether the
        argmaxes of draft and target agree [N], whether the draft's argmax is the label [N].
    """
    return _FusedLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, latent, w2, head, target_hidden, labels, weights, mix, chunk, rule, cap
    )


def confidence_loss(logits: Tensor, distance: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy against the acceptance chance 1 - L1 / 2, weighted. All [N] -> scalar."""
    wanted = (1 - distance / 2).clamp(0, 1)
    losses = F.binary_cross_entropy_with_logits(logits.float(), wanted, reduction="none")
    return (losses * weights).sum()
