"""Weights of the block backbone: DeepSpec's names to merged matrices.

Must not know how anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.drafters.block_config import DraftConfig
from emberline.models.weights import Weights
from emberline.ops.linear import Linear

Take = Callable[..., Tensor]  # a name and its shape -> the tensor


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """Weights of one draft layer, merged where one product serves."""

    input_norm: Tensor  # [D]
    qkv: Linear  # D -> (heads + 2 * kv_heads) * head_dim
    qk_norm: Tensor  # [heads + kv_heads, head_dim]: one weight a head, q then k
    out: Linear  # heads * head_dim -> D
    mlp_norm: Tensor  # [D]
    gate_up: Linear  # D -> 2 * intermediate
    down: Linear  # intermediate -> D
    after_attention: Tensor | None  # [D], norm of what attention adds
    after_mlp: Tensor | None  # [D], norm of what the MLP adds
    scalar: Tensor | None  # [1]


@dataclass(frozen=True, slots=True)
class ContextWeights:
    """Weights that turn tapped target states into keys and values of every layer at once.

    Rows of `kv` repeat what `BlockLayer.qkv` holds: a few per cent of memory for one matmul.
    """

    fc: Linear  # A -> D
    norm: Tensor  # [D]
    kv: Linear  # D -> num_layers * 2 * kv_heads * head_dim
    k_norm: Tensor  # [num_layers, 1, head_dim]


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of a backbone."""

    layers: tuple[BlockLayer, ...]
    context: ContextWeights
    norm: Tensor  # [D]
    value_norm: Tensor | None  # [head_dim] of ones, where values are normalised

    @classmethod
    def take(
        cls, config: DraftConfig, weights: Weights, dtype: torch.dtype, device: str
    ) -> BlockWeights:
        """Take the backbone's tensors out of a checkpoint's.

        Raises:
            ModelError: one is missing or misshapen.
        """

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(name, shape).to(device=device, dtype=dtype)

        layers = tuple(_layer(config, take, f"layers.{i}.") for i in range(config.num_layers))
        ones = torch.ones(config.head_dim, dtype=dtype, device=device)
        return cls(
            layers,
            _context(config, take, layers),
            take("norm.weight", config.hidden_size),
            ones if config.style.norm_values else None,
        )


def _layer(config: DraftConfig, take: Take, prefix: str) -> BlockLayer:
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads, style = config.num_heads, config.num_kv_heads, config.style
    attention = prefix + "self_attn."
    values = "k_proj" if style.values_are_keys else "v_proj"
    sizes = (("q_proj", heads * dim), ("k_proj", kv_heads * dim), (values, kv_heads * dim))
    bias = config.attention_bias

    def norm(name: str) -> Tensor:
        return take(f"{prefix}{name}_layernorm.weight", hidden)

    sandwich = style.sandwich_norms
    return BlockLayer(
        input_norm=norm("input"),
        qkv=Linear(
            torch.cat([take(f"{attention}{n}.weight", s, hidden) for n, s in sizes]),
            torch.cat([take(f"{attention}{n}.bias", s) for n, s in sizes]) if bias else None,
        ),
        qk_norm=torch.cat(
            [
                take(attention + "q_norm.weight", dim).expand(heads, dim),
                take(attention + "k_norm.weight", dim).expand(kv_heads, dim),
            ]
        ),
        out=Linear(
            take(attention + "o_proj.weight", hidden, heads * dim),
            take(attention + "o_proj.bias", hidden) if bias else None,
        ),
        # With norms behind, "post_attention" is the one behind attention, else the MLP's own.
        mlp_norm=norm("pre_feedforward" if sandwich else "post_attention"),
        gate_up=Linear(
            torch.cat(
                [take(f"{prefix}mlp.{n}.weight", wide, hidden) for n in ("gate_proj", "up_proj")]
            ),
            None,
        ),
        down=Linear(take(prefix + "mlp.down_proj.weight", hidden, wide), None),
        after_attention=norm("post_attention") if sandwich else None,
        after_mlp=norm("post_feedforward") if sandwich else None,
        scalar=take(prefix + "layer_scalar", 1) if style.layer_scalar else None,
    )


def _context(config: DraftConfig, take: Take, layers: Sequence[BlockLayer]) -> ContextWeights:
    hidden, first = config.hidden_size, config.num_heads * config.head_dim
    biases = [layer.qkv.bias[first:] for layer in layers if layer.qkv.bias is not None]
    return ContextWeights(
        fc=Linear(take("fc.weight", hidden, len(config.taps) * hidden), None),
        norm=take("hidden_norm.weight", hidden),
        kv=Linear(
            torch.cat([layer.qkv.weight[first:] for layer in layers]),
            torch.cat(biases) if biases else None,
        ),
        k_norm=torch.stack([layer.qk_norm[-1:] for layer in layers]),
    )
