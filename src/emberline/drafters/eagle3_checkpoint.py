"""EAGLE-3 checkpoints under DeepSpec's names: what their config says, and the drafter they make.

Owns the fields of that family and what a pairing with a target must agree on. Must not know where
other dialects keep the same facts: they are brought to this spelling before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from emberline.drafters.eagle3 import Eagle3Drafter
from emberline.drafters.eagle3_backbone import Eagle3Backbone, Eagle3Config
from emberline.drafters.pairing import check_taps, check_vocabulary, read_taps
from emberline.drafters.tables import load_embed, load_head
from emberline.models.rotary import RopeTable
from emberline.models.target import Target
from emberline.models.weights import ModelError, Weights

EAGLE3_CLASSES = ("Qwen3Eagle3Model",)


def parse_eagle3(raw: Mapping[str, Any], rope: RopeTable) -> Eagle3Config:
    """Geometry from a config in DeepSpec's spelling.

    Raises:
        KeyError: a field is missing.
        ValueError: a field's value is not supported.
    """
    taps, num_target_layers = read_taps(raw)
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported in EAGLE-3, only silu")
    steps = int(raw["ttt_length"])
    if steps < 1:
        raise ValueError(f"ttt_length must be at least 1, got {steps}")
    num_heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    vocab_size = int(raw["vocab_size"])
    return Eagle3Config(
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or vocab_size),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=rope,
        attention_bias=bool(raw.get("attention_bias")),
        taps=taps,
        num_target_layers=num_target_layers,
        max_draft_tokens=steps,
        norm_before_residual=bool(raw.get("norm_before_residual")),
        norm_before_fc=bool(raw.get("norm_before_fc")),
        fc_norm=bool(raw.get("fc_norm")),
        norm_output=bool(raw.get("norm_output")),
    )


def load_eagle3(
    config: Eagle3Config,
    weights: Weights,
    target: Target,
    *,
    dtype: torch.dtype,
    device: str,
    num_pages: int,
    page_size: int,
    num_draft_tokens: int | None = None,
) -> Eagle3Drafter:
    """The drafter of a checkpoint, drafting for `target`; whether all is used the caller checks.

    Each draft reads the one before, so that `num_draft_tokens` may be any number; without one it is
    as many as the draft was trained to take on its own output.

    Raises:
        ModelError: a tensor is missing or misshapen, or the draft was made for another target.
    """
    if weights.has("mask_hidden"):
        raise ModelError(f"{weights.source}: P-EAGLE (mask_hidden) is not supported")
    if num_draft_tokens is not None:
        config = replace(config, max_draft_tokens=num_draft_tokens)
    check_vocabulary(weights.source, config.vocab_size, target)
    if config.draft_vocab_size != config.vocab_size and not weights.has("d2t"):
        raise ModelError(
            f"{weights.source}: a draft vocabulary of {config.draft_vocab_size} of "
            f"{config.vocab_size} ids needs the map d2t, which is missing"
        )
    check_taps(config.taps, config.num_target_layers, weights, target)
    backbone = Eagle3Backbone(
        config,
        weights,
        embed=load_embed(weights, target, config.hidden_size, dtype, device),
        tap_width=target.hidden_size,
        dtype=dtype,
        device=device,
        num_pages=num_pages,
        page_size=page_size,
    )
    head = load_head(weights, target, config.hidden_size, dtype, device)
    return Eagle3Drafter(backbone, head)
