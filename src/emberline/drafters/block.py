"""The block backbone: a small transformer that reads the target's context and runs once a block.

Owns the draft's own KV and everything up to the hidden states of a block's slots. It must not
know how tokens are drawn from those states: that is what the algorithms on top differ in.
Architecture: DFlash (block diffusion drafting), taken over by DSpark; layers as in Qwen3, or as in
Gemma 4 where `BlockStyle` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.batch import CommittedTokens, KVSpec
from emberline.cache.kv_pool import KVPool
from emberline.drafters.context_kv import ContextKV
from emberline.drafters.tables import EmbedFn
from emberline.models.rotary import RopeTable
from emberline.models.weights import Weights
from emberline.ops.norm import rms_norm
from emberline.ops.rotary import rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class BlockStyle:
    """How a layer computes, where families differ. The defaults are Qwen3's."""

    activation: str = "silu"  # a key of `ACTIVATIONS`
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    values_are_keys: bool = False  # no v_proj: values are what k_proj gives, before its norm
    norm_values: bool = False  # values are normalised, without a weight
    sandwich_norms: bool = False  # attention and MLP have a norm behind as well as before
    layer_scalar: bool = False  # a layer's output is scaled by a number of its own


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Geometry of a block draft, from its config file alone."""

    algorithm: str  # name of the drafter's class in `emberline.drafters.DRAFTERS`
    vocab_size: int | None  # V, the target's; None if the file does not say
    hidden_size: int  # D, the target's as well
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeTable
    attention_bias: bool
    block_size: int  # slots that see each other, the anchor's included
    anchor_predicts: bool  # True: slot k predicts anchor + k + 1; False: slot j predicts anchor + j
    mask_token_id: int
    taps: tuple[int, ...]  # target layers (0-based) whose output is the context; -1 = embeddings
    num_target_layers: int | None  # depth of the target it was trained for, where stated
    markov_rank: int  # as the config states it; 0 = no sequential head
    has_confidence: bool  # as the config states it
    style: BlockStyle = BlockStyle()
    embed_scale: float = 1.0  # of its own embedding
    logit_softcap: float | None = None  # of its own head: tanh(logits / cap) * cap

    @property
    def max_draft_tokens(self) -> int:
        """K, the most drafts a block yields."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def kv_spec(self) -> KVSpec:
        """KV that the draft keeps in the target's pages."""
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """Weights of one draft layer. G = (query + key heads), merged where one matmul serves."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, D]
    qkv_bias: Tensor | None
    qk_norm: Tensor  # [heads + kv_heads, head_dim]: one weight a head, q then k
    out: Tensor  # [D, heads * head_dim]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2 * intermediate, D]
    down: Tensor  # [D, intermediate]
    after_attention: Tensor | None  # [D], norm of what attention adds
    after_mlp: Tensor | None  # [D], norm of what the MLP adds
    scalar: Tensor | None  # [1]


@dataclass(frozen=True, slots=True)
class ContextWeights:
    """Weights that turn tapped target states into keys and values of every layer at once.

    Rows of `kv` repeat what `BlockLayer.qkv` holds: a few per cent of memory for one matmul.
    """

    fc: Tensor  # [D, A]
    norm: Tensor  # [D]
    kv: Tensor  # [num_layers * 2 * kv_heads * head_dim, D]
    kv_bias: Tensor | None
    k_norm: Tensor  # [num_layers, 1, head_dim]


class BlockBackbone:
    """Context-KV injection and the bidirectional block forward.

    Args:
        config: the draft's geometry.
        weights: tensors under their DeepSpec names; those of the backbone are taken.
        embed: input embeddings, [...] int64 -> [..., D].
        min_rows: rows below which a linear's sums may depend on the row count (`Target.min_rows`);
            a block is padded to that many slots, so that its result ignores its neighbours.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: Weights,
        *,
        embed: EmbedFn,
        dtype: torch.dtype,
        device: str,
        num_pages: int,
        page_size: int,
        min_rows: int = 1,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._embed = embed
        self._min_rows = min_rows
        self._width = max(config.block_size, min_rows)

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(name, shape).to(device=device, dtype=dtype)

        self._layers = [_layer(config, take, f"layers.{i}.") for i in range(config.num_layers)]
        self._context = _context(config, take, self._layers)
        self._norm = take("norm.weight", config.hidden_size)
        self._activation = ACTIVATIONS[config.style.activation]
        ones = torch.ones(config.head_dim, dtype=dtype, device=device)
        self._value_norm = ones if config.style.norm_values else None
        self.kv_pool = KVPool.allocate(config.kv_spec, num_pages, page_size, dtype, device)
        self._rope = config.rope.to(device)

    def observe(self, committed: CommittedTokens) -> None:
        """Write the keys and values of committed tokens at their slots.

        A token's context entry is `hidden_norm(fc(taps))`; it goes through each layer's k_proj,
        k_norm and RoPE (at the token's position) and v_proj, without `input_layernorm`.
        """
        if committed.taps is None:
            raise ValueError("a block draft needs the target's taps, but the target returned none")
        config, context = self.config, self._context
        count = committed.taps.shape[0]
        if count == 0:
            return
        taps = committed.taps.to(self.dtype)
        if count < self._min_rows:
            taps = F.pad(taps, (0, 0, 0, self._min_rows - count))
        entries = rms_norm(F.linear(taps, context.fc), context.norm, config.rms_norm_eps)
        flat = F.linear(entries, context.kv, context.kv_bias)[:count]
        kv = flat.view(count, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        keys = rms_norm(kv[:, :, 0], context.k_norm, config.rms_norm_eps)
        keys = rotate(keys.flatten(1, 2), *self._rope.cos_sin(committed.positions, self.dtype))
        keys = keys.view(count, config.num_layers, config.num_kv_heads, config.head_dim)
        values = self._values(kv[:, :, 1])
        for layer in range(config.num_layers):
            self.kv_pool.write(layer, committed.slot_mapping, keys[:, layer], values[:, layer])

    def forward(self, anchors: Tensor, positions: Tensor, page_table: Tensor) -> Tensor:
        """Run one block a request: [anchor, mask, mask, ...] from the anchor's position on.

        Args:
            anchors: [B] int64, last committed tokens.
            positions: [B] int64, their positions; context of every earlier one is in the pages.
            page_table: [B, M] int64.

        Returns:
            [B, K, D] normed hidden states of the predicting slots: entry k is of position
            anchor + k + 1.
        """
        config, width = self.config, self._width
        token_ids = anchors.new_full((anchors.shape[0], width), config.mask_token_id)
        token_ids[:, 0] = anchors
        x = self._embed(token_ids).to(self.dtype).flatten(0, 1)
        steps = torch.arange(width, device=positions.device)
        cos, signed_sin = self._rope.cos_sin((positions[:, None] + steps).flatten(), self.dtype)
        context = ContextKV.gather(self.kv_pool, page_table, positions, width)
        mask = context.mask(config.block_size, self.dtype)  # all slots of a block see the same
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            keys, values = context.keys[index], context.values[index]
            mixed = self._attend(layer, normed, cos, signed_sin, keys, values, mask)
            x = x + self._added(mixed, layer.after_attention)
            normed = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            mixed = F.linear(self._activation(gate) * up, layer.down)
            x = x + self._added(mixed, layer.after_mlp)
            if layer.scalar is not None:
                x = x * layer.scalar
        hidden = rms_norm(x, self._norm, config.rms_norm_eps).view(-1, width, config.hidden_size)
        first = 0 if config.anchor_predicts else 1
        return hidden[:, first : config.block_size]

    def _added(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm, self.config.rms_norm_eps)

    def _values(self, values: Tensor) -> Tensor:
        if self._value_norm is None:
            return values
        return rms_norm(values, self._value_norm, self.config.rms_norm_eps)

    def _attend(
        self,
        layer: BlockLayer,
        x: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Attention of one layer, [B * width, D] -> [B * width, D]."""
        config, width = self.config, self._width
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        qk = rms_norm(qkv[:, : heads + kv_heads], layer.qk_norm, config.rms_norm_eps)
        qk = rotate(qk, cos, signed_sin).view(-1, width, heads + kv_heads, head_dim)
        keys[:, :width] = qk[:, :, heads:]
        fresh = self._values(qkv[:, heads + kv_heads :])
        values[:, :width] = fresh.view(-1, width, kv_heads, head_dim)
        # The mask does not depend on the query, so the heads that share a key head become rows.
        group = heads // kv_heads
        query = qk[:, :, :heads].reshape(-1, width, kv_heads, group, head_dim)
        query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(
            query,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=config.style.attention_scale,
        )
        mixed = mixed.reshape(-1, kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4)
        return F.linear(mixed.reshape(-1, heads * head_dim), layer.out, layer.out_bias)


def _layer(config: DraftConfig, take: Callable[..., Tensor], prefix: str) -> BlockLayer:
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
        qkv=torch.cat([take(f"{attention}{n}.weight", s, hidden) for n, s in sizes]),
        qkv_bias=torch.cat([take(f"{attention}{n}.bias", s) for n, s in sizes]) if bias else None,
        qk_norm=torch.cat(
            [
                take(attention + "q_norm.weight", dim).expand(heads, dim),
                take(attention + "k_norm.weight", dim).expand(kv_heads, dim),
            ]
        ),
        out=take(attention + "o_proj.weight", hidden, heads * dim),
        out_bias=take(attention + "o_proj.bias", hidden) if bias else None,
        # With norms behind, "post_attention" is the one behind attention, else the MLP's own.
        mlp_norm=norm("pre_feedforward" if sandwich else "post_attention"),
        gate_up=torch.cat(
            [take(f"{prefix}mlp.{n}.weight", wide, hidden) for n in ("gate_proj", "up_proj")]
        ),
        down=take(prefix + "mlp.down_proj.weight", hidden, wide),
        after_attention=norm("post_attention") if sandwich else None,
        after_mlp=norm("post_feedforward") if sandwich else None,
        scalar=take(prefix + "layer_scalar", 1) if style.layer_scalar else None,
    )


def _context(
    config: DraftConfig, take: Callable[..., Tensor], layers: list[BlockLayer]
) -> ContextWeights:
    hidden, first = config.hidden_size, config.num_heads * config.head_dim
    biases = [layer.qkv_bias[first:] for layer in layers if layer.qkv_bias is not None]
    return ContextWeights(
        fc=take("fc.weight", hidden, len(config.taps) * hidden),
        norm=take("hidden_norm.weight", hidden),
        kv=torch.cat([layer.qkv[first:] for layer in layers]),
        kv_bias=torch.cat(biases) if biases else None,
        k_norm=torch.stack([layer.qk_norm[-1:] for layer in layers]),
    )
