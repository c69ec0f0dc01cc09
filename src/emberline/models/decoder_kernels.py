"""The fused decoder's layers where nothing may wait for the host: what a captured step runs.

Reads host integers and device tensors of a batch only, so no shape and no launch depends on a
value. A residual sum may be left to the norm that comes next, so a layer's raw output is there
once the next layer has begun. Must not know how a batch came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from emberline.batch import ForwardBatch
from emberline.cache.kv_pool import KVPool
from emberline.layout import Rows, Scored, Tokens
from emberline.models.decoder_config import DecoderConfig
from emberline.models.decoder_weights import DecoderWeights
from emberline.models.weights import ModelError
from emberline.ops.gated import ACTIVATIONS, Activation
from emberline.ops.kernels import Kernels
from emberline.ops.linear import Stream
from emberline.ops.paged_attention import PagedContext


@dataclass(frozen=True, slots=True)
class DecoderKernels:
    """A decoder's weights and pages with the ops that run over them."""

    kernels: Kernels
    config: DecoderConfig
    weights: DecoderWeights
    kv_pool: KVPool
    rope: Tensor  # [L, 2, head_dim]: see `RopeTable.tabulate`
    activation: Activation
    fill: float  # of padding rows

    @classmethod
    def prepare(
        cls,
        kernels: Kernels,
        config: DecoderConfig,
        weights: DecoderWeights,
        kv_pool: KVPool,
        max_model_len: int,
        fill: float,
    ) -> DecoderKernels:
        """Make what every step will read.

        Raises:
            ModelError: the kernels lack the model's activation.
        """
        if config.hidden_act not in ACTIVATIONS:
            raise ModelError(
                f"hidden_act {config.hidden_act!r} has no kernel, only {' and '.join(ACTIVATIONS)} "
                "have: say --target-backend stock, or run it on a CPU"
            )
        embedding = weights.embedding
        rope = config.rope.to(str(embedding.device)).tabulate(max_model_len, embedding.dtype)
        activation = cast(Activation, config.hidden_act)
        return cls(kernels, config, weights, kv_pool, rope, activation, fill)

    def run(
        self, batch: ForwardBatch, embedded: Tokens, taps: tuple[int, ...]
    ) -> tuple[Scored, list[Tensor]]:
        """Run the layers.

        Args:
            batch: may be a bucket.
            embedded: [T, D].
            taps: layers whose raw output is returned; -1 is `embedded`.

        Returns:
            Normed hidden states [Q, D], and [T, D] of every tap.
        """
        kernels, layout, eps = self.kernels, batch.layout, self.config.rms_norm_eps
        pool = self.kv_pool
        context = PagedContext(
            batch.seq_lens, batch.page_table, pool.page_size, kernels.fixed_order
        )
        cos, signed_sin = kernels.look_up(self.rope, batch.positions).unbind(1)
        stream = Stream(layout.pack(embedded, self.fill))
        tapped: dict[int, Tensor] = {}
        layers = self.weights.layers
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        for index, layer in enumerate(layers):
            x, qkv = kernels.norm_linear(stream, layer.input_norm, eps, layer.qkv)
            if index - 1 in taps:
                tapped[index - 1] = x
            keys, values = pool.keys[index], pool.values[index]
            q = kernels.place_qkv(
                layout.unpack(Rows(qkv)),
                cos, signed_sin, keys, values, batch.slot_mapping, norm=layer.qk_norm, eps=eps,
            )  # fmt: skip
            mixed = kernels.paged_attention(
                q, keys, values, context, layout.query_start_loc, layout.max_query_len,
                scale=self.config.head_dim**-0.5, sliding_window=layer.sliding_window,
            )  # fmt: skip
            mixed = layout.pack(Tokens(mixed), self.fill)
            stream = kernels.linear_add(mixed, layer.out, x, layer.post_norm)
            x, wide = kernels.norm_gated(
                stream, layer.post_norm, eps, layer.gate_up, self.activation
            )
            stream = kernels.linear_add(wide, layer.down, x, next_norms[index])
        x, normed = kernels.add_rms_norm(stream.x, stream.update, self.weights.norm, eps)
        tapped[self.config.num_layers - 1] = x
        outputs: list[Tensor] = [layout.unpack(Rows(tapped[tap])) for tap in taps]
        return layout.score(layout.unpack(Rows(normed))), outputs
