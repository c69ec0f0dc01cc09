"""The geometry of a draft, read from its config under DeepSpec's field names.

Owns what a field means for the arithmetic, and what no draft here can follow. Must not know where
other dialects keep the same facts, nor any tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from emberline.drafters.block_config import BlockStyle, DraftConfig
from emberline.drafters.dialects import DraftCheckpoint
from emberline.drafters.dialects.flat import GEMMA4
from emberline.drafters.eagle3_backbone import Eagle3Config
from emberline.drafters.eagle3_checkpoint import EAGLE3_CLASSES, parse_eagle3
from emberline.drafters.pairing import read_taps
from emberline.models.decoder_fields import Qwen3Fields
from emberline.models.rotary import RopeTable, rope_from_config
from emberline.models.weights import ModelError
from emberline.ops.gated import ACTIVATIONS, Activation

ROPE_FIELDS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)

NEUTRAL: dict[str, float] = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "partial_rotary_factor": 1.0,
}
"""Fields that change the arithmetic in a way that no draft here can follow, unless at this value.

`partial_rotary_factor` is that of the top level: inside the rotary settings their reader judges it.
"""


def read_geometry(checkpoint: DraftCheckpoint) -> DraftConfig | Eagle3Config:
    """Geometry of a draft.

    Raises:
        ModelError: a field is missing, or has a value that is not supported.
    """
    raw = checkpoint.config
    try:
        _refuse_windows(raw)
        _refuse_foreign(raw)
        if raw["architectures"][0] in EAGLE3_CLASSES:
            _refuse_capped_head(checkpoint)
            return parse_eagle3(raw, _rope(raw))
        if raw["architectures"][0] == GEMMA4:
            return _block(checkpoint, _gemma4(raw), _gemma4_style(raw))
        return _block(checkpoint, raw, BlockStyle(activation=_activation(raw, "hidden_act")))
    except (KeyError, TypeError, ValueError, ModelError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{checkpoint.source}: {reason}") from error


def _block(checkpoint: DraftCheckpoint, raw: Mapping[str, Any], style: BlockStyle) -> DraftConfig:
    rank = int(raw.get("markov_rank") or 0)
    taps, num_target_layers = read_taps(raw)
    if raw.get("causal"):
        raise ValueError("a causal block (JetSpec) is not supported")
    if raw.get("enable_confidence_head") and not rank:
        raise ValueError(
            "enable_confidence_head with markov_rank 0: a confidence head without a Markov head is "
            "not supported"
        )
    num_heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    block_size, vocab_size = int(raw["block_size"]), raw.get("vocab_size")
    if block_size < (least := 1 if checkpoint.slot_rule == "anchor" else 2):
        raise ValueError(f"block_size must be at least {least}, got {block_size}")
    softcap = raw.get("final_logit_softcapping")
    gemma4 = style.sandwich_norms
    return DraftConfig(
        algorithm="dspark" if rank else "dflash",
        vocab_size=None if vocab_size is None else int(vocab_size),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw),
        attention_bias=bool(raw.get("attention_bias")),
        block_size=block_size,
        anchor_predicts=checkpoint.slot_rule == "anchor",
        mask_token_id=int(raw["mask_token_id"]),
        taps=taps,
        num_target_layers=num_target_layers,
        markov_rank=rank,
        has_confidence=bool(raw.get("enable_confidence_head")),
        style=style,
        embed_scale=float(hidden_size) ** 0.5 if gemma4 else 1.0,
        logit_softcap=None if softcap is None else float(softcap),
    )


def _refuse_windows(raw: Mapping[str, Any]) -> None:
    """Layers' types decide; without them a window counts unless the file says it is not used."""
    kinds, window = raw.get("layer_types") or (), raw.get("sliding_window")
    used = raw.get("use_sliding_window")
    if any(kind != "full_attention" for kind in kinds) or (
        window and (used or (used is None and not kinds))
    ):
        raise ValueError(f"sliding-window draft layers are not supported (sliding_window {window})")


def _refuse_foreign(raw: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        if raw.get(name, neutral) not in (None, neutral):
            raise ValueError(f"{name} {raw[name]!r} is not supported in a draft, only {neutral}")


def _refuse_capped_head(checkpoint: DraftCheckpoint) -> None:
    # A target's head has its cap inside; whether an EAGLE-3 draft's own has one no dialect says.
    cap = checkpoint.config.get("final_logit_softcapping")
    if cap is not None and "lm_head.weight" in checkpoint.shapes:
        raise ValueError(
            f"final_logit_softcapping {cap} with a head of its own is not supported in EAGLE-3"
        )


def _activation(raw: Mapping[str, Any], field: str) -> Activation:
    name = str(raw.get(field, "silu"))
    if name not in ACTIVATIONS:
        raise ValueError(f"{field} {name!r} is not supported, only {' and '.join(ACTIVATIONS)}")
    return cast(Activation, name)


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Gemma 4's full-attention layers, under their common names."""
    kv_heads = "num_global_key_value_heads" if raw["attention_k_eq_v"] else "num_key_value_heads"
    rope = raw["rope_parameters"]
    return {
        **raw,
        "head_dim": raw["global_head_dim"],
        "num_key_value_heads": raw[kv_heads],
        "rope_parameters": rope.get("full_attention", rope),
    }


def _gemma4_style(raw: Mapping[str, Any]) -> BlockStyle:
    if raw.get("enable_moe_block"):
        raise ValueError("enable_moe_block: experts in a draft are not supported")
    return BlockStyle(
        activation=_activation(raw, "hidden_activation"),
        attention_scale=1.0,
        values_are_keys=bool(raw["attention_k_eq_v"]),
        norm_values=True,
        sandwich_norms=True,
        layer_scalar=True,
    )


def _rope(raw: Mapping[str, Any]) -> RopeTable:
    """Frequencies, through transformers' own reading of the old and the new spelling."""
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "rope_theta" not in raw and "rope_theta" not in nested:
        raise KeyError("rope_theta")
    kept = {name: raw[name] for name in ROPE_FIELDS if raw.get(name) is not None}
    kept.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    table = rope_from_config(Qwen3Fields(**kept))
    if table.max_len is not None:
        raise ValueError("RoPE whose frequencies change with the length is not supported")
    return table
