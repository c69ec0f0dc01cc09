"""The fused decoder's weights: checkpoint names to merged matrices.

Owns the names and the merging. Must not know pages, layouts or how anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.models.decoder_config import DecoderConfig
from emberline.models.weights import ModelError, Weights
from emberline.ops.linear import Linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: Tensor  # [D]
    qkv: Linear  # D -> (num_heads + 2 num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], a head's own norm each
    out: Linear
    post_norm: Tensor  # [D]
    gate_up: Linear  # D -> 2 intermediate
    down: Linear
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a model."""

    embedding: Tensor  # [V, D]
    layers: tuple[DecoderLayer, ...]
    norm: Tensor  # [D]
    head: Linear  # D -> V

    @classmethod
    def take(
        cls, config: DecoderConfig, weights: Weights, dtype: torch.dtype, device: str, pack: bool
    ) -> DecoderWeights:
        """Take a model's tensors out of its checkpoint's.

        Args:
            config: of the checkpoint.
            weights: its tensors.
            dtype: what they become.
            device: where they go.
            pack: bring matrices into the order of the CPU's library, which kernels cannot read.

        Raises:
            ModelError: one is missing, misshapen or left over.
        """
        loader = _Loader(config, weights, dtype, device, Linear.pack if pack else Linear)
        embedding = loader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = tuple(loader.layer(i) for i in range(config.num_layers))
        norm = loader.take("model.norm.weight", config.hidden_size)
        head = loader.make(loader.head(embedding), None)
        weights.finish(allow=("*rotary_emb.inv_freq",))
        return cls(embedding, layers, norm, head)


class _Loader:
    """Checkpoint names of one model, cast tensor by tensor."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: str,
        make: Callable[[Tensor, Tensor | None], Linear],
    ) -> None:
        self.make = make
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(device=self._device, dtype=self._dtype)

    def linear(self, prefix: str, parts: dict[str, int], width: int, bias: bool) -> Linear:
        """One matrix of several projections that read the same input."""
        weight = torch.cat([self.take(f"{prefix}{p}.weight", n, width) for p, n in parts.items()])
        if not bias:
            return self.make(weight, None)
        return self.make(
            weight, torch.cat([self.take(f"{prefix}{p}.bias", n) for p, n in parts.items()])
        )

    def qk_norm(self, prefix: str) -> Tensor:
        c = self._config
        q, k = (self.take(f"{prefix}{n}_norm.weight", c.head_dim) for n in "qk")
        return torch.cat((q.expand(c.num_heads, -1), k.expand(c.num_kv_heads, -1)))

    def head(self, embedding: Tensor) -> Tensor:
        c, name = self._config, "lm_head.weight"
        if c.tied_embeddings:
            # Some exporters keep a copy of the embedding under the head's name.
            if self._weights.has(name) and not torch.equal(
                self.take(name, c.vocab_size, c.hidden_size), embedding
            ):
                raise ModelError(
                    f"{self._weights.source}: the config ties head and embedding, "
                    "but the checkpoint holds two different tensors"
                )
            return embedding
        return self.take(name, c.vocab_size, c.hidden_size)

    def layer(self, index: int) -> DecoderLayer:
        c, at = self._config, f"model.layers.{index}."
        kv_width, width = c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim
        qkv = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        attn, mlp, d = f"{at}self_attn.", f"{at}mlp.", c.hidden_size
        return DecoderLayer(
            input_norm=self.take(f"{at}input_layernorm.weight", d),
            qkv=self.linear(attn, qkv, d, c.qkv_bias),
            qk_norm=self.qk_norm(attn) if c.qk_norm else None,
            out=self.linear(attn, {"o_proj": d}, width, c.out_bias),
            post_norm=self.take(f"{at}post_attention_layernorm.weight", d),
            gate_up=self.linear(mlp, gate_up, d, c.mlp_bias),
            down=self.linear(mlp, {"down_proj": d}, c.intermediate_size, c.mlp_bias),
            sliding_window=c.sliding_windows[index],
        )
