"""The draft as a trainable module: block backbone, Markov head, confidence head.

Parameter names are DeepSpec's, so that a state dict is a checkpoint. Embedding and output head are
the target's and are passed in. Owns the draft's arithmetic on teacher-forced blocks; it must not
know about losses, data or the paged KV of serving.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.train.config import DraftConfig
from emberline.train.target import rotary_table, rotate

INIT_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class Attention(nn.Module):
    """Block queries over [context | block] keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, rope: Tensor, mask: Any) -> Tensor:
        """Attend.

        Args:
            block: [S, R, D] normed block rows.
            context: [S, L, D] context rows, not normed here.
            rope: [2, S, L + R, Dh] cosines and sines, context first.
            mask: a BlockMask (flex attention) or a dense bool [S, 1, R, L + R].
        """
        num_seqs, length = context.shape[:2]
        source = torch.cat((context, block), dim=1)
        total = source.shape[1]
        by_head = (-1, self.head_dim)
        cos, sin = (part.flatten(0, 1) for part in rope)
        cos_q, sin_q = (part[:, length:].flatten(0, 1) for part in rope)
        query = self.q_norm(self.q_proj(block).unflatten(-1, by_head).flatten(0, 1))
        key = self.k_norm(self.k_proj(source).unflatten(-1, by_head).flatten(0, 1))
        value = self.v_proj(source).unflatten(-1, by_head).transpose(1, 2)
        query = rotate(query, cos_q, sin_q).to(value.dtype)
        key = rotate(key, cos, sin).to(value.dtype)
        query = query.view(num_seqs, -1, *query.shape[1:]).transpose(1, 2)
        key = key.view(num_seqs, total, -1, self.head_dim).transpose(1, 2)
        if isinstance(mask, Tensor):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        else:
            from torch.nn.attention.flex_attention import flex_attention

            out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated linear unit with SiLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm layer of the draft."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, mask: Any) -> Tensor:
        """x [S, R, D] -> [S, R, D]."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class MarkovHead(nn.Module):
    """What a draft token adds to the next one's logits: `w2(latent)`, latent [..., r].

    vanilla: latent = w1[prev]. gated: sigmoid(gate([h; e])) e. rnn: a gated state over the block.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Latents of whole blocks. hidden [N, K, D], embedded [N, K, r] (w1[prev]) -> [N, K, r]."""
        if self.kind == "vanilla":
            return embedded
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1)))
            return gate * embedded
        state = torch.zeros_like(embedded[:, 0])
        latents = []
        for slot in range(hidden.shape[1]):
            state, latent = self.advance(state, hidden[:, slot], embedded[:, slot])
            latents.append(latent)
        return torch.stack(latents, dim=1)

    def advance(self, state: Tensor, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Next state and latent of one slot. state, embedded [N, r]; hidden [N, D]."""
        if self.kind != "rnn":
            return state, self.latent(hidden[:, None], embedded[:, None])[:, 0]
        joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return state, torch.tanh(output)


class ConfidenceHead(nn.Module):
    """A linear probe on [h; w1[prev]], or on h alone without a Markov head."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits [...] of the survival of a draft. hidden [..., D], embedded [..., r]."""
        joined = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        return self.proj(joined).squeeze(-1)  # type: ignore[no-any-return]


class DraftModel(nn.Module):
    """The whole draft without embedding and output head.

    `tap_scale` [A] multiplies the taps before `fc`: their channels differ by orders of magnitude,
    which an orthogonalising optimiser cannot see. Export folds it into `fc`.
    """

    tap_scale: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.tap_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("tap_scale", torch.ones(config.tap_width))

    def initialise(self, embedding: Tensor, seed: int) -> None:
        """Random matrices; w1 from the embedding's principal directions; w2 and confidence zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                drawn = torch.randn(parameter.shape, generator=generator) * INIT_STD
                parameter.data.copy_(drawn)
            elif name.endswith("bias"):
                parameter.data.zero_()
        if self.confidence_head is not None:
            self.confidence_head.proj.weight.data.zero_()
        if self.markov_head is not None:
            rank = self.config.markov_rank
            self.markov_head.markov_w1.weight.data.copy_(principal(embedding, rank))
            self.markov_head.markov_w2.weight.data.zero_()

    def forward(
        self, taps: Tensor, block: Tensor, block_positions: Tensor, angles: Tensor, mask: Any
    ) -> Tensor:
        """Hidden states of every block slot, after the last norm.

        Args:
            taps: [S, L, A] the target's taps; position = index.
            block: [S, R, D] embeddings of the block rows (anchor, mask, mask, ...), block-major.
            block_positions: [S, R] int64.
            angles: [at least L, Dh] float32 rotary angles by position.
            mask: see `Attention`.

        Returns:
            [S, R, D].
        """
        num_seqs, length = taps.shape[:2]
        context = self.hidden_norm(self.fc(taps * self.tap_scale.to(taps.dtype)))
        shared = angles[:length].expand(num_seqs, -1, -1)
        both = torch.cat((shared, angles[block_positions]), dim=1)
        rope = torch.stack((both.cos(), both.sin()))
        x = block
        for layer in self.layers:
            x = layer(x, context, rope, mask)
        return self.norm(x)  # type: ignore[no-any-return]

    def embed_previous(self, previous: Tensor) -> Tensor | None:
        """w1[prev], [...] int64 -> [..., r]; None without a Markov head."""
        if self.markov_head is None:
            return None
        return self.markov_head.markov_w1(previous)  # type: ignore[no-any-return]

    def angles(self, length: int) -> Tensor:
        """Rotary angles [length, Dh] on the model's device."""
        config = self.config
        return rotary_table(config.rope_theta, config.head_dim, length, self.tap_scale.device)


def principal(table: Tensor, rank: int) -> Tensor:
    """The table's rows in its top `rank` principal directions, spread 0.1. [V, rank]."""
    wide = table.float()
    wide = wide - wide.mean(0)
    _, vectors = torch.linalg.eigh(wide.T @ wide)
    top = vectors[:, -rank:].flip(-1) if rank <= vectors.shape[1] else vectors
    scores = wide @ top
    scores = scores / scores.std(0).mean() * 0.1
    return F.pad(scores, (0, rank - scores.shape[1]))
