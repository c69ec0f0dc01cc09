"""Tiny random models of many families, in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
    "factor": 2.0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 12,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 12, "layer_types": MIXED, "query_pre_attn_scalar": 20},
    ),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": 12,
            "layer_types": MIXED,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "sliding_window": 12,
            "layer_types": MIXED,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 20, "original_max_position_embeddings": 512}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 12, "logit_scale": 0.25}),
    "gpt-oss": (
        "gpt_oss",
        {
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 1, **EXPERTS}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            **EXPERTS,
        },
    ),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "afmoe": (
        "afmoe",
        {
            "sliding_window": 12,
            "layer_types": MIXED,
            "num_experts": 4,
            "num_dense_layers": 1,
            **EXPERTS,
        },
    ),
    "jetmoe": ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
}


def tiny_model(family: str, **changes: Any) -> Any:
    """A random model; norms, biases and sinks are random too, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = FAMILIES.get(family, (family, {}))
    fields = {**SIZES, **fields, **changes}
    # None takes a field out: some configs have it as a property.
    given = {name: value for name, value in fields.items() if value is not None}
    config = AutoConfig.for_model(model_type, **given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.5 if "sinks" in name else 0.2)
            else:
                parameter.normal_(std=0.08)
    return model


def save_model(folder: Path, family: str, **changes: Any) -> Any:
    """Write a tiny model into `folder` and return it."""
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return model


def save_draft(folder: Path, model: Any, taps: tuple[int, ...], block_size: int = 4) -> None:
    """A random DSpark draft for a tiny model, with embedding and head left to the target."""
    config = model.config
    width, vocab, rank, wide, head_dim = config.hidden_size, config.vocab_size, 8, 48, 16
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "num_target_layers": config.num_hidden_layers,
        "target_layer_ids": list(taps),
        "block_size": block_size,
        "mask_token_id": vocab - 1,
        "markov_rank": rank,
        "enable_confidence_head": True,
    }
    attention = {"q_proj": 2 * head_dim, "k_proj": head_dim, "v_proj": head_dim}
    shapes = {
        "fc": (width, len(taps) * width),
        **{f"layers.0.self_attn.{name}": (out, width) for name, out in attention.items()},
        "layers.0.self_attn.o_proj": (width, 2 * head_dim),
        "layers.0.mlp.gate_proj": (wide, width),
        "layers.0.mlp.up_proj": (wide, width),
        "layers.0.mlp.down_proj": (width, wide),
        "markov_head.markov_w1": (vocab, rank),
        "markov_head.markov_w2": (vocab, rank),
        "confidence_head.proj": (1, width + rank),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
    for name in ("hidden_norm", "norm", "layers.0.input_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(width)
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    for name in ("q_norm", "k_norm"):
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.ones(head_dim)
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
