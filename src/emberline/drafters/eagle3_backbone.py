"""EAGLE-3's decoder layers: one entry a token, made of the state before it and the token itself.

Owns the draft's weights, its KV and the state it hands from step to step. It must not know how
tokens are drawn from those states, nor any checkpoint dialect.

Entry t joins the embedding of token t + 1 with a hidden state of position t, stands at position t,
and its output predicts token t + 2. For committed tokens that hidden state is the target's (its
tapped layers, fused); for a token just drafted it is the output of the entry before it. Li et al.
2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.batch import CommittedTokens, KVSpec
from emberline.cache.kv_pool import KVPool
from emberline.drafters.context_kv import ContextKV
from emberline.drafters.tables import EmbedFn
from emberline.models.rotary import RopeTable
from emberline.models.weights import Weights
from emberline.ops.attention import attend, plan_attention
from emberline.ops.linear import Linear
from emberline.ops.norm import rms_norm
from emberline.ops.rotary import rotate

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, heads, head_dim], k and v [N, kv_heads, head_dim]) -> [N, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Geometry of an EAGLE-3 draft, from its config file alone."""

    vocab_size: int  # V, the target's
    draft_vocab_size: int  # columns of its own head; fewer than V need a map to the target's ids
    hidden_size: int  # D
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeTable
    attention_bias: bool
    taps: tuple[int, ...]  # target layers (0-based) that are fused
    num_target_layers: int | None  # depth of the target it was trained for, where stated
    max_draft_tokens: int  # K, the steps it was trained to take on its own output
    norm_before_residual: bool  # the first layer's residual is the normed hidden state
    norm_before_fc: bool  # one norm over all taps (`input_norm`)
    fc_norm: bool  # a norm for each tap (`fc_norm.{i}`)
    norm_output: bool  # the next step reads the output after the last norm, not before it

    @property
    def kv_spec(self) -> KVSpec:
        """KV that the draft keeps in the target's pages: an entry depends on the token after."""
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, lookahead=1)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [D], of the embedding in the first layer
    hidden_norm: Tensor | None  # [D], of the hidden state; the first layer only
    qkv: Linear  # D (2 D in the first layer) -> (heads + 2 kv_heads) * head_dim
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], a head's own norm each
    out: Linear
    post_norm: Tensor  # [D]
    gate_up: Linear  # D -> 2 intermediate
    down: Linear


@dataclass(frozen=True, slots=True)
class _Fusion:
    """fc(norms(taps)): the target's tapped layers as one hidden state."""

    whole_norm: Tensor | None  # [A]
    tap_norms: Tensor | None  # [taps, A / taps]
    fc: Linear  # A -> D
    eps: float

    def __call__(self, taps: Tensor) -> Tensor:
        """[N, A] -> [N, D]."""
        if self.whole_norm is not None:
            taps = rms_norm(taps, self.whole_norm, self.eps)
        if self.tap_norms is not None:
            parts = taps.view(taps.shape[0], *self.tap_norms.shape)
            taps = rms_norm(parts, self.tap_norms, self.eps).flatten(1)
        return self.fc(taps)


class Eagle3Backbone:
    """The fused context and the layers on it.

    Args:
        config: the draft's geometry.
        weights: tensors under their DeepSpec names; those of the backbone are taken. Whether there
            are norms of queries and keys the tensors say.
        embed: input embeddings, [...] int64 -> [..., D].
        tap_width: channels of one tapped layer.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Weights,
        *,
        embed: EmbedFn,
        tap_width: int,
        dtype: torch.dtype,
        device: str,
        num_pages: int,
        page_size: int,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._embed = embed
        loader = _Loader(config, weights, dtype, device)
        self._fusion = loader.fusion(tap_width)
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        self._norm = loader.take("norm.weight", config.hidden_size)
        self._rope = config.rope.to(device)
        self.kv_pool = KVPool.allocate(config.kv_spec, num_pages, page_size, dtype, device)
        # The last layer's output of every entry: a block begins with that of the anchor's. In the
        # pages, so that what the prefix cache restores can go on drafting.
        self._outputs = KVPool.allocate(
            KVSpec(1, 1, config.hidden_size), num_pages, page_size, dtype, device
        ).keys[0, :, 0]

    def observe(self, committed: CommittedTokens) -> None:
        """Write the entries of committed tokens: keys, values and outputs."""
        if committed.taps is None:
            raise ValueError("an EAGLE-3 draft needs the target's taps, but it returned none")
        if not committed.taps.shape[0]:
            return
        config, pool = self.config, self.kv_pool
        lens = committed.lens.tolist()
        ends = committed.positions[committed.lens.cumsum(0) - 1] + 1
        groups = plan_attention(
            lens,
            ends.tolist(),
            committed.page_table,
            pool.page_size,
            share=config.num_heads // config.num_kv_heads,
            sliding_window=None,
            dtype=self.dtype,
        )

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.write(layer, committed.slot_mapping, k, v)
            return attend(q, pool.keys[layer], pool.values[layer], groups, config.head_dim**-0.5)

        hidden = self._fusion(committed.taps.to(self.dtype))
        outputs = self._run(hidden, committed.following_ids, committed.positions, attention)
        self._outputs.index_copy_(0, committed.slot_mapping, outputs)

    def begin(self, positions: Tensor, page_table: Tensor) -> tuple[Tensor, ContextKV]:
        """Where blocks after anchors at `positions` [B] start.

        Returns:
            Outputs [B, D] of the entries before the anchors', which know the anchors; and the
            context, with room for the block's own entries.
        """
        last, size = positions - 1, self.kv_pool.page_size
        page = page_table.gather(1, (last // size)[:, None])[:, 0]
        outputs = self._outputs[page * size + last % size]
        # One width for every depth: how many drafts are drawn must not move the context's columns.
        lead = self.config.max_draft_tokens
        return outputs, ContextKV.gather(self.kv_pool, page_table, positions, lead)

    def normed(self, outputs: Tensor) -> Tensor:
        """What the head reads. [B, D] -> [B, D]."""
        return rms_norm(outputs, self._norm, self.config.rms_norm_eps)

    def step(
        self, index: int, outputs: Tensor, token_ids: Tensor, positions: Tensor, context: ContextKV
    ) -> Tensor:
        """The entry of a drafted token, which sees the context and the block's entries before it.

        Args:
            index: of the entry in its block, from 0 on.
            outputs: [B, D] of the entry before it.
            token_ids: [B] int64, the draft of slot `index`.
            positions: [B] int64, the entry's: one before its token's.
            context: of `begin`; its column `index` is written.

        Returns:
            [B, D] the entry's output.
        """
        config = self.config
        mask = context.mask(index + 1, self.dtype)
        group = config.num_heads // config.num_kv_heads

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = context.keys[layer], context.values[layer]
            keys[:, index] = k
            values[:, index] = v
            query = q.view(-1, config.num_kv_heads, group, config.head_dim)
            mixed = F.scaled_dot_product_attention(
                query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
            )
            return mixed.flatten(1)

        hidden = self.normed(outputs) if config.norm_output else outputs
        return self._run(hidden, token_ids, positions, attention)

    def _run(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """All layers: hidden states and the tokens after them to outputs. [N, D] -> [N, D]."""
        config, eps = self.config, self.config.rms_norm_eps
        cos, signed_sin = self._rope.cos_sin(positions, self.dtype)
        shape = (hidden.shape[0], -1, config.head_dim)
        num_qk, x = config.num_heads + config.num_kv_heads, hidden
        for index, layer in enumerate(self._layers):
            if layer.hidden_norm is None:
                read = rms_norm(x, layer.input_norm, eps)
            else:
                embedded = rms_norm(self._embed(token_ids).to(self.dtype), layer.input_norm, eps)
                normed = rms_norm(x, layer.hidden_norm, eps)
                x = normed if config.norm_before_residual else x
                read = torch.cat((embedded, normed), dim=-1)
            qkv = layer.qkv(read).view(shape)
            qk = qkv[:, :num_qk]
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, eps)
            qk = rotate(qk, cos, signed_sin)
            q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
            x = x + layer.out(attention(index, q, k, qkv[:, num_qk:]))
            gate, up = layer.gate_up(rms_norm(x, layer.post_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x


class _Loader:
    """DeepSpec's names of one draft, cast tensor by tensor."""

    def __init__(
        self, config: Eagle3Config, weights: Weights, dtype: torch.dtype, device: str
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(device=self._device, dtype=self._dtype)

    def linear(self, prefix: str, parts: dict[str, int], width: int, bias: bool = False) -> Linear:
        """One matrix of several projections that read the same input."""
        weight = torch.cat([self.take(f"{prefix}{p}.weight", n, width) for p, n in parts.items()])
        if not bias:
            return Linear.pack(weight)
        biases = [self.take(f"{prefix}{p}.bias", n) for p, n in parts.items()]
        return Linear.pack(weight, torch.cat(biases))

    def fusion(self, tap_width: int) -> _Fusion:
        config, count = self._config, len(self._config.taps)
        whole = tapped = None
        if config.norm_before_fc:
            whole = self.take("input_norm.weight", count * tap_width)
        if config.fc_norm:
            norms = [self.take(f"fc_norm.{i}.weight", tap_width) for i in range(count)]
            tapped = torch.stack(norms)
        fc = self.take("fc.weight", config.hidden_size, count * tap_width)
        return _Fusion(whole, tapped, Linear.pack(fc), config.rms_norm_eps)

    def layer(self, index: int) -> _Layer:
        c, at = self._config, f"layers.{index}."
        attention, mlp, d = f"{at}self_attn.", f"{at}mlp.", c.hidden_size
        q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        return _Layer(
            input_norm=self.take(f"{at}input_layernorm.weight", d),
            hidden_norm=self.take(f"{at}hidden_norm.weight", d) if index == 0 else None,
            qkv=self.linear(attention, qkv, d if index else 2 * d, c.attention_bias),
            qk_norm=self.qk_norm(attention),
            out=self.linear(attention, {"o_proj": d}, q_width, c.attention_bias),
            post_norm=self.take(f"{at}post_attention_layernorm.weight", d),
            gate_up=self.linear(mlp, gate_up, d),
            down=self.linear(mlp, {"down_proj": d}, c.intermediate_size),
        )

    def qk_norm(self, prefix: str) -> Tensor | None:
        if not self._weights.has(f"{prefix}q_norm.weight"):
            return None
        c = self._config
        q, k = (self.take(f"{prefix}{n}_norm.weight", c.head_dim) for n in "qk")
        return torch.cat((q.expand(c.num_heads, -1), k.expand(c.num_kv_heads, -1)))
