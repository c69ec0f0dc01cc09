"""A frozen target of any family, as training sees it: transformers' own code over whole sequences.

Owns the attention of that pass. The model is loaded and understood as serving does it, so that no
draft is trained for a target that could not be served. It must not know about drafts or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.models.stock_attention import STEP, AttentionLayer, Call
from emberline.models.stock_load import load_stock
from emberline.models.stock_parts import find_body, headed, watch
from emberline.ops.attention import weigh
from emberline.train.target import soft_capped, wide_linear

PROBES = 16  # states on which the head is compared with the model's own
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest logit


class StockFrozenTarget:
    """A target's weights and its forward pass without a cache. Implements `TrainingTarget`.

    Args:
        folder: a Hugging Face model folder.
        device: where it runs; bfloat16 on CUDA, float32 on a CPU unless `dtype` says otherwise.

    Raises:
        ModelError: the model cannot be served.
        ValueError: its logits are not a matrix times the last hidden state, perhaps capped.
    """

    captures = False

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.device = device
        stock = load_stock(folder, dtype=self.dtype, device=str(device))
        config = stock.model.config
        self.config: dict[str, Any] = config.to_dict()
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embedding = _table(stock.model.get_input_embeddings(), config.vocab_size)
        self.head = _scaled_head(stock.model)
        self._layers, self._blocks = stock.layers, stock.blocks
        self._body = find_body(stock.model, stock.blocks)
        self._watched: set[int] = set()
        self._check_head(headed(stock.model, stock.blocks), str(folder))

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Taps [S, L, A] and last hidden states [S, L, D]: see `TrainingTarget.features`."""
        for tap in set(taps) - self._watched:
            watch(self._blocks, tap)
            self._watched.add(tap)
        step = _Whole(self._layers)
        last = self._body(input_ids=tokens, use_cache=False, **{STEP: step}).last_hidden_state
        return torch.cat([step.tapped[tap] for tap in taps], dim=-1), last

    @torch.no_grad()
    def _check_head(self, own: Any, source: str) -> None:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(PROBES, self.head.shape[1], generator=generator)
        states = states.to(self.device, self.dtype)
        want = own(inputs_embeds=states[None], use_cache=False).logits[0].float()
        got = soft_capped(wide_linear(states, self.head), self.logit_cap)
        if float((got - want).abs().max()) > AGREEMENT[self.dtype] * float(want.abs().max()):
            raise ValueError(
                f"{source}: the logits of {self.config['model_type']} are more than a matrix times "
                "the last hidden state: no draft can be trained for it"
            )


@dataclass(frozen=True, slots=True)
class _Whole:
    """A forward pass over whole sequences, as attention sees it."""

    layers: tuple[AttentionLayer, ...]
    tapped: dict[int, Tensor] = field(default_factory=dict)  # [S, L, D], by tap

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,  # noqa: ARG002
        call: Call,
    ) -> Tensor:
        """Causal attention [S, L, num_heads, value_dim] within the layer's window."""
        window = self.layers[module.layer_idx].window
        plain = call.soft_cap is None and call.sinks is None
        if plain and window is None:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=call.scale, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous()
        seen = _mask(query, window)
        if plain:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=call.scale, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous()
        share = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(share, 1).mT * call.scale
        sinks = None if call.sinks is None else call.sinks[:, None].expand(-1, query.shape[2])
        weights = weigh(scores, seen, call.soft_cap, sinks)
        return (weights @ value.repeat_interleave(share, 1)).transpose(1, 2).contiguous()


def _mask(query: Tensor, window: int | None) -> Tensor:
    """[L, L]: 0 where a query sees a key, else -inf."""
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if window is not None:
        seen &= seen.new_ones(length, length).triu(1 - window)
    mask = torch.zeros(length, length, dtype=query.dtype, device=query.device)
    return mask.masked_fill_(~seen, float("-inf"))


def _table(embedding: nn.Module, vocab_size: int) -> Tensor:
    """[V, D] what an embedding module says; its weights themselves where that is all it does."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    if type(embedding) is nn.Embedding:
        return weight.detach()
    with torch.no_grad():
        table: Tensor = embedding(torch.arange(vocab_size, device=weight.device))
    return table


def _scaled_head(model: Any) -> Tensor:
    """[V, D] the output head with the factor that the family puts on logits."""
    weight: Tensor = model.get_output_embeddings().weight.detach()
    config = model.config
    divisor, factor = (getattr(config, name, None) for name in ("logits_scaling", "logit_scale"))
    if divisor is not None:
        return weight / float(divisor)
    return weight if factor is None else weight * float(factor)
