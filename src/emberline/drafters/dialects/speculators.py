"""Checkpoints of vLLM's speculators: a nested config, often a smaller vocabulary.

Owns that form, both ways. Layer ids there name the state that enters a layer (0 = embeddings), one
more than the output they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from emberline.config import SlotRule
from emberline.drafters.dialects.canonical import (
    CONFIDENCE,
    W1,
    DraftCheckpoint,
    from_tensors,
    head_fields,
    shapes_of,
    unused,
)
from emberline.drafters.dialects.flat import EAGLE3_OPTIONS, EAGLE3_STEPS, QWEN3, eagle3

NAMES = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "eagle3": "Eagle3Speculator"}
DEFAULT_RANK = 256  # of speculators' DSpark config
NESTED = "transformer_layer_config"
KEPT = (
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "norm_before_residual",
    "norm_output",
    "causal",
    "logit_scale",
    "partial_rotary_factor",
    "final_logit_softcapping",
)
"""Fields that stand beside the nested config under DeepSpec's own names."""
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Fields of the nested config that an export carries over."""


def read(
    raw: Mapping[str, Any], tensors: dict[str, Tensor], source: str, target_depth: int | None
) -> DraftCheckpoint:
    """A folder's config and tensors, prefixes stripped.

    Raises:
        KeyError, ValueError: a field is missing or not supported.
    """
    kind = raw["speculators_model_type"]
    if kind not in NAMES:
        raise ValueError(f"speculators_model_type {kind!r} is not supported: {', '.join(NAMES)}")
    config = {**raw[NESTED], **{name: raw[name] for name in KEPT if raw.get(name) is not None}}
    if kind == "eagle3":
        config["eagle_aux_hidden_state_layer_ids"] = raw.get("eagle_aux_hidden_state_layer_ids")
        config["ttt_length"] = _speculative_tokens(raw) or EAGLE3_STEPS
        return eagle3(config, tensors, source, "speculators", target_depth)
    config["target_layer_ids"] = [int(layer) - 1 for layer in raw["aux_hidden_state_layer_ids"]]
    shapes = shapes_of(tensors)
    config |= {"architectures": [QWEN3], **_promised_heads(raw, kind)}
    config |= head_fields(shapes, int(config["hidden_size"]))
    rule, reason = _slot_rule(raw)
    return DraftCheckpoint(
        source=source,
        dialect=f"speculators ({kind})",
        config=config,
        shapes=shapes,
        load=lambda: from_tensors(tensors, source),
        slot_rule=rule,
        slot_reason=reason,
        ambiguous="sample_from_anchor" not in raw,
    )


def write(
    checkpoint: DraftCheckpoint, tables: Mapping[str, Tensor], verifier: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors in this dialect.

    Args:
        checkpoint: the draft.
        tables: `SHARED` of the target, used where the draft has none of its own.
        verifier: the target's `name_or_path` and `architectures`.

    Raises:
        ValueError: the dialect cannot say this draft.
    """
    config, weights = checkpoint.config, checkpoint.load()
    tensors = {name: weights.take(name) for name in weights.names()}
    for name in unused(tensors):
        del tensors[name]
    is_eagle3 = checkpoint.slot_rule is None
    kind = "eagle3" if is_eagle3 else "dspark" if W1 in tensors else "dflash"
    _check(config, tensors, kind)
    reduced = "d2t" in tensors
    raw: dict[str, Any] = {
        "architectures": [NAMES[kind]],
        "speculators_model_type": kind,
        NESTED: {"model_type": "llama" if is_eagle3 else "qwen3"}
        | {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None},
        "draft_vocab_size": len(tensors["d2t"]) if reduced else config["vocab_size"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    layers = [layer + 1 for layer in config["target_layer_ids"]]
    if is_eagle3:
        raw |= {"eagle_aux_hidden_state_layer_ids": layers}
        raw |= {name: bool(config.get(name)) for name in EAGLE3_OPTIONS}
        drafts = int(config["ttt_length"])
    else:
        from_anchor = checkpoint.slot_rule == "anchor"
        raw |= {
            "aux_hidden_state_layer_ids": layers,
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
            "sample_from_anchor": from_anchor,
            "sliding_window_non_causal": False,
        }
        drafts = int(config["block_size"]) - (not from_anchor)
    if kind == "dspark":
        raw |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
        raw |= head_fields(shapes_of(tensors), int(config["hidden_size"]))
    raw["speculators_config"] = {
        "algorithm": kind,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
        "default_proposal_method": "greedy",
        "verifier": dict(verifier),
    }
    if reduced and "t2d" not in tensors:
        tensors["t2d"] = _marked(tensors["d2t"], int(config["vocab_size"]))
    return raw, {**tables, **tensors}


def _check(config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str) -> None:
    gemma = any(name.endswith("pre_feedforward_layernorm.weight") for name in tensors)
    if gemma:
        raise ValueError("speculators has no Gemma 4 backbone: export this draft as deepspec")
    if kind == "eagle3" and any(name.endswith("q_norm.weight") for name in tensors):
        raise ValueError(
            "speculators' EAGLE-3 has no norms of queries and keys: export this draft as deepspec"
        )
    if kind == "dflash" and CONFIDENCE in tensors:
        raise ValueError(
            "speculators' DFlash has no confidence head: export this draft as deepspec"
        )
    if config.get("final_logit_softcapping"):
        raise ValueError(
            "speculators has no final_logit_softcapping: export this draft as deepspec"
        )


def _marked(offsets: Tensor, vocab_size: int) -> Tensor:
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[offsets + torch.arange(len(offsets))] = True
    return marked


def _promised_heads(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """DeepSpec's fields of the heads that the config promises, so that missing tensors are missed.

    What a `dspark` config leaves out is as its class has it: both heads.
    """
    if kind == "dflash":
        return {"markov_rank": 0, "enable_confidence_head": False}
    rank = raw.get("markov_rank")
    return {
        "markov_rank": DEFAULT_RANK if rank is None else int(rank),
        "enable_confidence_head": bool(raw.get("enable_confidence_head", True)),
    }


def _slot_rule(raw: Mapping[str, Any]) -> tuple[SlotRule, str]:
    if "sample_from_anchor" not in raw:
        return "shifted", "an export without sample_from_anchor predicts nothing at the anchor"
    value = bool(raw["sample_from_anchor"])
    return ("anchor" if value else "shifted"), f"sample_from_anchor is {str(value).lower()}"


def _speculative_tokens(raw: Mapping[str, Any]) -> int | None:
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    return None if count is None else int(count)
