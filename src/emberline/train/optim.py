"""Muon, and which parameters it takes.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest semi-orthogonal matrix, found
with Newton-Schulz steps; matrices of one shape are done in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from emberline.train.config import OptimConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: singular values land near 1. [B, m, n]."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov momentum whose update is orthogonalised. 2-D parameters only."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply one update to every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, members in by_shape.items():
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                updates = [self._momentum(member, group["momentum"]) for member in members]
                for member, update in zip(
                    members, orthogonalise(torch.stack(updates)), strict=True
                ):
                    member.sub_(update, alpha=scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        gradient = parameter.grad
        assert gradient is not None
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def make_optimisers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of backbone and `fc`, AdamW without decay for everything else."""
    muon: list[nn.Parameter] = []
    adam: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and name.startswith(("layers.", "fc."))
        (muon if matrix else adam).append(parameter)
    fused = any(parameter.is_cuda for parameter in adam)
    return [
        Muon(muon, config.muon_lr, config.muon_momentum),
        torch.optim.AdamW(adam, config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


def rate_at(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rates: linear warm-up, then half a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
