"""Tiny block drafts with random weights in DeepSpec's spelling, for the target of drafter_world."""

from __future__ import annotations

from typing import Any

import torch

from emberline.drafters.base import Drafter

from support.drafter_world import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    RANK,
    TAPS,
    TARGET_LAYERS,
    VOCAB,
    WIDE,
    World,
)

EVERYONE, MIXED = [0, 1, 2, 3], [0.0, 0.7, 1.0, 1.3]


def draft_config(**changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "layer_types": ["full_attention"] * LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "target_layer_ids": list(TAPS),
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {name: value for name, value in {**raw, **changes}.items() if value is not None}


def draft_tensors(head: str | None = "vanilla", *, bias: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    shapes = {"fc": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    outs = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    biases: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        for name, out in outs.items():
            shapes[f"{at}self_attn.{name}_proj"] = (out, HIDDEN)
        shapes[f"{at}self_attn.o_proj"] = (HIDDEN, HEADS * HEAD_DIM)
        if bias:
            for name, out in {**outs, "o": HIDDEN}.items():
                biases[f"{at}self_attn.{name}_proj.bias"] = random(out)
        for name in ("q_norm", "k_norm"):
            shapes[f"{at}self_attn.{name}"] = (HEAD_DIM,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[at + name] = (HIDDEN,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}mlp.{name}"] = (WIDE, HIDDEN)
        shapes[f"{at}mlp.down_proj"] = (HIDDEN, WIDE)
    if head is not None:
        shapes["markov_head.markov_w1"] = shapes["markov_head.markov_w2"] = (VOCAB, RANK)
        shapes["confidence_head.proj"] = (1, HIDDEN + RANK)
        biases["confidence_head.proj.bias"] = random(1)
    if head == "gated":
        shapes["markov_head.gate_proj"] = (RANK, HIDDEN + RANK)
        biases["markov_head.gate_proj.bias"] = random(RANK)
    if head == "rnn":
        shapes["markov_head.joint_proj"] = (3 * RANK, 2 * RANK + HIDDEN)
        biases["markov_head.joint_proj.bias"] = random(3 * RANK)
    tensors = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            tensors[name] = 1 + tensor
    return {**tensors, **biases}


DFLASH = {"markov_rank": 0, "enable_confidence_head": False}
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "markov_rank": None,
    "markov_head_type": None,
    "enable_confidence_head": None,
    "confidence_head_with_markov": None,
    "target_layer_ids": None,
    "mask_token_id": None,
    "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": VOCAB - 1},
}
GEMMA4_DIM, GEMMA4_KV = 16, 1


def gemma4_config(*, keys_are_values: bool, **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "architectures": ["Gemma4DSparkModel"],
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": GEMMA4_DIM,
        "num_global_key_value_heads": GEMMA4_KV,
        "attention_k_eq_v": keys_are_values,
        "final_logit_softcapping": 3.0,
        "sliding_window": 64,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    return draft_config(**{**own, **changes})


def gemma4_tensors(*, keys_are_values: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    kv = (GEMMA4_KV if keys_are_values else KV_HEADS) * GEMMA4_DIM
    tensors = {
        name: tensor for name, tensor in draft_tensors().items() if not name.startswith("layers.")
    }
    tensors |= {
        "embed_tokens.weight": random(VOCAB, HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        outs = {"q": HEADS * GEMMA4_DIM, "k": kv} | ({} if keys_are_values else {"v": kv})
        for name, out in outs.items():
            tensors[f"{at}self_attn.{name}_proj.weight"] = random(out, HIDDEN)
        tensors[f"{at}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * GEMMA4_DIM)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = 1 + random(GEMMA4_DIM)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            tensors[f"{at}{name}_layernorm.weight"] = 1 + random(HIDDEN)
        for name, shape in (
            ("gate", (WIDE, HIDDEN)),
            ("up", (WIDE, HIDDEN)),
            ("down", (HIDDEN, WIDE)),
        ):
            tensors[f"{at}mlp.{name}_proj.weight"] = random(*shape)
        tensors[f"{at}layer_scalar"] = 1 + random(1)
    return tensors


def proposals(drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Drafts, the logits they were drawn from, confidences: four requests, four temperatures."""
    proposal = World(drafter).observe_all().propose(EVERYONE, MIXED)
    assert proposal.logits is not None
    return proposal.token_ids, proposal.logits, proposal.confidence


def same_drafts(ours: Drafter, theirs: Drafter) -> bool:
    """Whether two drafters draft the same, bit for bit; their confidences to rounding."""
    (ids, logits, sure), (ids2, logits2, sure2) = proposals(ours), proposals(theirs)
    same = torch.equal(ids, ids2) and torch.equal(logits, logits2)
    if sure is None or sure2 is None:
        return same and sure is sure2
    return same and torch.allclose(sure, sure2, atol=1e-6)
