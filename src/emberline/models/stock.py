"""Any transformers causal language model over our pages: the broad path to a target.

The modelling code runs as it is; only attention is ours. A step is one packed row of tokens that
travels as a keyword of the forward call to `stock_attention`, where each layer writes its keys and
values into the pages and reads the context back. Logits come from the model's own
`ForCausalLM.forward`, where some families scale or cap them, taps from hooks on its layers. Must
not know sampling, drafts or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.batch import ForwardBatch, KVSpec, TargetOutput
from emberline.cache.kv_pool import KVPool
from emberline.layout import Rows, Scored, Tokens, in_granules
from emberline.models.stock_attention import STEP, AttentionLayer, Call
from emberline.models.stock_parts import headed, watch
from emberline.models.weights import ModelError
from emberline.ops.attention import QueryGroup, attend, plan_attention
from emberline.ops.linear import ROW_GRANULE


@dataclass(frozen=True, slots=True)
class StockModel:
    """A loaded model and what its attention needs. Make one with `stock_load.load_stock`."""

    model: Any  # a transformers causal language model
    layers: tuple[AttentionLayer, ...]  # by layer
    blocks: nn.ModuleList  # the decoder layers, whose outputs are the taps
    max_model_len: int  # tokens a sequence may have

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One entry for each shape of a layer with keys and values of its own."""
        return tuple(layers[0].kv_spec(len(layers)) for layers in _by_shape(self.layers).values())


class StockTarget:
    """A transformers model over our paged KV. Implements the `Target` protocol.

    Args:
        stock: the model.
        taps: 0-based layers whose raw output is returned; -1 is the input of the first.
        num_pages: pages of the pools, the scratch page 0 included.
        page_size: tokens a page.
        poison_padding: padding rows hold NaN instead of zero.

    Raises:
        ModelError: a tap is out of range.
    """

    def __init__(
        self,
        stock: StockModel,
        *,
        taps: tuple[int, ...],
        num_pages: int,
        page_size: int,
        poison_padding: bool = False,
    ) -> None:
        self.model = stock.model
        self.layers = stock.layers
        self._max_model_len = stock.max_model_len
        self._taps = taps
        self._fill = float("nan") if poison_padding else 0.0
        device = str(stock.model.device)
        self._kv_pools = tuple(
            KVPool.allocate(spec, num_pages, page_size, self.dtype, device)
            for spec in stock.kv_specs
        )
        self._places = _places(stock.layers)
        self._embedding = stock.model.get_input_embeddings()
        self._head = headed(stock.model, stock.blocks)
        for tap in taps:
            watch(stock.blocks, tap)
        if taps:
            self._try_head()

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return int(self.model.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Channels of a layer's output: of one tap. An embedding may have another width."""
        return int(self.model.config.hidden_size)

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return self._max_model_len

    @property
    def kv_spec(self) -> KVSpec:
        """All layers of the model, with the heads and widths of the largest."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return KVSpec(
            len(self.layers),
            max(layer.num_kv_heads for layer in self.layers),
            max(layer.head_dim for layer in self.layers),
            window=max(windows) if len(windows) == len(self.layers) else None,
        )

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """A pool for each shape of a layer."""
        return self._kv_pools

    @property
    def row_granule(self) -> int:
        """Rows of a step come in multiples of this: what a token gets then depends on no count."""
        return ROW_GRANULE

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV and computation."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """What the model's embedding module says. [...] int64 -> [..., D]."""
        embedded: Tensor = self._embedding(token_ids)
        return embedded

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states, as the model scales and caps them. [N, D] -> [N, V]."""
        count = hidden.shape[0]
        hidden = F.pad(hidden, (0, 0, 0, in_granules(max(count, 1), ROW_GRANULE) - count))
        return _wide(self._head(inputs_embeds=hidden[None], use_cache=False).logits[0, :count])

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> TargetOutput:
        """Run one step: write KV of every token, return logits of every scored one and the taps."""
        layout = batch.layout
        step = _Step(
            batch, self.layers, self._places, self._kv_pools, _plan(batch, self), self._fill
        )
        scored = layout.row_of_token[layout.token_of_scored]
        num_wanted = in_granules(max(len(scored), 1), ROW_GRANULE)
        wanted = F.pad(scored, (0, num_wanted - len(scored)))
        if not layout.num_tokens:
            return self._nothing()
        logits = self.model(
            input_ids=layout.pack(batch.token_ids, 0)[None],
            position_ids=layout.pack(batch.positions, 0)[None],
            use_cache=False,
            logits_to_keep=wanted,
            **{STEP: step},
        ).logits[0, : layout.num_scored]
        taps = None
        if self._taps:
            rows = torch.cat([step.tapped[tap] for tap in self._taps], -1)
            taps = layout.unpack(Rows(rows[0]))
        return TargetOutput(Scored(_wide(logits)), taps)

    def _try_head(self) -> None:
        """Fail now rather than when a draft needs the head."""
        try:
            self.head(self.embed(torch.zeros(1, dtype=torch.int64, device=self.model.device)))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ModelError(
                f"the head of {type(self.model).__name__} cannot be run by itself, which a draft "
                f"needs ({error})"
            ) from error

    def _nothing(self) -> TargetOutput:
        """The output of a step without tokens."""
        none = torch.zeros(0, dtype=torch.int64, device=self.model.device)
        embedded = self.embed(none)
        width = len(self._taps) * self.hidden_size
        taps = Tokens(embedded.new_zeros(0, width)) if self._taps else None
        return TargetOutput(Scored(_wide(embedded.new_zeros(0, self.vocab_size))), taps)


@dataclass(frozen=True, slots=True)
class _Step:
    """One forward pass, as attention sees it."""

    batch: ForwardBatch
    layers: tuple[AttentionLayer, ...]
    places: tuple[tuple[int, int], ...]  # by layer: its pool, and the layer in it
    pools: tuple[KVPool, ...]
    plans: Mapping[tuple[int, int | None], Sequence[QueryGroup]]  # by share and window
    fill: float  # of padding rows
    tapped: dict[int, Tensor] = field(default_factory=dict)  # [1, R, D], by tap

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, call: Call
    ) -> Tensor:
        """Write the layer's keys and values, and attend over the pages."""
        index = module.layer_idx
        layer, (place, at) = self.layers[index], self.places[index]
        if mask is not None:
            raise ModelError(f"layer {index}: the model makes its attention mask by itself")
        layout, pool = self.batch.layout, self.pools[place]
        q, k, v = (layout.unpack(Rows(x[0].transpose(0, 1))) for x in (query, key, value))
        if layer.source == index:
            pool.write(at, self.batch.slot_mapping, k, v)
        mixed = attend(
            q,
            pool.keys[at],
            pool.values[at],
            self.plans[layer.share, layer.window],
            call.scale,
            call.soft_cap,
            call.sinks,
        )
        rows = layout.pack(Tokens(mixed), self.fill)
        return rows.view(1, layout.num_rows, layer.num_heads, layer.value_dim)


def _plan(
    batch: ForwardBatch, target: StockTarget
) -> dict[tuple[int, int | None], list[QueryGroup]]:
    """The attention plan of every distinct share and sliding window."""
    query_lens = batch.layout.query_start_loc.diff().tolist()
    seq_lens = batch.seq_lens.tolist()
    return {
        (share, window): plan_attention(
            query_lens,
            seq_lens,
            batch.page_table,
            target.kv_pools[0].page_size,
            share=share,
            sliding_window=window,
            dtype=target.dtype,
        )
        for share, window in {(layer.share, layer.window) for layer in target.layers}
    }


def _by_shape(layers: Sequence[AttentionLayer]) -> dict[KVSpec, list[AttentionLayer]]:
    """Layers with keys and values of their own, by the shape of those."""
    shapes: dict[KVSpec, list[AttentionLayer]] = {}
    for index, layer in enumerate(layers):
        if layer.source == index:
            shapes.setdefault(layer.kv_spec(1), []).append(layer)
    return shapes


def _places(layers: Sequence[AttentionLayer]) -> tuple[tuple[int, int], ...]:
    """By layer: the number of its pool, and its number there. Shared keys are at their source's."""
    pools = list(_by_shape(layers))
    used = [0] * len(pools)
    places: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        if layer.source != index:
            places.append(places[layer.source])
            continue
        pool = pools.index(layer.kv_spec(1))
        places.append((pool, used[pool]))
        used[pool] += 1
    return tuple(places)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
