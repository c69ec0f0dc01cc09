"""An EAGLE-3 draft as a trainable module (Li et al. 2025), under DeepSpec's parameter names.

Row t of the draft's one layer reads the embedding of token t + 1 beside the fused taps of token t
and predicts token t + 2. A chain starts at the row before an anchor; its next steps read the next
tokens beside the draft's own last state ("training-time test"). Every chain sees the rows up to
its first one, whose keys are computed once for the whole sequence, and its own later steps.

Owns the draft's arithmetic; it must not know about losses, data or the paged KV of serving.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from emberline.train.backbone import INIT_STD, MLP, RMSNorm
from emberline.train.config import DraftConfig
from emberline.train.target import rotary_table, rotate


class Chains(NamedTuple):
    """n chains in each of S sequences, at one step. H = Hkv * G query heads."""

    hidden: Tensor  # [S, n, D] what the next step reads: fused taps, later the draft's own state
    keys: Tensor  # [S, L - 1, Hkv, Dh] of the rows
    values: Tensor  # [S, L - 1, Hkv, Dh]
    hides: Tensor  # [S, n, L - 1] bool, rows that a chain may not see
    positions: Tensor  # [S, n] int64 of the next step's row
    angles: Tensor  # [at least L + K, Dh] float32
    own_keys: tuple[Tensor, ...] = ()  # each [S, n, Hkv, Dh]; the first step's is among the rows
    own_values: tuple[Tensor, ...] = ()
    first: bool = True


class Attention(nn.Module):
    """Attention of chains over rows and their own steps; inputs are two states wide."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.kv_heads = head_dim, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def keys_and_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Of inputs x [S, m, 2D] with angles [S or 1, m, Dh]: both [S, m, Hkv, Dh]."""
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return self._turn(key, angles).to(value.dtype), value

    def forward(self, x: Tensor, chains: Chains) -> Tensor:
        """One step of every chain. x [S, n, 2D]; the step's own keys are in `chains` already."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        query = self._turn(query, chains.angles[chains.positions]).to(chains.keys.dtype)
        query = query.view(*x.shape[:2], self.kv_heads, -1, self.head_dim)  # [S, n, Hkv, G, Dh]
        scores = torch.einsum("snkgd,slkd->snkgl", query, chains.keys).float()
        scores = scores.masked_fill(chains.hides[:, :, None, None], float("-inf"))
        if chains.own_keys:
            keys, values = (torch.stack(own, 2) for own in (chains.own_keys, chains.own_values))
            own = torch.einsum("snkgd,snjkd->snkgj", query, keys).float()
            scores = torch.cat((scores, own), dim=-1)
        chances = torch.softmax(scores * self.head_dim**-0.5, dim=-1).to(chains.values.dtype)
        length = chains.keys.shape[1]
        out = torch.einsum("snkgl,slkd->snkgd", chances[..., :length], chains.values)
        if chains.own_keys:
            out = out + torch.einsum("snkgj,snjkd->snkgd", chances[..., length:], values)
        return self.o_proj(out.flatten(2))  # type: ignore[no-any-return]

    def _turn(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotary embedding of x [S, m, H, Dh] by angles [S or 1, m, Dh]."""
        num_seqs, count = x.shape[:2]
        flat = angles.expand(num_seqs, -1, -1).flatten(0, 1)
        turned = rotate(x.flatten(0, 1), flat.cos(), flat.sin())
        return turned.view(num_seqs, count, *turned.shape[1:])


class Layer(nn.Module):
    """The one layer: embedding and state side by side into the attention, residual on the state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The attention's input, [..., D] twice -> [..., 2D]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def forward(self, x: Tensor, chains: Chains) -> Tensor:
        """States after one step, [S, n, D]. x [S, n, 2D]."""
        hidden = chains.hidden + self.self_attn(x, chains)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Model(nn.Module):
    """The whole draft without embedding and output head.

    `tap_scale` [A] multiplies the taps before `fc`; export folds it in (see `DraftModel`).
    """

    tap_scale: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.tap_width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("tap_scale", torch.ones(config.tap_width))

    def initialise(self, embedding: Tensor, seed: int) -> None:  # noqa: ARG002
        """Random matrices. The embedding is not looked at."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                drawn = torch.randn(parameter.shape, generator=generator) * INIT_STD
                parameter.data.copy_(drawn)

    def begin(self, taps: Tensor, embedded: Tensor, anchors: Tensor, angles: Tensor) -> Chains:
        """Chains that have made no step yet.

        Args:
            taps: [S, L, A] the target's taps; position = index.
            embedded: [S, L, D] embeddings of the sequences' tokens.
            anchors: [S, n] int64, at least 1: the position of each chain's first token.
            angles: [at least L + K, Dh] float32 rotary angles by position.
        """
        fused = self.fc(taps * self.tap_scale.to(taps.dtype))[:, :-1]
        layer = self._layer
        rows = layer.join(embedded[:, 1:], fused)
        length = rows.shape[1]
        keys, values = layer.self_attn.keys_and_values(rows, angles[None, :length])
        positions = anchors - 1
        row = torch.arange(length, device=taps.device)
        index = positions[..., None].expand(-1, -1, fused.shape[-1])
        return Chains(
            hidden=fused.gather(1, index),
            keys=keys,
            values=values,
            hides=row > positions[..., None],
            positions=positions,
            angles=angles,
        )

    def advance(self, chains: Chains, embedded: Tensor) -> tuple[Tensor, Chains]:
        """One step of every chain.

        Args:
            embedded: [S, n, D] of the token that the step reads: the anchor, then what follows.

        Returns:
            What the output head takes, [S, n, D], and the chains a step on.
        """
        layer = self._layer
        x = layer.join(embedded, chains.hidden)
        own_keys, own_values = chains.own_keys, chains.own_values
        if not chains.first:
            key, value = layer.self_attn.keys_and_values(x, chains.angles[chains.positions])
            own_keys, own_values = (*own_keys, key), (*own_values, value)
        at_step = chains._replace(own_keys=own_keys, own_values=own_values, first=False)
        hidden = layer(x, at_step)
        after = at_step._replace(hidden=hidden, positions=chains.positions + 1)
        return self.norm(hidden), after

    def forward(
        self, taps: Tensor, block: Tensor, positions: Tensor, angles: Tensor, embedded: Tensor
    ) -> Tensor:
        """Teacher-forced chains, after the last norm.

        Args:
            taps: [S, L, A]; embedded: [S, L, D] of the sequences' tokens.
            block: [S, R, D] embeddings of the tokens that the steps read, chain-major.
            positions: [S, R] int64 of those tokens. A chain whose anchor is at 0 has no row to
                start from and is computed as if the anchor were at 1.
            angles: [at least L + K, Dh].

        Returns:
            [S, R, D].
        """
        size = self.config.block_size
        steps = block.view(block.shape[0], -1, size, block.shape[-1])  # [S, n, K, D]
        anchors = positions[:, ::size].clamp(min=1)
        chains = self.begin(taps, embedded, anchors, angles)
        found = []
        for step in range(size):
            hidden, chains = self.advance(chains, steps[:, :, step])
            found.append(hidden)
        return torch.stack(found, dim=2).flatten(1, 2)

    def angles(self, length: int) -> Tensor:
        """Rotary angles [length, Dh] on the model's device."""
        config = self.config
        return rotary_table(config.rope_theta, config.head_dim, length, self.tap_scale.device)

    @property
    def _layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer
