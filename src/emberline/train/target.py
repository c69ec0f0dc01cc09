"""The frozen target as training sees it: features of whole sequences, and lockstep sampling.

Owns a forward pass for the Llama-shaped families (Llama, Mistral, SmolLM, Qwen2, Qwen3) over rows
[N, D], with which both the causal pass and the one-token step of `Lockstep` are written. It must
not know about drafts or losses. Serving has its own decoder with paged KV; nothing of the pass
is shared with it, so that a fault in one shows up as disagreement with the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.models.stock_load import load_whole

DIGESTED = 64  # entries of a weight that tell it from another
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, projections merged."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 Hkv) * Dh, D]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [Dh]
    k_norm: Tensor | None  # [Dh]
    out: Tensor  # [D, H * Dh]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]


@dataclass(frozen=True, slots=True)
class Shape:
    """The integers a layer needs."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation in float32. [..., D] -> [..., D]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split layout. x [N, H, Dh]; cos, sin [N or 1, Dh]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


def rotary_table(theta: float, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Angles by position, [length, Dh] float32: both halves the same."""
    powers = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * theta**-powers
    return torch.cat((angles, angles), dim=-1).float()


def project(
    x: Tensor, layer: Layer, shape: Shape, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, H, Dh], keys and values [N, Hkv, Dh] of rows x [N, D]."""
    fused = F.linear(norm(x, layer.input_norm, shape.eps), layer.qkv, layer.qkv_bias)
    fused = fused.view(x.shape[0], -1, shape.head_dim)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    query, key, value = torch.split(fused, sizes, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        query = norm(query, layer.q_norm, shape.eps)
        key = norm(key, layer.k_norm, shape.eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def finish(x: Tensor, attended: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """Output projection, residuals and MLP. x [N, D], attended [N, H * Dh] -> [N, D]."""
    x = x + F.linear(attended, layer.out)
    gate, up = F.linear(norm(x, layer.post_norm, shape.eps), layer.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def is_fast(config: Mapping[str, Any]) -> bool:
    """Whether `FrozenTarget` implements all of a model, by its config.json."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    odd = slides or rope.get("rope_type", rope.get("type", "default")) != "default"
    odd = odd or config.get("attention_bias") or config.get("mlp_bias")
    return (
        config.get("model_type") in FAMILIES
        and not odd
        and config.get("hidden_act", "silu") == "silu"
    )


class FrozenTarget:
    """A target's weights and its forward pass without a cache. Implements `TrainingTarget`.

    Args:
        folder: a Hugging Face model folder of one of `FAMILIES`, with plain rotary embeddings and
            without a sliding window.
        device: where it runs; bfloat16 on CUDA, float32 on a CPU unless `dtype` says otherwise.
        compiled: fuse the pieces with torch.compile (fixed batch shapes only).
    """

    logit_cap: float | None = None
    captures = True

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
    ) -> None:
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        model = load_whole(folder, dtype, "cpu")
        config = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"{folder}: targets of type {config.model_type!r} cannot be trained for; "
                f"expected one of {', '.join(FAMILIES)}"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"{folder}: rope_type {rope['rope_type']!r} is not supported here")
        self.config: dict[str, Any] = config.to_dict()
        self.device = device
        self.dtype = dtype
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.shape = Shape(
            config.num_attention_heads, config.num_key_value_heads, head_dim, config.rms_norm_eps
        )
        self.theta = float(rope.get("rope_theta") or config.rope_theta)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach().to(device)
        head = model.get_output_embeddings().weight.detach()
        tied = bool(config.tie_word_embeddings)
        self.head: Tensor = self.embedding if tied else head.to(device)
        self.final_norm: Tensor = model.model.norm.weight.detach().to(device)
        self.layers = [_merge(layer, device) for layer in model.model.layers]
        self.project: Callable[..., tuple[Tensor, Tensor, Tensor]] = project
        self.finish: Callable[..., Tensor] = finish
        self.logits: Callable[[Tensor, Tensor], Tensor] = wide_linear
        if compiled:
            self.project = torch.compile(project, dynamic=False)
            self.finish = torch.compile(finish, dynamic=False)

    def digest(self) -> str:
        """Tells this target from others: of its type, and of some entries of every weight."""
        entries = hashlib.sha256(f"{self.config['model_type']} {self.shape}".encode())
        layers = (getattr(layer, name) for layer in self.layers for name in layer.__slots__)
        for weight in (self.embedding, self.head, self.final_norm, *layers):
            if weight is not None:
                some = weight.flatten()[:: max(1, weight.numel() // DIGESTED)]
                entries.update(some.float().cpu().numpy().tobytes())
        return entries.hexdigest()[:12]

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run whole sequences causally.

        Args:
            tokens: [S, L] int64, no padding on the left (padding on the right is harmless).
            taps: layers whose raw outputs are wanted; -1 is the embedding.

        Returns:
            The taps concatenated [S, L, A], and the last hidden state after the final norm
            [S, L, D] (`wide_linear` of it with `head` is the logits).
        """
        num_seqs, length = tokens.shape
        angles = rotary_table(self.theta, self.shape.head_dim, length, self.device)
        cos = angles.cos().to(self.dtype).repeat(num_seqs, 1)
        sin = angles.sin().to(self.dtype).repeat(num_seqs, 1)
        x = self.embedding[tokens].flatten(0, 1)
        found = {-1: x}
        for index, layer in enumerate(self.layers):
            query, key, value = (
                part.view(num_seqs, length, -1, self.shape.head_dim).transpose(1, 2)
                for part in self.project(x, layer, self.shape, cos, sin)
            )
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            x = self.finish(x, attended.transpose(1, 2).flatten(0, 1).flatten(1), layer, self.shape)
            if index in taps:
                found[index] = x
        last = norm(x, self.final_norm, self.shape.eps).view(num_seqs, length, -1)
        joined = torch.cat([found[tap] for tap in taps], dim=-1).view(num_seqs, length, -1)
        return joined, last


class Lockstep:
    """One-token steps of a batch in which every row is at the same position.

    Rows start together, so attention needs no mask: at position t the keys are exactly the first
    t + 1 entries of the cache. On CUDA each position is captured once as a graph and replayed in
    every later round.
    """

    def __init__(self, target: FrozenTarget, batch_size: int, seq_len: int) -> None:
        self.target = target
        shape = target.shape
        size = (len(target.layers), batch_size, shape.kv_heads, seq_len, shape.head_dim)
        self.keys = torch.empty(size, dtype=target.dtype, device=target.device)
        self.values = torch.empty_like(self.keys)
        angles = rotary_table(target.theta, shape.head_dim, seq_len, target.device)
        self.cos = angles.cos().to(target.dtype)
        self.sin = angles.sin().to(target.dtype)
        self.attend: Callable[[Tensor, Tensor, Tensor, int], Tensor] = lockstep_attention
        if target.device.type == "cuda":
            from emberline.train import kernels

            self.attend = kernels.lockstep_attention

    def forward(self, token_ids: Tensor, position: int) -> Tensor:
        """Logits [B, V] float32 of the token after `token_ids` [B], all at `position`."""
        target = self.target
        shape = target.shape
        cos = self.cos[position : position + 1]
        sin = self.sin[position : position + 1]
        x = target.embedding[token_ids]
        for index, layer in enumerate(target.layers):
            query, key, value = target.project(x, layer, shape, cos, sin)
            keys, values = self.keys[index], self.values[index]
            keys[:, :, position] = key
            values[:, :, position] = value
            attended = self.attend(query, keys, values, position + 1)
            x = target.finish(x, attended.flatten(1), layer, shape)
        return target.logits(norm(x, target.final_norm, shape.eps), target.head)


def lockstep_attention(query: Tensor, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """Attention of one token a sequence over the first `count` entries of its cache.

    query [B, H, Dh]; keys, values [B, Hkv, L, Dh] -> [B, H, Dh].
    """
    # The query heads of one KV head become rows of one small product: no mask, no repetition of
    # the keys.
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[2])
    scores = grouped @ keys[:, :, :count].mT
    chances = torch.softmax(scores.float() * query.shape[-1] ** -0.5, dim=-1)
    return (chances.to(values.dtype) @ values[:, :, :count]).flatten(1, 2)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, D] times weight [V, D] transposed, in float32 whatever the inputs' dtype."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """c * tanh(logits / c) (Gemma 2); the logits themselves without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _merge(module: Any, device: torch.device) -> Layer:
    attention, mlp = module.self_attn, module.mlp

    def cat(*parts: Any) -> Tensor:
        return torch.cat([part.detach() for part in parts]).to(device)

    def optional(owner: Any, name: str) -> Tensor | None:
        found = getattr(owner, name, None)
        return None if found is None else cat(found.weight)

    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = attention.q_proj.bias is not None
    return Layer(
        input_norm=cat(module.input_layernorm.weight),
        qkv=cat(*(part.weight for part in projections)),
        qkv_bias=cat(*(part.bias for part in projections)) if has_bias else None,
        q_norm=optional(attention, "q_norm"),
        k_norm=optional(attention, "k_norm"),
        out=cat(attention.o_proj.weight),
        post_norm=cat(module.post_attention_layernorm.weight),
        gate_up=cat(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=cat(mlp.down_proj.weight),
    )
