"""A tiny EAGLE-3 draft with random weights, in DeepSpec's spelling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.drafter_world import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TAPS,
    TARGET_LAYERS,
    VOCAB,
    WIDE,
)

STEPS = 5


def eagle3_config(**changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["Qwen3Eagle3Model"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "num_target_layers": TARGET_LAYERS,
        "target_layer_ids": list(TAPS),
        "ttt_length": STEPS,
    }
    return {name: value for name, value in {**raw, **changes}.items() if value is not None}


def eagle3_tensors(
    num_layers: int = 1,
    *,
    qk_norm: bool = True,
    bias: bool = False,
    whole_norm: bool = False,
    tap_norms: bool = False,
    draft_vocab: int | None = None,
    width: int = HIDDEN,
) -> dict[str, Tensor]:
    """The options are what the tensors tell; `draft_vocab` of them come with a head and `d2t`."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    fused = len(TAPS) * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, fused), "norm": (width,)}
    biases: dict[str, Tensor] = {}
    if whole_norm:
        shapes["input_norm"] = (fused,)
    if tap_norms:
        shapes |= {f"fc_norm.{i}": (HIDDEN,) for i in range(len(TAPS))}
    outs = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for layer in range(num_layers):
        at = f"layers.{layer}."
        for name, out in outs.items():
            shapes[f"{at}self_attn.{name}_proj"] = (out, width if layer else 2 * width)
        shapes[f"{at}self_attn.o_proj"] = (width, HEADS * HEAD_DIM)
        if bias:
            for name, out in {**outs, "o": width}.items():
                biases[f"{at}self_attn.{name}_proj.bias"] = random(out)
        if qk_norm:
            shapes |= {f"{at}self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
        norms = ["input_layernorm", "post_attention_layernorm", *["hidden_norm"][layer:]]
        shapes |= {at + name: (width,) for name in norms}
        shapes |= {f"{at}mlp.{name}_proj": (WIDE, width) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj"] = (width, WIDE)
    tensors = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors = {name: 1 + t if t.ndim == 1 else t for name, t in tensors.items()}
    if draft_vocab is not None:
        tensors["lm_head.weight"] = random(draft_vocab, width)
        ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
    return {**tensors, **biases}
