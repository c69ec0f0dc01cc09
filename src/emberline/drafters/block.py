"""The block backbone: a small transformer that reads the target's context and runs once a block.

Owns the draft's own KV and everything up to the hidden states of a block's slots. There are two
ways to them: the CPU's, and `block_kernels.py`. It must not know how tokens are drawn from those
states: that is what the algorithms on top differ in. Architecture: DFlash (block diffusion
drafting), taken over by DSpark; layers as in Qwen3, or as in Gemma 4 where `BlockStyle` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.batch import CommittedTokens
from emberline.cache.kv_pool import KVPool
from emberline.drafters.backlog import Backlog, ContextRows
from emberline.drafters.block_config import DraftConfig
from emberline.drafters.block_kernels import BlockKernels
from emberline.drafters.block_weights import BlockLayer, BlockWeights
from emberline.drafters.context_kv import ContextKV
from emberline.drafters.tables import EmbedFn
from emberline.layout import in_granules
from emberline.models.weights import Weights
from emberline.ops.gated import gated
from emberline.ops.kernels import Kernels
from emberline.ops.norm import rms_norm
from emberline.ops.rotary import rotate


class BlockBackbone:
    """Context-KV injection and the bidirectional block forward.

    Args:
        config: the draft's geometry.
        weights: tensors under their DeepSpec names; those of the backbone are taken.
        embed: input embeddings, [...] int64 -> [..., D].
        row_granule: of rows (`Target.row_granule`). A block is padded to whole granules of slots,
            so that its result ignores its neighbours.
        max_model_len: of the target, in tokens.
        kernels: the ops of a form that never waits for the host; None for the CPU's own.
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
        row_granule: int = 1,
        max_model_len: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        self._embed = embed
        self._row_granule = row_granule
        self._width = in_granules(config.block_size, row_granule)
        self._weights = BlockWeights.take(config, weights, dtype, device)
        self._kv_pool = KVPool.allocate(config.kv_spec, num_pages, page_size, dtype, device)
        self._backlog = Backlog(self._write_context)
        self._rope = config.rope.to(device)
        self._fast: BlockKernels | None = None
        if kernels is not None:
            rope = self._rope.tabulate(max_model_len + config.block_size, dtype)
            self._fast = BlockKernels.prepare(
                kernels, config, self._weights, self._kv_pool, rope, embed
            )

    @property
    def kv_pool(self) -> KVPool:
        """Keys and values of everything that was observed."""
        self._backlog.settle()
        return self._kv_pool

    def observe(self, committed: CommittedTokens) -> None:
        """Write the keys and values of committed tokens at their slots, before anybody reads them.

        A token's context entry is `hidden_norm(fc(taps))`; it goes through each layer's k_proj,
        k_norm and RoPE (at the token's position) and v_proj, without `input_layernorm`.
        """
        if committed.taps is None:
            raise ValueError("a block draft needs the target's taps, but the target returned none")
        if self._fast is not None:
            self._fast.follow(committed.taps, committed.positions, committed.slot_mapping)
            return
        rows = ContextRows(committed.taps, committed.positions, committed.slot_mapping)
        self._backlog.add(rows)

    def _write_context(self, rows: ContextRows) -> None:
        config, context, count = self.config, self._weights.context, len(rows.slots)
        taps = rows.taps.to(self.dtype)
        taps = F.pad(taps, (0, 0, 0, in_granules(count, self._row_granule) - count))
        entries = rms_norm(context.fc(taps), context.norm, config.rms_norm_eps)
        # The request may have broken, and its pages may have been cleared and given up, by now:
        # they must stay finite (`KVPool.clear`).
        flat = context.kv(entries)[:count].nan_to_num(0.0, 0.0, 0.0)
        kv = flat.view(count, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        keys = rms_norm(kv[:, :, 0], context.k_norm, config.rms_norm_eps)
        keys = rotate(keys.flatten(1, 2), *self._rope.cos_sin(rows.positions, self.dtype))
        keys = keys.view(count, config.num_layers, config.num_kv_heads, config.head_dim)
        values = self._values(kv[:, :, 1])
        for layer in range(config.num_layers):
            self._kv_pool.write(layer, rows.slots, keys[:, layer], values[:, layer])

    def follow(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """`observe` of bare tensors, which a graph can capture: see `drafters.base.Capturable`."""
        self.fast.follow(taps, positions, slot_mapping)

    @property
    def fast(self) -> BlockKernels:
        """The form with kernels.

        Raises:
            ValueError: it was loaded without any.
        """
        if self._fast is None:
            raise ValueError(
                "a block that a graph captures needs kernels: load the draft with them"
            )
        return self._fast

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
        if self._fast is not None:
            return self._fast.forward(anchors, positions, page_table)
        config, width = self.config, self._width
        token_ids = anchors.new_full((anchors.shape[0], width), config.mask_token_id)
        token_ids[:, 0] = anchors
        x = self._embed(token_ids).to(self.dtype).flatten(0, 1)
        steps = torch.arange(width, device=positions.device)
        cos, signed_sin = self._rope.cos_sin((positions[:, None] + steps).flatten(), self.dtype)
        context = ContextKV.gather(self.kv_pool, page_table, positions, width)
        mask = context.mask(config.block_size, self.dtype)  # all slots of a block see the same
        for index, layer in enumerate(self._weights.layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            keys, values = context.keys[index], context.values[index]
            mixed = self._attend(layer, normed, cos, signed_sin, keys, values, mask)
            x = x + self._added(mixed, layer.after_attention)
            normed = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            mixed = layer.down(gated(layer.gate_up(normed), config.style.activation))
            x = x + self._added(mixed, layer.after_mlp)
            if layer.scalar is not None:
                x = x * layer.scalar
        hidden = rms_norm(x, self._weights.norm, config.rms_norm_eps).view(
            -1, width, config.hidden_size
        )
        first = 0 if config.anchor_predicts else 1
        return hidden[:, first : config.block_size]

    def _added(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm, self.config.rms_norm_eps)

    def _values(self, values: Tensor) -> Tensor:
        if self._weights.value_norm is None:
            return values
        return rms_norm(values, self._weights.value_norm, self.config.rms_norm_eps)

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
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, head_dim)
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
        return layer.out(mixed.reshape(-1, heads * head_dim))
