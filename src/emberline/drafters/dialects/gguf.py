"""Drafts in one GGUF file, as llama.cpp reads them: architectures `dflash` and `eagle3`.

Owns the keys and tensor names of those, both ways. A target layer there is named by the state that
enters it, one more than the output it stands for; a draft column's token (`d2t`) by its id, not by
its distance. Rotary pairs are a head's halves in `dflash` files, as everywhere here, and neighbours
in `eagle3` files, whose q and k rows are therefore interleaved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.drafters.dialects.canonical import CONFIDENCE, W1, W2, DraftCheckpoint, head_fields
from emberline.drafters.dialects.flat import EAGLE3_STEPS, QWEN3
from emberline.models.gguf_convert import LAYER_NAMES
from emberline.models.gguf_file import GGUFFile, read_gguf
from emberline.models.gguf_rope import ROPE_FREQS, rope_parameters
from emberline.models.weights import ModelError, Weights

ARCHITECTURES = ("dflash", "dspark", "eagle3")  # dspark: what dflash was called at first
TOP_NAMES = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "d2t": "d2t",
}
BLOCK_TOP_NAMES = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "markov_w1.weight": W1,
    "markov_w2.weight": W2,
    "conf_proj.weight": CONFIDENCE,
    "conf_proj.bias": "confidence_head.proj.bias",
}
EAGLE3_LAYER_NAMES = {
    **{
        part: name
        for part, name in LAYER_NAMES.items()
        if part not in ("attn_q_norm", "attn_k_norm")
    },
    "attn_norm_2": "hidden_norm",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

FOREIGN_KEYS = {
    "attention.causal": "a causal block",
    "attention.sliding_window": "a sliding window",
    "hyper_connection_count": "DeepSeek-V4's hyper-connections",
    "selector_rank": "DFlash 2's candidate selector",
    "conv_kernel_size": "DFlash 2's convolutions",
    "logit_scale": "scaled logits",
}
"""Keys that, when set, change the arithmetic in a way that no draft here can follow."""


def read(path: Path) -> DraftCheckpoint:
    """The draft in the file; tensors are dequantised when they are asked for.

    Raises:
        KeyError, ValueError: a key is missing or not supported.
        ModelError: the file cannot be read, or one of its tensors has no place in a draft.
    """
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture {architecture!r} is not a draft's, which are {known}")
    for key, what in FOREIGN_KEYS.items():
        if file.metadata.get(f"{architecture}.{key}"):
            raise ValueError(f"{architecture}.{key} is set: {what} is not supported")
    names = _names(file, architecture)
    shapes = {short: file.tensors[name].shape for name, short in names.items()}
    config = _config(file, architecture, shapes)
    found = DraftCheckpoint(
        source=str(path),
        dialect=f"GGUF ({architecture})",
        config=config,
        shapes=shapes,
        load=_loader(file, names, config, str(path)),
    )
    if architecture == "eagle3":
        return replace(found, config={**config, "architectures": ["Qwen3Eagle3Model"]})
    is_dspark = W1 in shapes
    config |= {"architectures": [QWEN3], "markov_rank": 0, "enable_confidence_head": False}
    config |= head_fields(shapes, config["hidden_size"])
    if is_dspark:
        reason = "its DSpark tensors predict from the anchor on"
        return replace(found, slot_rule="anchor", slot_reason=reason)
    reason = "a file without DSpark tensors predicts nothing at the anchor"
    return replace(found, slot_rule="shifted", slot_reason=reason, ambiguous=True)


def _config(
    file: GGUFFile, architecture: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    def key(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise KeyError(f"{architecture}.{name}")
        return value

    heads = int(key("attention.head_count"))
    head_dim = int(key("attention.key_length", int(key("embedding_length")) // heads))
    if int(key("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"rotation of a part of a head of {head_dim} is not supported")
    layers = key("extract_layers" if architecture == "eagle3" else "target_layers")
    config: dict[str, Any] = {
        "hidden_size": int(key("embedding_length")),
        "intermediate_size": int(key("feed_forward_length")),
        "num_hidden_layers": int(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(key("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(key("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope_parameters(file, _decimal(key("rope.freq_base", 1e4)), head_dim),
        "max_position_embeddings": int(key("context_length", 4096)),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "target_layer_ids": [int(layer) - 1 for layer in layers],
        "vocab_size": _vocab_size(file, architecture, shapes),
    }
    if file.metadata.get(f"{architecture}.final_logit_softcapping"):
        config["final_logit_softcapping"] = _decimal(key("final_logit_softcapping"))
    if architecture == "eagle3":
        config["norm_before_residual"] = bool(key("norm_before_residual", False))
        config["ttt_length"] = EAGLE3_STEPS
        if "d2t" in shapes:
            config["draft_vocab_size"] = shapes["d2t"][0]
        return config
    mask = file.metadata.get("tokenizer.ggml.mask_token_id")
    if mask is None:
        raise KeyError("tokenizer.ggml.mask_token_id")
    return {**config, "block_size": int(key("block_size")), "mask_token_id": int(mask)}


def _vocab_size(
    file: GGUFFile, architecture: str, shapes: Mapping[str, tuple[int, ...]]
) -> int | None:
    """V of the target, from whatever tells it; None if nothing does."""
    for name in (W1, "embed_tokens.weight"):
        if name in shapes:
            return shapes[name][0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens else file.metadata.get(f"{architecture}.vocab_size")


def _decimal(value: Any) -> float:
    """The file holds float32: the shortest decimal that rounds to it is what was meant."""
    return float(str(torch.tensor(float(value), dtype=torch.float32).numpy()))


def _canonical_name(name: str, architecture: str) -> str | None:
    """DeepSpec's name of a tensor; None for one that is part of the config."""
    if name == ROPE_FREQS:
        return None
    eagle3 = architecture == "eagle3"
    top = TOP_NAMES if eagle3 else {**TOP_NAMES, **BLOCK_TOP_NAMES}
    if name in top:
        return top[name]
    match = LAYER_TENSOR.fullmatch(name)
    layer_names = EAGLE3_LAYER_NAMES if eagle3 else LAYER_NAMES
    if match is None or match.group(2) not in layer_names:
        raise ModelError(f"tensor {name!r} has no place in a {architecture} draft")
    layer, part, field = match.groups()
    return f"layers.{layer}.{layer_names[part]}.{field}"


def _names(file: GGUFFile, architecture: str) -> dict[str, str]:
    """DeepSpec's name of each tensor but those that are part of the config."""
    named = {name: _canonical_name(name, architecture) for name in file.tensors}
    return {name: short for name, short in named.items() if short is not None}


def _loader(
    file: GGUFFile, names: Mapping[str, str], config: Mapping[str, Any], source: str
) -> Callable[[], Weights]:
    permuted = file.metadata["general.architecture"] == "eagle3"

    def load() -> Weights:
        tensors: dict[str, Tensor] = {}
        for name, short in names.items():
            tensor = file.tensors[name].load()
            if short == "d2t":
                tensor = tensor.long() - torch.arange(len(tensor))
            elif permuted and ".q_proj." in short:
                tensor = split_pairs(tensor, config["num_attention_heads"])
            elif permuted and ".k_proj." in short:
                tensor = split_pairs(tensor, config["num_key_value_heads"])
            tensors[short] = tensor
        return Weights(tensors, source)

    return load


def split_pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows 2i + j of each head to row i + j * half: neighbours become halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def join_pairs(rows: Tensor, heads: int) -> Tensor:
    """Undo `split_pairs`."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()
