"""Our own forward pass for the Llama-shaped families: the fast path to a target.

Owns the target's KV pool and the row space: padding rows exist between `pack` and `unpack` and
never reach the pool, the logits or the taps. There are two ways through the layers: the CPU's,
whose attention is planned on the host, and `decoder_kernels.py`. Must not know sampling, drafts or
requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.batch import ForwardBatch, KVSpec, TargetOutput
from emberline.cache.kv_pool import KVPool
from emberline.layout import Rows, Scored, TokenLayout, Tokens
from emberline.models.activation import activation
from emberline.models.decoder_config import DecoderConfig
from emberline.models.decoder_kernels import DecoderKernels
from emberline.models.decoder_weights import DecoderLayer, DecoderWeights
from emberline.models.weights import ModelError, Weights
from emberline.ops.attention import QueryGroup, attend, plan_attention
from emberline.ops.kernels import Kernels
from emberline.ops.linear import ROW_GRANULE
from emberline.ops.norm import rms_norm
from emberline.ops.rotary import rotate


class Decoder:
    """A decoder-only model over its own paged KV. Implements the `Target` protocol.

    Make one with `Decoder.load`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        kv_pool: KVPool,
        taps: tuple[int, ...],
        max_model_len: int,
        poison_padding: bool,
        kernels: Kernels | None,
    ) -> None:
        self.config = config
        self.kv_pool = kv_pool
        self._weights = weights
        self._taps = taps
        self._max_model_len = max_model_len
        self._fill = float("nan") if poison_padding else 0.0
        self._act = activation(config.hidden_act)
        self._rope = config.rope.to(str(weights.embedding.device))
        self._scale = config.head_dim**-0.5
        self._fast: DecoderKernels | None = None
        if kernels is not None:
            self._fast = DecoderKernels.prepare(
                kernels, config, weights, kv_pool, max_model_len, self._fill
            )

    @classmethod
    def load(
        cls,
        config: DecoderConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: str,
        taps: tuple[int, ...],
        num_pages: int,
        page_size: int,
        max_model_len: int | None = None,
        poison_padding: bool = False,
        kernels: Kernels | None = None,
    ) -> Decoder:
        """Take the model's tensors out of `weights` and allocate the KV pool.

        Args:
            config: of the same checkpoint.
            weights: every tensor must be one that this model uses.
            dtype: of weights, KV and computation.
            device: torch device.
            taps: 0-based layers whose raw output is returned; -1 is the embedding output.
            num_pages: pages of the pool, the scratch page 0 included.
            page_size: tokens a page.
            max_model_len: most tokens a sequence may have; None for what the checkpoint allows.
            poison_padding: padding rows hold NaN instead of zero.
            kernels: the ops of a forward that never waits for the host; None for the CPU's own.

        Raises:
            ModelError: weights do not fit the config; a tap or length is out of range; the kernels
                lack the model's activation.
        """
        for tap in taps:
            if not -1 <= tap < config.num_layers:
                raise ModelError(f"tap {tap} is not a layer: -1 .. {config.num_layers - 1}")
        taken = DecoderWeights.take(config, weights, dtype, device, pack=kernels is None)
        return cls(
            config,
            taken,
            kv_pool=KVPool.allocate(config.kv_spec, num_pages, page_size, dtype, device),
            taps=taps,
            max_model_len=_model_len(config, max_model_len),
            poison_padding=poison_padding,
            kernels=kernels,
        )

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Channels of a layer's output: of one tap. An embedding may have another width."""
        return self.config.hidden_size

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return self._max_model_len

    @property
    def kv_spec(self) -> KVSpec:
        """KV kept in the pages."""
        return self.config.kv_spec

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """Where the KV is kept."""
        return (self.kv_pool,)

    @property
    def row_granule(self) -> int:
        """Rows of a step come in multiples of this: what a token gets then depends on no count."""
        return ROW_GRANULE if self._fast is None else 1

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV and computation."""
        return self._weights.embedding.dtype

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings. [...] int64 -> [..., D]."""
        if self._fast is not None:
            return self._fast.kernels.look_up(self._weights.embedding, token_ids)
        return torch.nn.functional.embedding(token_ids, self._weights.embedding)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states. [N, D] -> [N, V] float32 (float64 in float64).

        With kernels in the model's own dtype: who reads them there widens what it reads.
        """
        if self._fast is not None:
            return self._fast.kernels.linear(hidden, self._weights.head)
        logits = self._weights.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> TargetOutput:
        """Run one step: write KV of every token, return logits of every scored one and the taps.

        With kernels nothing waits for the host, and the batch may be a bucket: tokens past the last
        live one belong to no request, and what they give is anything.
        """
        if not batch.layout.num_tokens:
            return self._nothing()
        embedded = Tokens(self.embed(batch.token_ids))
        run = self._planned if self._fast is None else self._fast.run
        normed, outputs = run(batch, embedded, self._taps)
        taps = torch.cat(outputs, dim=-1) if self._taps else None
        return TargetOutput(Scored(self.head(normed)), None if taps is None else Tokens(taps))

    def _nothing(self) -> TargetOutput:
        hidden = self._weights.embedding.new_zeros(0, self.hidden_size)
        taps = hidden.new_zeros(0, self.hidden_size * len(self._taps)) if self._taps else None
        logits = Scored(self.head(hidden))
        return TargetOutput(logits, None if taps is None else Tokens(taps))

    def _planned(
        self, batch: ForwardBatch, embedded: Tokens, taps: tuple[int, ...]
    ) -> tuple[Scored, list[Tensor]]:
        """Normed hidden states [Q, D] and tapped outputs [T, D]; attention planned on the host."""
        layout = batch.layout
        plans = self._plan(batch)
        cos, signed_sin = self._rope.cos_sin(batch.positions, self.dtype)
        tapped = {-1: embedded}
        x = layout.pack(embedded, self._fill)
        for index, layer in enumerate(self._weights.layers):
            q, k, v = self._qkv(layer, x, layout, cos, signed_sin)
            self.kv_pool.write(index, batch.slot_mapping, k, v)
            keys, values = self.kv_pool.keys[index], self.kv_pool.values[index]
            mixed = attend(q, keys, values, plans[layer.sliding_window], self._scale)
            x = self._rest(layer, x, layout.pack(Tokens(mixed), self._fill))
            if index in taps:
                tapped[index] = layout.unpack(x)
        hidden = layout.score(layout.unpack(x))
        normed = rms_norm(hidden, self._weights.norm, self.config.rms_norm_eps)
        return Scored(normed), [tapped[tap] for tap in taps]

    def _plan(self, batch: ForwardBatch) -> dict[int | None, list[QueryGroup]]:
        """The attention plan of every distinct sliding window."""
        query_lens = batch.layout.query_start_loc.diff().tolist()
        seq_lens = batch.seq_lens.tolist()
        return {
            window: plan_attention(
                query_lens,
                seq_lens,
                batch.page_table,
                self.kv_pool.page_size,
                share=self.config.num_heads // self.config.num_kv_heads,
                sliding_window=window,
                dtype=self.dtype,
            )
            for window in set(self.config.sliding_windows)
        }

    def _qkv(
        self, layer: DecoderLayer, x: Rows, layout: TokenLayout, cos: Tensor, signed_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [T, num_heads, head_dim], rotated k and v [T, num_kv_heads, head_dim]."""
        c = self.config
        qkv = layer.qkv(rms_norm(x, layer.input_norm, c.rms_norm_eps))
        live = layout.unpack(Rows(qkv)).view(layout.num_tokens, -1, c.head_dim)
        qk, v = torch.split(live, [c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, c.rms_norm_eps)
        qk = rotate(qk, cos, signed_sin)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v

    def _rest(self, layer: DecoderLayer, x: Rows, mixed: Rows) -> Rows:
        """Everything after attention: output projection, residuals, MLP."""
        h = x + layer.out(mixed)
        normed = rms_norm(h, layer.post_norm, self.config.rms_norm_eps)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return Rows(h + layer.down(self._act(gate) * up))


def _model_len(config: DecoderConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.context_len
    if wanted < 1:
        raise ModelError(f"max_model_len must be at least 1, got {wanted}")
    if config.rope.max_len is not None and wanted > config.rope.max_len:
        raise ModelError(
            f"max_model_len {wanted} is past {config.rope.max_len}, where this model's rotary "
            "frequencies change with the sequence's length: keys in the pages would be wrong"
        )
    if wanted > config.context_len:
        raise ModelError(
            f"max_model_len {wanted} is past the model's context of {config.context_len} tokens: "
            "use at most that"
        )
    return wanted
