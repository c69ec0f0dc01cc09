"""The ops that a model runs where nothing may wait for the host, in one value.

Two forms with the same signatures: plain torch, which runs anywhere and is the reference, and
Triton's. A model that is given neither runs the CPU's own path, which plans on the host. Must not
know models; loads Triton only when its form is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from emberline.batch import DrawnBlock
from emberline.ops import gated, linear, look_up, norm, paged_attention, place_qkv
from emberline.ops.gated import Activation
from emberline.ops.linear import Linear, Stream


@dataclass(frozen=True, slots=True)
class Kernels:
    """One form of the ops. Each field is the op of that name: see there for what it takes.

    The two last have no plain form here: a drafter's own loop over `sampling.keys.draw` is theirs.
    """

    look_up: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor, Activation], Tensor]
    linear: Callable[[Tensor, Linear], Tensor]
    norm_linear: Callable[[Stream, Tensor, float, Linear], tuple[Tensor, Tensor]]
    norm_gated: Callable[[Stream, Tensor, float, Linear, Activation], tuple[Tensor, Tensor]]
    linear_add: Callable[[Tensor, Linear, Tensor, Tensor | None], Stream]
    place_qkv: Callable[..., Tensor]
    place_context: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    block_attention: Callable[..., Tensor]
    draw: Callable[..., tuple[Tensor, Tensor]] | None  # ops/triton/draws.py
    markov_walk: Callable[..., DrawnBlock] | None  # ops/triton/walk.py
    fixed_order: bool
    """A row's result then depends on that row alone, bit for bit (batch-invariant mode)."""


def plain_kernels(*, fixed_order: bool = False) -> Kernels:
    """Plain torch on any device."""
    return Kernels(
        look_up=look_up.look_up,
        add_rms_norm=norm.add_rms_norm,
        gated=gated.gated,
        linear=linear.linear,
        norm_linear=linear.norm_linear,
        norm_gated=linear.norm_gated,
        linear_add=linear.linear_add,
        place_qkv=place_qkv.place_qkv,
        place_context=place_qkv.place_context,
        paged_attention=paged_attention.paged_attention,
        block_attention=paged_attention.block_attention,
        draw=None,
        markov_walk=None,
        fixed_order=fixed_order,
    )


def triton_kernels(*, fixed_order: bool = False) -> Kernels:
    """Triton's kernels. With them a step can be captured in a CUDA graph."""
    from emberline.ops.triton import (
        draws,
        gated,
        linear,
        look_up,
        norm,
        paged_attention,
        place_qkv,
        walk,
    )

    return Kernels(
        look_up=look_up.look_up,
        add_rms_norm=norm.add_rms_norm,
        gated=gated.gated,
        linear=partial(linear.linear, fixed_order=fixed_order),
        norm_linear=partial(linear.norm_linear, fixed_order=fixed_order),
        norm_gated=partial(linear.norm_gated, fixed_order=fixed_order),
        linear_add=partial(linear.linear_add, fixed_order=fixed_order),
        place_qkv=place_qkv.place_qkv,
        place_context=place_qkv.place_context,
        paged_attention=paged_attention.paged_attention,
        block_attention=paged_attention.block_attention,
        draw=draws.draw,
        markov_walk=walk.markov_walk,
        fixed_order=fixed_order,
    )


def kernels_for(device: str, *, batch_invariant: bool) -> Kernels | None:
    """What models on a torch device run with; None on a CPU, whose own path is faster there.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        batch_invariant: kernels of fixed order. A CPU's results never depend on the batch.
    """
    if device == "cpu":
        return None
    return triton_kernels(fixed_order=batch_invariant)
