"""The block backbone where nothing may wait for the host: what a captured step runs.

No launch and no shape depends on a value; the lengths of the context are read on the device. Must
not know how tokens are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.cache.kv_pool import KVPool
from emberline.drafters.block_config import DraftConfig
from emberline.drafters.block_weights import BlockWeights
from emberline.drafters.tables import EmbedFn
from emberline.ops.kernels import Kernels
from emberline.ops.linear import Linear, Stream
from emberline.ops.paged_attention import PagedContext


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """A backbone's weights and pages with the ops that run over them."""

    kernels: Kernels
    config: DraftConfig
    weights: BlockWeights
    kv_pool: KVPool
    rope: Tensor  # [L, 2, head_dim]: see `RopeTable.tabulate`
    embed: EmbedFn
    head_norms: tuple[Tensor, ...]  # by layer: [h, head_dim] of the first h heads of its `qkv`
    context_norm: Tensor  # [num_layers, h, head_dim] of the first h heads of a context entry
    masks: Tensor  # [1, W - 1] int64, the mask's id
    steps: Tensor  # [W] int64, 0, 1, ...

    @classmethod
    def prepare(
        cls,
        kernels: Kernels,
        config: DraftConfig,
        weights: BlockWeights,
        kv_pool: KVPool,
        rope: Tensor,
        embed: EmbedFn,
    ) -> BlockKernels:
        """Make what every step will read."""
        kv_heads, ones = config.num_kv_heads, weights.value_norm
        head_norms = [layer.qk_norm for layer in weights.layers]
        context_norm = weights.context.k_norm.expand(-1, kv_heads, -1)
        if ones is not None:  # values are normalised as well, without a weight
            values = ones.expand(kv_heads, -1)
            head_norms = [torch.cat((norm, values)) for norm in head_norms]
            rows = values.expand(config.num_layers, -1, -1)
            context_norm = torch.cat((context_norm, rows), dim=1)
        steps = torch.arange(config.block_size, device=weights.norm.device)
        masks = torch.full_like(steps[None, 1:], config.mask_token_id)
        return cls(
            kernels, config, weights, kv_pool, rope, embed,
            tuple(head_norms), context_norm.contiguous(), masks, steps,
        )  # fmt: skip

    def follow(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """Write the context of [T] tokens at their slots: see `BlockBackbone.observe`."""
        config, context, kernels = self.config, self.weights.context, self.kernels
        eps = config.rms_norm_eps
        joined = kernels.linear(taps.to(self.weights.norm.dtype), context.fc)
        _, kv = kernels.norm_linear(Stream(joined), context.norm, eps, context.kv)
        kernels.place_context(
            kv.view(len(taps), config.num_layers, 2 * config.num_kv_heads, config.head_dim),
            *kernels.look_up(self.rope, positions).unbind(1),
            self.kv_pool.keys, self.kv_pool.values, slot_mapping,
            norm=self.context_norm, eps=eps,
        )  # fmt: skip

    def forward(self, anchors: Tensor, positions: Tensor, page_table: Tensor) -> Tensor:
        """Hidden states [B, K, D] of a block a request: see `BlockBackbone.forward`."""
        config, weights, kernels = self.config, self.weights, self.kernels
        reqs, width, eps = len(anchors), config.block_size, config.rms_norm_eps
        token_ids = torch.cat((anchors[:, None], self.masks.expand(reqs, -1)), dim=1)
        stream = Stream(self.embed(token_ids).to(weights.norm.dtype).flatten(0, 1))
        places = (positions[:, None] + self.steps).flatten()
        cos, signed_sin = kernels.look_up(self.rope, places).unbind(1)
        context = PagedContext(positions, page_table, self.kv_pool.page_size, kernels.fixed_order)
        # Every layer writes them anew: attention of the one before has read them by then.
        block = stream.x.new_empty(2, reqs * width, config.num_kv_heads, config.head_dim)
        scale = config.style.attention_scale or config.head_dim**-0.5
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, layer in enumerate(weights.layers):
            x, qkv = kernels.norm_linear(stream, layer.input_norm, eps, layer.qkv)
            q = kernels.place_qkv(
                qkv, cos, signed_sin, *block, None, norm=self.head_norms[index], eps=eps
            )
            keys, values = self.kv_pool.keys[index], self.kv_pool.values[index]
            mixed = kernels.block_attention(q, *block, keys, values, context, scale=scale)
            stream = self._add(mixed, layer.out, layer.after_attention, x, layer.mlp_norm)
            x, wide = kernels.norm_gated(
                stream, layer.mlp_norm, eps, layer.gate_up, config.style.activation
            )
            # A stream that is scaled as a whole is not the one that the next norm is begun of.
            coming = next_norms[index] if layer.scalar is None else None
            stream = self._add(wide, layer.down, layer.after_mlp, x, coming)
            if layer.scalar is not None:
                x, update = stream.x, stream.update
                stream = Stream((x if update is None else x + update) * layer.scalar)
        _, hidden = kernels.add_rms_norm(stream.x, stream.update, weights.norm, eps)
        first = 0 if config.anchor_predicts else 1
        return hidden.view(reqs, width, -1)[:, first:]

    def _add(
        self, y: Tensor, linear: Linear, norm: Tensor | None, x: Tensor, coming: Tensor | None
    ) -> Stream:
        """Update the residual stream by a map of `y`, normalised where the style says so.

        `coming`: weights of the norm that comes next.
        """
        if norm is None:
            return self.kernels.linear_add(y, linear, x, coming)
        mapped = self.kernels.linear(y, linear)
        return Stream(x, self.kernels.add_rms_norm(mapped, None, norm, self.config.rms_norm_eps)[1])
