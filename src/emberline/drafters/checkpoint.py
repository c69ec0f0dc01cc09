"""Draft checkpoints: which dialect a folder is, and the drafter it makes.

Owns every rule about config fields and tensor names, so that block.py and dspark.py see one
spelling (DeepSpec's). What is not understood is refused with its reason: a wrong guess about a
tap or a slot does not crash, it only ruins acceptance.

Read are DeepSpec's `Qwen3DSparkModel` (DSpark, and DFlash as its rank 0), SpecForge's
`DSparkDraftModel` and z-lab's `DFlashDraftModel`; each in any float dtype, or with int8 tensors
as `models/int8.py` has them, dequantised at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from emberline.drafters.base import Drafter
from emberline.drafters.block import BlockBackbone, DraftConfig
from emberline.drafters.dflash import DFlashDrafter
from emberline.drafters.dspark import DSparkDrafter, load_confidence_head, load_markov_head
from emberline.drafters.eagle3_backbone import Eagle3Config
from emberline.drafters.eagle3_checkpoint import EAGLE3_CLASSES, load_eagle3, parse_eagle3
from emberline.drafters.tables import load_embed, load_head
from emberline.models.int8 import expand
from emberline.models.rotary import RopeTable, rope_from_config
from emberline.models.target import Target
from emberline.models.weights import ModelError, Weights, load_folder, read_json

ANCHOR_PREDICTS = {
    "Qwen3DSparkModel": True,
    "DSparkDraftModel": True,
    "DFlashDraftModel": False,
    "Qwen3DFlashDraftModel": False,
}
"""Class to slot rule: whether slot k predicts anchor + k + 1, or slot j predicts anchor + j."""

REFUSED = {
    "Gemma4DSparkModel": "DeepSpec's Gemma 4 backbone is not supported yet",
    "DominoDraftModel": "SpecForge's Domino head is not supported yet",
    "Qwen3DFlash2DraftModel": "DFlash 2 (convolutions, candidate selector) is not supported yet",
    "LlamaForCausalLMEagle3": "EAGLE-3 (SpecForge) is not supported yet",
    "LlamaEagle3DraftModel": "EAGLE-3 (NeMo) is not supported yet",
    "PEagleDraftModel": "P-EAGLE is not supported yet",
}

PREFIXES = (
    "module.",
    "draft_model.",
    "model.",
    "language_model.model.dspark.",
    "logit_head.",
)
"""Wrappers' prefixes, stripped in this order."""

ROPE_FIELDS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
UNUSED = ("*rotary_emb.inv_freq",)
W1 = "markov_head.markov_w1.weight"


def read_draft_config(folder: Path) -> DraftConfig | Eagle3Config:
    """What the engine must know before target and drafter exist: taps, K, KV.

    Reads `config.json` as it is: going through a library's config classes drops fields.

    Raises:
        ModelError: the folder holds no draft of a supported dialect; the message says which
            dialect or field is in the way.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    try:
        return _parse(raw)
    except (KeyError, TypeError, ValueError, ModelError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path}: {reason}") from error


def load_drafter(
    folder: Path,
    target: Target,
    *,
    dtype: torch.dtype,
    device: str,
    num_pages: int,
    page_size: int,
    num_draft_tokens: int | None = None,
    confidence_temperatures: Sequence[float] | None = None,
) -> Drafter:
    """The drafter in `folder`, drafting for `target`, with KV for `num_pages` pages.

    Embedding and head are the target's unless the checkpoint brings different ones.
    `confidence_temperatures` calibrate its confidences, one for each draft of the checkpoint's
    block however many are drawn; None leaves them as they were trained.

    Raises:
        ModelError: the checkpoint is not understood whole, or was made for another target, or the
            temperatures for another block.
    """
    folder = Path(folder)
    config = read_draft_config(folder)
    weights = normalise(load_folder(folder))
    if isinstance(config, Eagle3Config):
        if confidence_temperatures is not None:
            raise _no_confidences(folder)
        eagle3 = load_eagle3(
            config,
            weights,
            target,
            dtype=dtype,
            device=device,
            num_pages=num_pages,
            page_size=page_size,
            num_draft_tokens=num_draft_tokens,
        )
        weights.finish(UNUSED)
        return eagle3
    _check_target(folder, config, weights, target, device)
    backbone = BlockBackbone(
        config,
        weights,
        embed=load_embed(weights, target, config.hidden_size, dtype, device),
        dtype=dtype,
        device=device,
        num_pages=num_pages,
        page_size=page_size,
        min_rows=target.min_rows,
    )
    head = load_head(weights, target, config.hidden_size, dtype, device)
    has_confidence = config.has_confidence or weights.has("confidence_head.proj.weight")
    temperatures = (1.0,) * config.max_draft_tokens
    if confidence_temperatures is not None:
        temperatures = _temperatures(folder, config, has_confidence, confidence_temperatures)
    drafter: Drafter
    if config.markov_rank or weights.has(W1):
        markov = load_markov_head(weights, config.vocab_size, config.hidden_size, dtype, device)
        confidence = None
        if has_confidence:
            rank = weights.take(W1).shape[1]
            confidence = load_confidence_head(
                weights, config.hidden_size, rank, temperatures, dtype, device
            )
        drafter = DSparkDrafter(backbone, head, markov, confidence, num_draft_tokens)
    else:
        drafter = DFlashDrafter(backbone, head, num_draft_tokens)
    weights.finish(UNUSED)
    return drafter


def normalise(weights: Weights) -> Weights:
    """The same checkpoint under DeepSpec's names, int8 matrices as float32.

    Raises:
        ModelError: two tensors have one name once their prefixes are gone, or int8 values lack
            their scales.
    """
    tensors: dict[str, Tensor] = {}
    for name in weights.names():
        short = name
        for prefix in PREFIXES:
            short = short.removeprefix(prefix)
        if short in tensors:
            raise ModelError(f"{weights.source}: two tensors are called {short!r}")
        tensors[short] = weights.take(name)
    return Weights(expand(tensors, weights.source), weights.source)


def _parse(raw: Mapping[str, Any]) -> DraftConfig | Eagle3Config:
    nested = raw.get("dflash_config") or {}
    name = _dialect(raw, nested)
    if name in EAGLE3_CLASSES:
        return parse_eagle3(raw, _rope(raw))
    merged = {**raw, **nested}
    anchor_predicts = ANCHOR_PREDICTS[name] or nested.get("projector_type") == "dspark"
    rank = int(merged.get("markov_rank") or 0)
    if rank and not anchor_predicts:
        raise ValueError(f"{name} predicts nothing at the anchor, but markov_rank is {rank}")
    taps = tuple(int(layer) for layer in merged["target_layer_ids"])
    num_target_layers = raw.get("num_target_layers")
    if not taps or min(taps) < -1 or list(taps) != sorted(set(taps)):
        raise ValueError(f"target_layer_ids must rise strictly from -1 on, got {list(taps)}")
    if num_target_layers is not None and max(taps) >= num_target_layers:
        raise ValueError(f"target_layer_ids {list(taps)} go beyond {num_target_layers} layers")
    num_heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    return DraftConfig(
        algorithm="dspark" if rank else "dflash",
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw),
        attention_bias=bool(raw.get("attention_bias")),
        block_size=int(merged["block_size"]),
        anchor_predicts=anchor_predicts,
        mask_token_id=int(merged["mask_token_id"]),
        taps=taps,
        num_target_layers=num_target_layers,
        markov_rank=rank,
        has_confidence=bool(merged.get("enable_confidence_head")),
    )


def _dialect(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> str:
    """The class a config names; refuses what this loader cannot honour."""
    if "speculators_model_type" in raw:
        raise ValueError("the vLLM speculators dialect is not supported yet")
    if "dspark_block_size" in raw:
        raise ValueError("drafts inside a DeepSeek-V4 target are not supported yet")
    names = raw.get("architectures") or [None]
    name = str(names[0])
    if name in REFUSED:
        raise ValueError(f"{name}: {REFUSED[name]}")
    if name not in ANCHOR_PREDICTS and name not in EAGLE3_CLASSES:
        known = ", ".join((*ANCHOR_PREDICTS, *EAGLE3_CLASSES))
        raise ValueError(f"{name} is not a draft this version knows; supported are {known}")
    if nested.get("projector_type", "dspark") != "dspark":
        raise ValueError(f"projector_type {nested['projector_type']!r} is not supported yet")
    if nested.get("causal"):
        raise ValueError("a causal block (JetSpec) is not supported yet")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()) or (
        raw.get("use_sliding_window") and raw.get("sliding_window")
    ):
        raise ValueError("sliding-window draft layers are not supported yet")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported, only silu")
    return name


def _rope(raw: Mapping[str, Any]) -> RopeTable:
    """Frequencies, through transformers' own reading of the old and the new spelling."""
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "rope_theta" not in raw and "rope_theta" not in nested:
        raise KeyError("rope_theta")
    kept = {name: raw[name] for name in ROPE_FIELDS if raw.get(name) is not None}
    kept.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    table = rope_from_config(Qwen3Config(**kept))
    if table.max_len is not None:
        raise ValueError("RoPE whose frequencies change with the length is not supported")
    return table


def _check_target(
    folder: Path, config: DraftConfig, weights: Weights, target: Target, device: str
) -> None:
    """Refuse a draft that was made for another target."""
    rows = weights.take(W1).shape[0] if weights.has(W1) else config.vocab_size
    reduced = [
        name
        for name in ("lm_head.weight", "markov_head.markov_w2.weight")
        if weights.has(name) and weights.take(name).shape[0] < target.vocab_size
    ]
    if weights.has("d2t") or (reduced and rows == target.vocab_size):
        raise ModelError(f"{folder}: reduced draft vocabularies (d2t) are not supported yet")
    if rows != target.vocab_size or config.vocab_size != target.vocab_size:
        raise ModelError(
            f"{folder}: made for a vocabulary of {rows}, the target has {target.vocab_size}"
        )
    anchor = torch.zeros(1, dtype=torch.int64, device=device)
    width = target.embed(anchor).shape[-1]
    if config.hidden_size != width:
        raise ModelError(
            f"{folder}: made for a hidden size of {config.hidden_size}, the target has {width}"
        )
    columns = weights.take("fc.weight").shape[-1]
    if columns != len(config.taps) * config.hidden_size:
        raise ModelError(
            f"{folder}: {len(config.taps)} tapped layers of width {config.hidden_size} do not "
            f"fill fc.weight's {columns} columns"
        )
    if not config.anchor_predicts and weights.has(W1):
        raise ModelError(
            f"{folder}: has a Markov head, but its class predicts nothing at the anchor"
        )
    if target.kv_spec is None:
        return
    depth = target.kv_spec.num_layers
    if max(config.taps) >= depth:
        raise ModelError(f"{folder}: taps layer {max(config.taps)}, the target has {depth} layers")
    if config.num_target_layers not in (None, depth):
        raise ModelError(
            f"{folder}: made for a target of {config.num_target_layers} layers, not of {depth}"
        )


def _temperatures(
    folder: Path, config: DraftConfig, has_confidence: bool, given: Sequence[float]
) -> tuple[float, ...]:
    if not has_confidence:
        raise _no_confidences(folder)
    if len(given) != config.max_draft_tokens:
        raise ModelError(
            f"{folder}: calibrated with {len(given)} temperatures, but its block has "
            f"{config.max_draft_tokens} drafts: calibrate this draft"
        )
    return tuple(given)


def _no_confidences(folder: Path) -> ModelError:
    return ModelError(f"{folder}: calibrated, but without confidences: remove the calibration")
