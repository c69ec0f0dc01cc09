"""The Gemma 4 backbone against a plain computation of what is described."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.drafters.dialects.canonical import SHARED

from support.drafter_world import (
    BLOCK,
    HIDDEN,
    LAYERS,
    LENGTHS,
    TinyTarget,
    World,
    load,
)
from support.tiny_draft import (
    EVERYONE,
    gemma4_config,
    gemma4_tensors,
    proposals,
)


@dataclass(frozen=True)
class Gemma4Reference:
    """The block as it is described, one request, every key and value made anew."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x if name is None else x * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first quarter of each half turns, the rest stands."""
        dim = self.config["global_head_dim"]
        turning = dim // 8
        inv = 1e6 ** (-2.0 * torch.arange(turning) / dim)
        angle = F.pad(positions[:, None] * inv, (0, dim // 2 - turning))
        left, right = x.chunk(2, dim=-1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def hidden(self, taps: Tensor, anchor: int) -> Tensor:
        """[BLOCK, D] of the block after `taps` [n, A]."""
        dim, count = self.config["global_head_dim"], len(taps)
        context = self.norm(self.linear(taps, "fc"), "hidden_norm")
        ids = torch.tensor([anchor] + [self.config["mask_token_id"]] * (BLOCK - 1))
        x = self.tensors["embed_tokens.weight"][ids] * HIDDEN**0.5
        positions = torch.arange(count + BLOCK)
        for layer in range(LAYERS):
            at = f"layers.{layer}."
            block = self.norm(x, at + "input_layernorm")
            both = torch.cat((context, block))
            q = self.linear(block, at + "self_attn.q_proj").unflatten(-1, (-1, dim))
            k = self.linear(both, at + "self_attn.k_proj").unflatten(-1, (-1, dim))
            v = k
            if not self.config["attention_k_eq_v"]:
                v = self.linear(both, at + "self_attn.v_proj").unflatten(-1, (-1, dim))
            q = self.rotate(self.norm(q, at + "self_attn.q_norm"), positions[count:])
            k = self.rotate(self.norm(k, at + "self_attn.k_norm"), positions)
            v, group = self.norm(v, None), q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            weights = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)  # scores are not scaled
            mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            mixed = self.linear(mixed, at + "self_attn.o_proj")
            x = x + self.norm(mixed, at + "post_attention_layernorm")
            normed = self.norm(x, at + "pre_feedforward_layernorm")
            gate = F.gelu(self.linear(normed, at + "mlp.gate_proj"), approximate="tanh")
            wide = self.linear(gate * self.linear(normed, at + "mlp.up_proj"), at + "mlp.down_proj")
            x = (x + self.norm(wide, at + "post_feedforward_layernorm")) * self.tensors[
                at + "layer_scalar"
            ]
        return self.norm(x, "norm")

    def first_logits(self, taps: Tensor, anchor: int) -> Tensor:
        """[V] of the first draft."""
        cap = self.config["final_logit_softcapping"]
        base = torch.tanh(self.linear(self.hidden(taps, anchor)[0], "lm_head") / cap) * cap
        latent = self.tensors["markov_head.markov_w1.weight"][anchor]
        return base + self.linear(latent, "markov_head.markov_w2")


@pytest.mark.parametrize("keys_are_values", [True, False])
def test_gemma4_computes_what_is_described(tmp_path: Path, keys_are_values: bool) -> None:
    config = gemma4_config(keys_are_values=keys_are_values)
    tensors = gemma4_tensors(keys_are_values=keys_are_values)
    world = World(load(tmp_path, config, tensors)).observe_all()
    logits = world.propose(EVERYONE, [1.0] * 4).logits
    assert logits is not None
    reference = Gemma4Reference(config, tensors)
    for req, length in enumerate(LENGTHS):
        anchor = int(world.tokens[req, length])
        expected = reference.first_logits(world.taps[req, :length], anchor)
        torch.testing.assert_close(logits[req, 0], expected, atol=2e-4, rtol=1e-4)


def test_gemma4_shares_a_target_of_its_own_scale_and_cap(tmp_path: Path) -> None:
    """A target's embedding and head have their scale and cap inside: copies of them are shared."""

    class GemmaTarget(TinyTarget):
        def embed(self, token_ids: Tensor) -> Tensor:
            return self.embedding[token_ids] * torch.tensor(HIDDEN**0.5)

        def head(self, hidden: Tensor) -> Tensor:
            return torch.tanh(super().head(hidden) / 3.0) * 3.0

    target = GemmaTarget()
    tensors = gemma4_tensors(keys_are_values=True)
    tensors |= dict(zip(SHARED, (target.embedding, target.matrix), strict=True))
    config = gemma4_config(keys_are_values=True)
    drafter = load(tmp_path / "shared", config, tensors, target)
    before = proposals(drafter)[1]
    plain = load(tmp_path / "own", config, tensors, TinyTarget())
    assert torch.allclose(proposals(plain)[1], before, atol=1e-5)
    target.matrix = target.matrix.roll(1, 0)
    assert not torch.allclose(proposals(drafter)[1], before, atol=1e-3)
