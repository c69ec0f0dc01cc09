"""Our own forward pass for the Llama-shaped families: the fast path to a target.

Owns the weights, the target's KV pool and the row space: padding rows exist between `pack` and
`unpack` here and never reach the pool, the logits or the taps. Must not know sampling, drafts or
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from emberline.batch import ForwardBatch, KVSpec, TargetOutput
from emberline.cache.kv_pool import KVPool
from emberline.layout import Rows, Scored, TokenLayout, Tokens
from emberline.models.decoder_config import DecoderConfig
from emberline.models.weights import ModelError, Weights
from emberline.ops.attention import QueryGroup, attend, plan_attention
from emberline.ops.linear import Linear
from emberline.ops.norm import rms_norm
from emberline.ops.rotary import rotate

MIN_ROWS = 8
"""From this many rows on, a row's result does not depend on the count (lab notes, CPU forward)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [D]
    qkv: Linear  # D -> (num_heads + 2 num_kv_heads) * head_dim
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], a head's own norm each
    out: Linear
    post_norm: Tensor  # [D]
    gate_up: Linear  # D -> 2 intermediate
    down: Linear
    sliding_window: int | None


class Decoder:
    """A decoder-only model over its own paged KV. Implements the `Target` protocol.

    Make one with `Decoder.load`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: list[_Layer],
        norm: Tensor,
        head: Linear,
        *,
        kv_pool: KVPool,
        taps: tuple[int, ...],
        max_model_len: int,
        poison_padding: bool,
    ) -> None:
        self.config = config
        self.kv_pool = kv_pool
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._taps = taps
        self._max_model_len = max_model_len
        self._fill = float("nan") if poison_padding else 0.0
        self._act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]
        self._rope = config.rope.to(str(embedding.device))
        self._scale = config.head_dim**-0.5

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

        Raises:
            ModelError: weights do not fit the config; a tap or length is out of range.
        """
        for tap in taps:
            if not -1 <= tap < config.num_layers:
                raise ModelError(f"tap {tap} is not a layer: -1 .. {config.num_layers - 1}")
        loader = _Loader(config, weights, dtype, device)
        embedding = loader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [loader.layer(i) for i in range(config.num_layers)]
        norm = loader.take("model.norm.weight", config.hidden_size)
        head = Linear.pack(loader.head(embedding))
        weights.finish(allow=("*rotary_emb.inv_freq",))
        return cls(
            config,
            embedding,
            layers,
            norm,
            head,
            kv_pool=KVPool.allocate(config.kv_spec, num_pages, page_size, dtype, device),
            taps=taps,
            max_model_len=_model_len(config, max_model_len),
            poison_padding=poison_padding,
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
    def min_rows(self) -> int:
        """Least rows a step should run for its results to be independent of the row count."""
        return MIN_ROWS

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV and computation."""
        return self._embedding.dtype

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings. [...] int64 -> [..., D]."""
        return torch.nn.functional.embedding(token_ids, self._embedding)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states. [N, D] -> [N, V] float32 (float64 in float64)."""
        count = hidden.shape[0]
        if count < MIN_ROWS:
            padded = hidden.new_zeros(MIN_ROWS, hidden.shape[1])
            padded[:count] = hidden
            hidden = padded
        logits = self._head(hidden)[:count]
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> TargetOutput:
        """Run one step: write KV of every token, return logits of every scored one and the taps."""
        layout = batch.layout
        if not layout.num_tokens:
            return self._nothing()
        plans = self._plan(batch)
        cos, signed_sin = self._rope.cos_sin(batch.positions, self.dtype)
        embedded = Tokens(self.embed(batch.token_ids))
        tapped = {-1: embedded} if -1 in self._taps else {}
        x = layout.pack(embedded, self._fill)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, layout, cos, signed_sin)
            self.kv_pool.write(index, batch.slot_mapping, k, v)
            keys, values = self.kv_pool.keys[index], self.kv_pool.values[index]
            mixed = attend(q, keys, values, plans[layer.sliding_window], self._scale)
            x = self._rest(layer, x, layout.pack(Tokens(mixed), self._fill))
            if index in self._taps:
                tapped[index] = layout.unpack(x)
        hidden = layout.score(layout.unpack(x))
        logits = self.head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        taps = torch.cat([tapped[tap] for tap in self._taps], dim=-1) if self._taps else None
        return TargetOutput(Scored(logits), None if taps is None else Tokens(taps))

    def _nothing(self) -> TargetOutput:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        device = self._embedding.device
        logits = torch.zeros(0, self.vocab_size, dtype=wide, device=device)
        width = self.config.hidden_size * len(self._taps)
        taps = torch.zeros(0, width, dtype=self.dtype, device=device) if self._taps else None
        return TargetOutput(Scored(logits), None if taps is None else Tokens(taps))

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
        self, layer: _Layer, x: Rows, layout: TokenLayout, cos: Tensor, signed_sin: Tensor
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

    def _rest(self, layer: _Layer, x: Rows, mixed: Rows) -> Rows:
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


class _Loader:
    """Checkpoint names of one model, cast tensor by tensor."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, dtype: torch.dtype, device: str
    ) -> None:
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
            return Linear.pack(weight)
        return Linear.pack(
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

    def layer(self, index: int) -> _Layer:
        c, at = self._config, f"model.layers.{index}."
        kv_width, width = c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim
        qkv = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        attn, mlp, d = f"{at}self_attn.", f"{at}mlp.", c.hidden_size
        return _Layer(
            input_norm=self.take(f"{at}input_layernorm.weight", d),
            qkv=self.linear(attn, qkv, d, c.qkv_bias),
            qk_norm=self.qk_norm(attn) if c.qk_norm else None,
            out=self.linear(attn, {"o_proj": d}, width, c.out_bias),
            post_norm=self.take(f"{at}post_attention_layernorm.weight", d),
            gate_up=self.linear(mlp, gate_up, d, c.mlp_bias),
            down=self.linear(mlp, {"down_proj": d}, c.intermediate_size, c.mlp_bias),
            sliding_window=c.sliding_windows[index],
        )
